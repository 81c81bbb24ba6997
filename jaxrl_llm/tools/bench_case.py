"""One configuration of the benchmark: its flags, the components built from them, and random rollouts of full length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxrl_llm.algorithms.batch import MicroBatch
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Group, Prompt, Rollout, Scores
from jaxrl_llm.kernels.attention import api as attention
from jaxrl_llm.kernels.decode_attention import api as decode_attention
from jaxrl_llm.kernels.delta_rule import api as delta_rule
from jaxrl_llm.kernels.token_stats import api as token_stats
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.models import layers
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

# Flags that take several values: name -> (type, default, meaning).
SWEPT: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "work": (str, "update", "update, score, sample, step or speedrun"),
    "model": (str, "qwen2.5-1.5b", f"one of {', '.join(SHAPES)}"),
    "layers": (int, "0", "layers of the model; 0 takes all"),
    "dtype": (str, "bfloat16", "dtype of activations and cache"),
    "rows": (int, "8", "rows of an update, or of scoring"),
    "row_tokens": (int, "4096", "tokens of a row"),
    "segments": (int, "1", "sequences of equal length in a row"),
    "micro_rows": (int, "0", "rows of a micro-batch; 0 takes all"),
    "remat": (str, "full", f"one of {', '.join(layers.NAMES)}"),
    "unroll": (int, "1", "layers of one step of the layer scan"),
    "moments_dtype": (str, "float32", "dtype of the first moment"),
    "second_moment_dtype": (str, "float32", "dtype of the second moment"),
    "offload": (int, "0", "1 keeps the moments on the host"),
    "weights": (str, "float32", "how weights are stored: float32, stochastic or compensated"),
    "attention": (str, "auto", f"auto or one of {', '.join(attention.BACKENDS)}: tried first"),
    "token_stats": (str, "auto", f"auto or one of {', '.join(token_stats.BACKENDS)}: tried first"),
    "decode_attention": (str, "auto", f"auto or one of {', '.join(decode_attention.BACKENDS)}: tried first"),
    "delta_rule": (str, "auto", f"auto or one of {', '.join(delta_rule.BACKENDS)}: tried first"),
    "bitwise": (int, "0", "1 gives each token the same log-prob in sampler and learner, bit for bit"),
    "devices": (int, "0", "devices used; 0 takes all"),
    "data": (int, "1", "devices of the data axis"),
    "fsdp": (int, "-1", "devices of the fsdp axis"),
    "expert": (int, "1", "devices of the expert axis"),
    "tensor": (int, "1", "devices of the tensor axis"),
    "context": (int, "1", "devices of the context axis"),
    "prompts": (int, "128", "prompts sampled"),
    "group": (int, "8", "samples of a prompt"),
    "prompt_tokens": (int, "128", "tokens of a prompt"),
    "response_tokens": (int, "512", "tokens of a response"),
    "shortest": (
        int,
        "0",
        "fewest tokens of a prompt and of a response, each of a length drawn at random; 0 for full lengths",
    ),
    "slots": (int, "1024", "slots of the sampler"),
    "shrink": (int, "0", "factor by which the sampler's batch shrinks as its last sequences end; 0 for never"),
    "page": (int, "0", "entries of a page of the sampler's cache; 0 gives each slot its own room"),
    "cache": (str, "auto", "dtype of cached keys and values: auto, as activations, or float8_e4m3fn"),
    "decode_chunk": (int, "64", "decode steps between two looks of the host"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the benchmark.

    Attributes:
      flags: {name: value} for each flag of SWEPT.
      repeats: measured calls after the first.
      profile: folder for a trace of one more call, or None.
      own: devices to compile for in place of the process's own, or None.
    """

    flags: dict[str, Any]
    repeats: int
    profile: str | None = None
    own: Sequence[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["flags"][name]
        except KeyError:
            raise AttributeError(name) from None

    @cached_property
    def packing(self) -> Packing:
        return Packing(
            row_tokens=self.row_tokens, rows=self.micro_rows or self.rows, sequences_per_row=max(self.segments, 1)
        )

    @cached_property
    def policy(self) -> Policy:
        mesh = MeshConfig(data=self.data, fsdp=self.fsdp, expert=self.expert, tensor=self.tensor, context=self.context)
        partitioner = Partitioner.create(mesh, (self.own or jax.devices())[: self.devices or None])
        size = SHAPES[self.model]
        size = replace(size, layers=self.layers) if self.layers else size
        return Policy(size, partitioner, self.dtype, self.remat, unroll=self.unroll, bitwise=bool(self.bitwise))

    @cached_property
    def learner(self) -> Learner:
        stored = {name: getattr(self, name) for name in ("moments_dtype", "second_moment_dtype", "weights")}
        optimizer = Optimizer(learning_rate=1e-6, offload=bool(self.offload), **stored)
        return Learner(
            models={"policy": self.policy}, algorithm=GRPO(entropy_coef=1e-3), optimizers={"policy": optimizer}, updates=1000,
            max_segments=self.packing.sequences_per_row,
        )  # fmt: skip

    @cached_property
    def sampled(self) -> np.ndarray:
        """Tokens of each prompt and of its responses, int [prompts, 2]."""
        full = np.tile([self.prompt_tokens, self.response_tokens], (self.prompts, 1))
        if not 0 <= self.shortest <= full.min():
            raise ValueError(
                f"--shortest must be 0, for full lengths, or at most --prompt_tokens and --response_tokens, {full.min()} (got {self.shortest})"
            )
        return np.random.default_rng(0).integers(self.shortest, full + 1) if self.shortest else full

    def start_sampler(self) -> Engine:
        cache = None if self.cache == "auto" else self.cache
        sampler = EmbeddedSampler(
            slots=self.slots, decode_chunk=self.decode_chunk, prefill_tokens=16384, cache=cache, shrink=self.shrink,
            page=self.page,
        )  # fmt: skip
        return sampler.start(self.policy, None, max_length=self.prompt_tokens + self.response_tokens)


# -- random experience -------------------------------------------------------------------------------------------------


def groups_of(case: Case, lengths: Sequence[int]) -> list[Group]:
    """Returns groups of random sequences of these lengths, with random rewards; the first eighth of each is its prompt."""
    rng = np.random.default_rng(0)
    vocabulary = case.policy.architecture.vocabulary_size
    size = next(n for n in (8, 4, 2, 1) if len(lengths) % n == 0)
    groups = []
    for start in range(0, len(lengths), size):
        rollouts = []
        for n in lengths[start : start + size]:
            tokens = rng.integers(0, vocabulary, n, dtype=np.int32)
            cut = max(n // 8, 1)
            rollouts.append(rollout(Prompt(id=str(start), tokens=tokens[:cut], source="bench"), tokens[cut:], rng))
        groups.append(scored(rollouts, rng))
    return groups


def rollout(prompt: Prompt, tokens: np.ndarray, rng: np.random.Generator, logprobs: Any = None) -> Rollout:
    """Returns a full-length rollout; without `logprobs`, the sampler's log-probs are random."""
    guessed = rng.normal(-10.0, 1.0, len(tokens)).astype(np.float32) if logprobs is None else logprobs
    return Rollout(
        prompt=prompt, tokens=tokens, sampler_logprobs=guessed, mask=np.ones(len(tokens), bool),
        versions=np.zeros(len(tokens), np.int32), finish="length",
    )  # fmt: skip


def scored(rollouts: Sequence[Rollout], rng: np.random.Generator) -> Group:
    """Returns the group with random rewards."""
    n = len(rollouts)
    return Group(rollouts=rollouts, scores=Scores(parts={"r": rng.normal(size=n)}, valid={"r": np.ones(n, bool)}))


def packed(case: Case, groups: Sequence[Group]) -> Batch:
    """Packs the groups into micro-batches, as a step does."""
    rollouts = [r for g in groups for r in g.rollouts]
    response = max(len(r.tokens) for r in rollouts)
    return Batch.build(
        groups, case.packing, minibatches=1, sources=["bench"], response_tokens=response, capacity=len(rollouts)
    )


def full_rows(case: Case) -> Batch:
    """Returns a batch of rows without padding: a sequence of n + 1 tokens takes n positions."""
    return packed(case, groups_of(case, [case.row_tokens // case.segments + 1] * (case.rows * case.segments)))


def lengths_of(batch: Batch) -> list[int]:
    return [len(r.prompt.prefix) + len(r.tokens) - 1 for r in batch.rollouts]


def micro_batches(case: Case, batch: Batch, stats: dict[str, np.ndarray]) -> list[MicroBatch]:
    """Returns the micro-batches of one update, with advantages from the learner."""
    learner = case.learner
    sequences = batch.sequences(stats, learner.algorithm.controls, len(batch.groups))
    advantages = jax.device_get(learner.advantages(sequences))
    (mini,) = batch.micro_batches(sequences, advantages, learner.algorithm.constant, learner.partitioner)
    return mini
