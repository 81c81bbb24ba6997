"""A stand-in for the model inside a vLLM server: the layers' class names and attributes are vLLM's."""

from types import SimpleNamespace
from typing import ClassVar

import torch

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, VOCABULARY = 16, 4, 2, 4, 32, 100


class Layer(torch.nn.Module):
    """A stand-in for a layer of vLLM: parameters of no size, as on CPU after packing, and the attributes of the real one."""

    def __init__(self, *parameters: str, **attributes):
        super().__init__()
        for name in parameters:
            self.register_parameter(name, torch.nn.Parameter(torch.empty(0)))
        for name, value in attributes.items():
            setattr(self, name, value)


def kind(name: str) -> type[Layer]:
    return type(name, (Layer,), {})


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))


class Served(torch.nn.Module):
    """One layer of Qwen2 as vLLM holds it on one of `ranks` ranks; a vocabulary is padded to a multiple of 64 and divided."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, rank: int = 0, ranks: int = 1, tied: bool = False, words: int = VOCABULARY):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        per_rank = -(-words // 64) * 64 // ranks
        vocabulary = {
            "org_vocab_size": words,
            "embedding_dim": HIDDEN,
            "tp_size": ranks,
            "shard_indices": SimpleNamespace(
                org_vocab_start_index=min(rank * per_rank, words),
                org_vocab_end_index=min((rank + 1) * per_rank, words),
            ),
        }
        place = {"tp_rank": rank, "tp_size": ranks}
        layer = torch.nn.ModuleDict(
            {
                "self_attn": torch.nn.ModuleDict(
                    {
                        "qkv_proj": kind("QKVParallelLinear")(
                            "weight",
                            "bias",
                            input_size=HIDDEN,
                            head_size=HEAD,
                            total_num_heads=HEADS,
                            total_num_kv_heads=KV_HEADS,
                            num_heads=HEADS // ranks,
                            num_kv_heads=max(1, KV_HEADS // ranks),
                            num_kv_head_replicas=max(1, ranks // KV_HEADS),
                            **place,
                        ),
                        "o_proj": kind("RowParallelLinear")(
                            "weight", input_size=HEADS * HEAD, output_size=HIDDEN, **place
                        ),
                    }
                ),
                "mlp": torch.nn.ModuleDict(
                    {
                        "gate_up_proj": kind("MergedColumnParallelLinear")(
                            "weight", input_size=HIDDEN, output_sizes=[FFN, FFN], **place
                        ),
                        "down_proj": kind("RowParallelLinear")("weight", input_size=FFN, output_size=HIDDEN, **place),
                    }
                ),
                "input_layernorm": RMSNorm(),
            }
        )
        embedding = kind("VocabParallelEmbedding")("weight", **vocabulary)
        self.model = torch.nn.ModuleDict({"embed_tokens": embedding, "layers": torch.nn.ModuleList([layer])})
        self.lm_head = kind("ParallelLMHead")("weight", **vocabulary)
        if tied:
            self.lm_head.weight = embedding.weight


LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    f"{LAYER}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    f"{LAYER}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    f"{LAYER}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    f"{LAYER}self_attn.q_proj.bias": (HEADS * HEAD,),
    f"{LAYER}self_attn.k_proj.bias": (KV_HEADS * HEAD,),
    f"{LAYER}self_attn.v_proj.bias": (KV_HEADS * HEAD,),
    f"{LAYER}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    f"{LAYER}mlp.gate_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.up_proj.weight": (FFN, HIDDEN),
    f"{LAYER}mlp.down_proj.weight": (HIDDEN, FFN),
    f"{LAYER}input_layernorm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
