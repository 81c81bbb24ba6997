"""A trained reward model as a Reward: a Hugging Face folder of a sequence classifier with one label, run in JAX.

It reads the rollout's own token ids, so its tokenizer must be the policy's. The reward is the value at the response's last
token, as in transformers' LlamaForSequenceClassification and its kin.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import bounds, hf_weights
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy_source import PolicySource
from jaxrl_llm.models.value import ValueModel
from jaxrl_llm.models.value_source import ValueSource
from jaxrl_llm.rewards.pairs import Pair, pair_ids
from jaxrl_llm.rewards.wrap import part

SHORTEST = 16  # positions of the smallest compiled shape


@dataclass(frozen=True, kw_only=True)
class HFRewardModel:
    """The value of a response by a reward model, such as `python -m jaxrl_llm.export RUN --model reward_model` writes.

    The model is loaded at the first response. Sequences are padded to powers of two, so few programs are compiled.

    Attributes:
      folder: a Hugging Face folder or id ("owner/name") of a sequence classifier with one label.
      name: the part's name.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      rows: sequences of one forward pass.
      mesh: sizes of the mesh axes that the model lies on.
    """

    needs_stats: ClassVar[bool] = False

    folder: str
    name: str = "reward_model"
    compute_dtype: str = "float32"
    rows: int = 16
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        bounds.at_least(self, 1, "rows")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """One part, float64 [G].

        Raises:
          FileNotFoundError, ValueError: no such folder, no sequence classifier, or a token that is not in its vocabulary.
        """
        del stats
        values = await self.values([np.concatenate([r.prompt.prefix, r.tokens]).astype(np.int32) for r in rollouts])
        return part(self.name, [float(x) for x in values])

    async def values(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """The value [N] at the last token of each sequence of token ids; raises as `score` does."""
        # Programs are started from the event loop's thread, in one order on every device; only the wait is elsewhere.
        values = self._values(sequences)
        arrays = [await asyncio.to_thread(np.asarray, x) for x in values]
        return np.concatenate(arrays)[: len(sequences)]

    def _values(self, sequences: Sequence[np.ndarray]) -> list[jax.Array]:
        """Values at the last token, [rows] of each forward pass."""
        model, params = self._loaded
        largest, limit = max(int(s.max()) for s in sequences), model.architecture.vocabulary_size
        if largest >= limit:
            raise ValueError(
                f"token {largest} is not in the vocabulary of {limit} tokens of the reward model {self.folder}: it must have "
                "been made with the policy's tokenizer; set hf_reward_model.HFRewardModel.folder"
            )
        return [self._forward(params, *batch) for batch in padded(sequences, self.rows)]

    @cached_property
    def _forward(self) -> Any:
        model, _ = self._loaded

        def forward(params: Any, tokens: jax.Array, segments: jax.Array, last: jax.Array) -> jax.Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            values = model.values(params, tokens, positions, segments, max_segments=1)
            return jnp.take_along_axis(values, last[:, None], axis=1)[:, 0]

        return jax.jit(forward, out_shardings=model.partitioner.replicated)

    @cached_property
    def _loaded(self) -> tuple[ValueModel, Any]:
        backbone = PolicySource(pretrained=self.folder, compute_dtype=self.compute_dtype)
        if not hf_weights.is_classifier(hf_weights.locate(self.folder)):
            raise ValueError(
                f"{self.folder} is no sequence classifier, and a language model has no reward: export a run's reward model "
                "with --model reward_model and set hf_reward_model.HFRewardModel.folder"
            )
        source = ValueSource(backbone=backbone)
        model = source.on(Partitioner.create(self.mesh, jax.local_devices()))  # of the process that asks
        return model, source.params(model, {}, jax.random.key(0))


def padded(sequences: Sequence[np.ndarray], rows: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batches of `rows` sequences in a common length that is a power of two, so that few programs are compiled.

    Yields:
      tokens int32 [rows, T], segments int32 [rows, T] (1 within the sequence), last int32 [rows], the place of the last token;
      rows beyond the last sequence are empty.
    """
    length = max(SHORTEST, 1 << (max(len(s) for s in sequences) - 1).bit_length())
    for start in range(0, len(sequences), rows):
        tokens, segments = (np.zeros((rows, length), np.int32) for _ in range(2))
        last = np.zeros(rows, np.int32)
        for i, sequence in enumerate(sequences[start : start + rows]):
            tokens[i, : len(sequence)], segments[i, : len(sequence)], last[i] = sequence, 1, len(sequence) - 1
        yield tokens, segments, last


@dataclass(frozen=True, kw_only=True)
class HFPairs:
    """How alike two texts are by a classifier that gin/darling_partition_classifier.gin trained: sigmoid(value).

    Attributes:
      model: the classifier.
      tokenizer: its tokenizer, a component.
      cls: the token that opens a pair.
      sep: the token that ends each text.
      budget: most tokens of a pair.
    """

    model: HFRewardModel
    tokenizer: Any
    cls: str = "<|im_start|>"
    sep: str = "<|im_end|>"
    budget: int = 4096

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """P(same class) of each pair; raises ValueError for marks that are no tokens."""
        tokenizer = self._loaded
        ids = [np.array(pair_ids(tokenizer, pair, (self.cls, self.sep), self.budget), np.int32) for pair in pairs]
        values = np.asarray(await self.model.values(ids), np.float64)
        return [float(p) for p in 1 / (1 + np.exp(-np.clip(values, -700, 700)))]

    @cached_property
    def _loaded(self) -> Any:
        return self.tokenizer.load()
