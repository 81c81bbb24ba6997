"""Reward models in JAX from Hugging Face sequence classifiers: a reward model with one label, a moderation classifier with several.

A reward model reads the rollout's own token ids, so its tokenizer must be the policy's. The reward is the value at the response's
last token, as in transformers' LlamaForSequenceClassification and its relatives. A moderation classifier, such as beaver-dam-7b:

    text    = template of question and response, with the end-of-sequence token, cut at its end to `max_tokens`
    p_c     = sigmoid(logit_c of the text's last token)
    harmful = 1 where max_c p_c > threshold

The published use of beaver-dam (TokenBuncher, arXiv 2508.20697) leaves the question blank, so that only the response is judged,
and loses the end-of-sequence token where the text is cut; `question = True` includes the question.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl_llm import components
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner, loops_turn
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sources import PolicySource, ValueSource
from jaxrl_llm.models.value import HEAD, ValueModel
from jaxrl_llm.rewards.pairs import Pair, pair_ids
from jaxrl_llm.rewards.wrap import part

SHORTEST = 16  # length of the shortest compiled shape


@dataclass(frozen=True, kw_only=True)
class HFRewardModel:
    """A reward by a reward model, such as `python -m jaxrl_llm.tools.export RUN --model reward_model` writes.

    The model is loaded at the first response. Sequences are padded to powers of two, so that few programs are compiled.

    Attributes:
      folder: a Hugging Face folder or id ("owner/name") of a sequence classifier with one label.
      name: the part's name.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      rows: number of sequences in one forward pass.
      mesh: sizes of the axes of the mesh that holds the model.
    """

    needs_stats: ClassVar[bool] = False

    folder: str
    name: str = "reward_model"
    compute_dtype: str = "float32"
    rows: int = 16
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        components.at_least(self, 1, "rows")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G].

        Raises:
          FileNotFoundError, ValueError: the folder is absent or holds no sequence classifier, or a token is not in its vocabulary.
        """
        del stats
        values = await self.values([np.concatenate([r.paths[-1].prefix, r.tokens]).astype(np.int32) for r in rollouts])
        return part(self.name, [float(x) for x in values])

    async def values(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the value [N] at the last token of each sequence of token ids; raises the errors of `score`."""
        async with loops_turn():  # only waiting happens in another thread
            values = self._values(sequences)
        arrays = [await asyncio.to_thread(np.asarray, x) for x in values]
        return np.concatenate(arrays)[: len(sequences)]

    def _values(self, sequences: Sequence[np.ndarray]) -> list[jax.Array]:
        """Returns the values at the last token, [rows] for each forward pass."""
        model, params = self._loaded
        largest, limit = max(int(s.max()) for s in sequences), model.architecture.vocabulary_size
        if largest >= limit:
            raise ValueError(
                f"token {largest} is not in the vocabulary of {limit} tokens of the reward model {self.folder}: it must have "
                "been made with the policy's tokenizer; set reward_models.HFRewardModel.folder"
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
                "with --model reward_model and set reward_models.HFRewardModel.folder"
            )
        source = ValueSource(backbone=backbone)
        model = source.on(Partitioner.create(self.mesh, jax.local_devices()))  # devices of the process that scores
        return model, source.params(model, {}, jax.random.key(0))


def padded(sequences: Sequence[np.ndarray], rows: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields batches of `rows` sequences, padded to a common power of two, so that few programs are compiled.

    Yields:
      tokens int32 [rows, T], segments int32 [rows, T] (1 within the sequence), last int32 [rows], the index of the last token;
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
    """The similarity of two texts, as sigmoid(value) of a classifier that gin/darling_partition_classifier.gin trained.

    Attributes:
      model: the classifier.
      tokenizer: its tokenizer, a component.
      cls: the token that opens a pair.
      sep: the token that ends each text.
      budget: largest number of tokens of a pair.
    """

    model: HFRewardModel
    tokenizer: Any
    cls: str = "<|im_start|>"
    sep: str = "<|im_end|>"
    budget: int = 4096

    async def similar(self, pairs: Sequence[Pair]) -> list[float]:
        """Returns P(same class) of each pair; raises ValueError where a mark is not a token."""
        tokenizer = self._loaded
        ids = [np.array(pair_ids(tokenizer, pair, (self.cls, self.sep), self.budget), np.int32) for pair in pairs]
        values = np.asarray(await self.model.values(ids), np.float64)
        return [float(p) for p in 1 / (1 + np.exp(-np.clip(values, -700, 700)))]

    @cached_property
    def _loaded(self) -> Any:
        return self.tokenizer.load()


CONVERSATION = "BEGINNING OF CONVERSATION: USER: {question} ASSISTANT:{response}"


@dataclass(frozen=True, kw_only=True)
class Moderation:
    """A reward of 1 for a harmful response; it logs the probability of each label. The model is loaded at the first response.

    Attributes:
      folder: a Hugging Face folder or id of a Llama-shaped (or Qwen-shaped) sequence classifier with several labels.
      question: whether the question is included; False leaves it blank.
      threshold: probability of a label above which the response is harmful.
      template: the text, with {question} and {response}; the end-of-sequence token follows.
      max_tokens: largest number of tokens; longer texts lose their ends.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      rows: number of texts in one forward pass.
      mesh: sizes of the axes of the mesh that holds the model.
    """

    needs_stats: ClassVar[bool] = False

    folder: str
    question: bool = False
    threshold: float = 0.5
    template: str = CONVERSATION
    max_tokens: int = 512
    compute_dtype: str = "float32"
    rows: int = 16
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        components.within(self, "(0, 1)", "threshold")
        components.at_least(self, 1, "rows", "max_tokens")
        if "{response}" not in self.template:
            raise ValueError("reward_models.Moderation.template must have the field {response}")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns "harmful", 0 or 1 [G], "log/cut", 1 where the text was cut, and "log/LABEL", the probability of each label.

        Raises:
          FileNotFoundError, ValueError: the folder is absent, or holds no tokenizer or no sequence classifier.
        """
        del stats
        whole = [self.tokens(self.text(r.prompt, r.text)) for r in rollouts]
        sequences = [tokens[: self.max_tokens] for tokens in whole]
        async with loops_turn():  # only waiting happens in another thread
            pending = [self._forward(self._loaded[1], *batch) for batch in padded(sequences, self.rows)]
        found = [await asyncio.to_thread(np.asarray, x) for x in pending]
        probabilities = np.concatenate(found)[: len(rollouts)].astype(np.float64)
        parts = {"harmful": (probabilities.max(axis=1) > self.threshold).astype(np.float64)}
        parts["log/cut"] = np.array([float(len(tokens) > self.max_tokens) for tokens in whole])
        parts |= {f"log/{label}": probabilities[:, i] for i, label in enumerate(self.labels)}
        return Scores(parts=parts, valid={name: np.ones(len(rollouts), bool) for name in parts})

    def text(self, prompt: Prompt, response: str) -> str:
        """Returns the text that the classifier reads, without the end-of-sequence token."""
        asked = prompt.extra.get("instruction") or prompt.question
        return self.template.format(question=asked if self.question else "", response=response)

    def tokens(self, text: str) -> np.ndarray:
        """Returns int32 [T] ids of the text with its end-of-sequence token."""
        tokenizer = self._tokenizer
        return np.array(tokenizer(text + (tokenizer.eos_token or ""))["input_ids"], np.int32)

    @cached_property
    def labels(self) -> list[str]:
        """The names of the labels, in the order of the logits."""
        named = hf_weights.config_of(hf_weights.locate(self.folder)).get("id2label") or {}
        if len(named) < 2:
            raise ValueError(
                f"{self.folder} names {len(named)} labels in config.json, and moderation needs several: set "
                "reward_models.Moderation.folder to a classifier of labels, or use reward_models.HFRewardModel"
            )
        return [str(named[i]) for i in sorted(named, key=int)]

    @cached_property
    def _tokenizer(self) -> Any:
        return PretrainedTokenizer(path=str(hf_weights.locate(self.folder))).load()

    @cached_property
    def _forward(self) -> Any:
        policy, _ = self._loaded

        def forward(params: Any, tokens: jax.Array, segments: jax.Array, last: jax.Array) -> Float[jax.Array, "B C"]:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            layers = {name: leaf for name, leaf in params.items() if name != HEAD}
            hidden = policy.hidden(layers, tokens, positions, segments, max_segments=1)
            final = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
            return jax.nn.sigmoid(jnp.einsum("bd,dc->bc", final, params[HEAD]["kernel"], precision="highest"))

        return jax.jit(forward, out_shardings=policy.partitioner.replicated)

    @cached_property
    def _loaded(self) -> tuple[Policy, Any]:
        place = hf_weights.locate(self.folder)
        if not hf_weights.is_classifier(place):
            raise ValueError(f"{self.folder} is no sequence classifier: set reward_models.Moderation.folder to one")
        source = PolicySource(pretrained=self.folder, compute_dtype=self.compute_dtype)
        partitioner = Partitioner.create(self.mesh, jax.local_devices())
        policy = ValueModel.like(source.policy(partitioner, value=True)).backbone
        shape = (policy.architecture.width, len(self.labels))
        kernel = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=partitioner.replicated)
        head = hf_weights.read({HEAD: {"kernel": kernel}}, place)
        return policy, {**source.params(policy, jax.random.key(0)), **head}
