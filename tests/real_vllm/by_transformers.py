"""Log-probs of the tiny Qwen2 by transformers, in float32."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import transformers
from tiny_qwen2 import config


class Reference:
    """The model with one version's weights."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        tied = "lm_head.weight" not in tensors
        settings = {k: v for k, v in config(tied).items() if k not in ("architectures", "model_type", "torch_dtype")}
        self.model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings)).float().eval()
        state = {name: torch.from_numpy(array) for name, array in tensors.items()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        self.model.tie_weights()

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-prob of each token but the first, given those before it, [T - 1]."""
        ids = torch.tensor([list(tokens)])
        return _picked(self.model(ids).logits[0, :-1], ids[0, 1:])

    @torch.no_grad()
    def logprobs_over_keys_of(self, older: "Reference", tokens: Sequence[int], kept: int) -> np.ndarray:
        """Log-probs of the tokens after position `kept`; keys and values of the first `kept` are the older version's."""
        ids = torch.tensor([list(tokens)])
        cache = transformers.DynamicCache()
        older.model(ids[:, :kept], past_key_values=cache, use_cache=True)
        return _picked(
            self.model(ids[:, kept:], past_key_values=cache, use_cache=True).logits[0, :-1], ids[0, kept + 1 :]
        )


def _picked(logits: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0].numpy()
