"""A stand-in for the model inside a vLLM server: the layers' class names and attributes are vLLM's, and where it keeps what it loads."""

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

    def __init__(self, rank: int = 0, ranks: int = 1, tied: bool = False, words: int = VOCABULARY, dtype=None):
        """With `dtype`, parameters have the sizes that they have on a GPU; without, none, as on a CPU."""
        super().__init__()
        self.place = (rank, ranks)
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
        if dtype is not None:
            heads, kv_heads = HEADS // ranks, max(1, KV_HEADS // ranks)
            attention, mlp, fused = layer["self_attn"], layer["mlp"], (heads + 2 * kv_heads) * HEAD
            sized = [
                (attention["qkv_proj"], "weight", (fused, HIDDEN)), (attention["qkv_proj"], "bias", (fused,)),
                (attention["o_proj"], "weight", (HIDDEN, heads * HEAD)),
                (mlp["gate_up_proj"], "weight", (2 * FFN // ranks, HIDDEN)), (mlp["down_proj"], "weight", (HIDDEN, FFN // ranks)),
                (layer["input_layernorm"], "weight", (HIDDEN,)),
                (embedding, "weight", (per_rank, HIDDEN)), (self.lm_head, "weight", (per_rank, HIDDEN)),
            ]  # fmt: skip
            for module, name, shape in sized:
                module.register_parameter(name, torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))
        if tied:
            self.lm_head.weight = embedding.weight

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Puts this rank's part of a tensor where vLLM's loaders put it."""
        (rank, ranks), layer, last = self.place, self.model["layers"][0], name.rpartition(".")[2]
        attention, mlp = layer["self_attn"], layer["mlp"]
        q, kv = HEADS * HEAD // ranks, max(1, KV_HEADS // ranks) * HEAD
        its_kv = rank * KV_HEADS // ranks * HEAD
        rows, columns = FFN // ranks, HEADS * HEAD // ranks
        qkv, gate_up = getattr(attention["qkv_proj"], last, None), mlp["gate_up_proj"].weight
        if "q_proj" in name:
            qkv[:q] = whole[rank * q : (rank + 1) * q]
        elif "k_proj" in name:
            qkv[q : q + kv] = whole[its_kv : its_kv + kv]
        elif "v_proj" in name:
            qkv[q + kv :] = whole[its_kv : its_kv + kv]
        elif "o_proj" in name:
            attention["o_proj"].weight[:] = whole[:, rank * columns : (rank + 1) * columns]
        elif "gate_proj" in name:
            gate_up[:rows] = whole[rank * rows : (rank + 1) * rows]
        elif "up_proj" in name:
            gate_up[rows:] = whole[rank * rows : (rank + 1) * rows]
        elif "down_proj" in name:
            mlp["down_proj"].weight[:] = whole[:, rank * rows : (rank + 1) * rows]
        elif "layernorm" in name:
            layer["input_layernorm"].weight[:] = whole
        else:
            held = (self.model["embed_tokens"] if "embed" in name else self.lm_head).weight
            part = whole[rank * len(held) : (rank + 1) * len(held)]
            held.zero_()
            held[: len(part)] = part


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
