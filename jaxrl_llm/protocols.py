"""The interfaces between the parts of a run, and the error that ends one."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.experience import (
    Action,
    Completion,
    Ending,
    Group,
    Observation,
    Prompt,
    Rollout,
    SamplingParams,
    Scores,
    Task,
)

Params = dict[str, Any]

# The data that an algorithm learns from; see Algorithm.
Learns = Literal["samples", "demonstrations", "documents", "pairs"]

# What an algorithm may need beside the policy's own log-probs; a stage checks at start-up that the run has it.
NEEDS = frozenset((
    "reference", "critic", "reward_model", "teacher", "teacher_divergence", "greedy",
    "sum_p2", "uniform_logprob", "noise_logprob", "entropy", "sides",
))  # fmt: skip


@runtime_checkable
class Dataset(Protocol):
    """A dataset: random access to prompts, in the same order at every start."""

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; raises ValueError naming the file and the row of bad data."""
        ...


@runtime_checkable
class Reward(Protocol):
    """A reward, which scores the rollouts of a prompt.

    Attributes:
      needs_stats: True where `score` needs the learner's token stats of the group.
    """

    needs_stats: bool

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns parts and validity [G] for the rollouts of one prompt; `stats` holds per-rollout means such as "entropy" [G]."""
        ...


@runtime_checkable
class Isolating(Protocol):
    """A reward that evaluates or runs what a model wrote."""

    def isolation(self) -> str:
        """Returns how that is isolated, in a few words, as far as this machine and the reward's service say."""
        ...


@runtime_checkable
class Filter(Protocol):
    """A filter, which decides which scored groups are learned from; prompts are drawn until the batch is full or `max_draws` times its size."""

    max_draws: int

    def keep(self, group: Group) -> bool: ...


@runtime_checkable
class Pairing(Protocol):
    """A rule that prefers and rejects samples of a prompt, for losses of preferences that learn from the policy's own samples.

    Attributes:
      demonstrates: whether the response that the dataset gives is the preferred one.
    """

    @property
    def demonstrates(self) -> bool: ...

    def sides(self, rewards: np.ndarray) -> np.ndarray:
        """Returns int [G] for the samples with these rewards, float64 [G], G >= 1: 1 preferred, -1 rejected, 0 left out."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """A running sampler, which continues token prefixes to completions.

    Attributes:
      version: the policy version that it serves; -1 before the first publication.
    """

    version: int

    def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        """Yields (index of the prefix, its n completions) as groups finish; equal seeds give equal draws."""
        ...

    async def publish(self, params: Params, version: int) -> None:
        """Serves `params` from now on, as `version`."""
        ...

    async def close(self) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        """Returns counters and times since the last call."""
        ...


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Hints to a sampler about the conversation of which a prefix is a turn; they change no draw.

    Attributes:
      id: names the conversation, whose turns are sampled in one place while its load allows it.
      length: largest number of tokens of a turn's prefix and completion together, until the conversation ends.
      known: number of tokens at the beginning of the prefix that belong to earlier turns of the conversation.
      at_once: number of turns, of all conversations, that may be asked for at a time.
    """

    id: str
    length: int
    known: int = 0
    at_once: int = 1


@runtime_checkable
class Conversing(Protocol):
    """A sampler whose `sample` takes a Conversation by the keyword `conversation`; its `converses` is always True."""

    converses: bool


@runtime_checkable
class Keeping(Protocol):
    """A sampler that keeps what it computed for a conversation until its next turn."""

    def forget(self, conversation: str) -> None:
        """Frees what is kept of this id, whose conversation has ended or continues with other weights."""


@runtime_checkable
class Retiring(Protocol):
    """A sampler that holds weights on the learner's devices, and can free them before the next ones are made."""

    def retire(self) -> None:
        """Frees the weights that are served; nothing is sampled until the next publication."""
        ...


@runtime_checkable
class Steered(Protocol):
    """A sampler that adapts how much it samples at a time to the times that steps took."""

    def steer(self, step: Mapping[str, float]) -> None:
        """Receives the metrics of each step."""
        ...


@runtime_checkable
class SamplerFactory(Protocol):
    """The component that gin builds; it starts a Sampler for a policy."""

    def start(self, policy: Any, tokenizer: Any, *, max_length: int, run_dir: Path) -> Sampler:
        """Starts a sampler; `max_length` is the largest number of tokens of a prompt and its response together."""
        ...


@runtime_checkable
class Environment(Protocol):
    """An environment, which answers the policy between its turns: one object for each rollout, used by one task at a time.

    It may have a method `tools(prompt)`, plain or async, which returns the schemas of the tools that it offers, before `reset`, and
    an async one `score()`, which returns {name: reward or None} of the episode when it has ended, at a limit too. An error of a method
    makes the rollout invalid; what a tool or a game reports as wrong is an observation.
    """

    async def reset(self, task: Task) -> Observation:
        """Begins the episode; its messages are appended to the task's."""
        ...

    async def step(self, action: Action) -> Observation:
        """Answers one turn of the policy."""
        ...

    async def close(self) -> None:
        """Releases what the episode holds; called once, also after errors and cancellation."""
        ...


@runtime_checkable
class EnvironmentFactory(Protocol):
    """The component that gin builds; it holds pools, servers and processes, and makes an environment for each rollout.

    It may have an async method `close`, which ends what it holds; a later use starts it again.
    """

    def build(self, prompt: Prompt, sample: int, seed: int) -> Environment:
        """Returns the environment of rollout number `sample` of a prompt; the call is cheap and does not block."""
        ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address at which an agent reaches the policy.

    Attributes:
      base_url: base URL of an OpenAI-compatible API, for this rollout alone.
      key: its secret, sent as a bearer token.
      model: the name that requests give.
    """

    base_url: str
    key: str
    model: str


@runtime_checkable
class Agent(Protocol):
    """A program that runs its own loop and reaches the policy by an endpoint alone: one object for each rollout."""

    async def run(self, task: Task, endpoint: Endpoint) -> Ending:
        """Works on the task to its end; an error makes the rollout invalid."""
        ...


@runtime_checkable
class AgentFactory(Protocol):
    """The component that gin builds; it makes an agent for each rollout, and may have an async `close` as EnvironmentFactory."""

    def build(self, prompt: Prompt, sample: int, seed: int) -> Agent:
        """Returns the agent of rollout number `sample` of a prompt; the call is cheap and does not block."""
        ...


@runtime_checkable
class Marker(Protocol):
    """A marker, which names ranges of a response's tokens, for algorithms whose advantages differ between parts of it."""

    def mark(self, rollout: Rollout, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Returns {name: bool [T]}, with the same names for every rollout."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """A frozen dataclass that says how rollouts become advantages, and advantages a loss.

    Attributes:
      learns_from: "samples" of the policy, "demonstrations" (prompt and response), "documents" (demonstrations joined and
        cut into chunks of a row) or "pairs" (chosen and rejected).
      needs: subset of NEEDS.
      group_size_at_least: smallest number of rollouts of a prompt that leaves a learning signal.
    """

    @property
    def learns_from(self) -> Learns: ...

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def group_size_at_least(self) -> int: ...

    @property
    def constant(self) -> float:
        """The number that a sequence adds to the global count "constant"."""
        ...

    @property
    def controls(self) -> Mapping[str, float]:
        """Controllers by name, such as the KL coefficient, with the values that a stage starts from."""
        ...

    def adapt(self, controls: Mapping[str, float], metrics: Mapping[str, float], sequences: int) -> Mapping[str, float]:
        """Returns the controllers after a step with these metrics."""
        ...

    def advantages(self, sequences: Any) -> Any:
        """Returns the advantages of all tokens of a step (`batch.Sequences` -> `batch.Advantages`); it is jitted."""
        ...

    def loss(self, outputs: Mapping[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns terms and metrics of one micro-batch, {name: (sum, name of its global denominator)}; it is pure, and runs under jit."""
        ...


@runtime_checkable
class Needing(Protocol):
    """A component beside the algorithm that needs more than the policy's own log-probs.

    Attributes:
      needs: subset of NEEDS.
    """

    @property
    def needs(self) -> frozenset[str]: ...


@runtime_checkable
class Distilling(Protocol):
    """An algorithm that pulls the policy's distribution towards a teacher's, and so needs "teacher_divergence".

    Attributes:
      mixture: mixture of the divergence, in [0, 1]; see kernels.teacher_divergence.
    """

    @property
    def mixture(self) -> float: ...


@runtime_checkable
class Naming(Protocol):
    """An algorithm that reads parts of the reward, spans of a response or data sources by name.

    Attributes:
      reads: the names that it reads, among the fields "parts", "spans" and "sources" of `batch.Sequences`.
    """

    @property
    def reads(self) -> Mapping[str, Sequence[str]]: ...


@runtime_checkable
class Schedule(Needing, Protocol):
    """A schedule, which decides the phase of each step of a stage; see phases.Phase.

    Attributes:
      phases: all phases that a step may be in.
      controls: the schedule's controllers by name, kept in checkpoints, with the values that a stage starts from.
    """

    @property
    def phases(self) -> Sequence[Any]: ...

    @property
    def controls(self) -> Mapping[str, float]: ...

    def check(self, layers: int) -> None:
        """Raises ValueError where the schedule does not fit a model of `layers` layers."""
        ...

    def phase(self, step: int, controls: Mapping[str, float]) -> Any:
        """Returns the phase (`phases.Phase`) of a step, where the stage's first step is 1."""
        ...

    def adapt(self, step: int, controls: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the controllers after a step with these metrics, by which a guard may end a phase early."""
        ...


@runtime_checkable
class Writer(Protocol):
    """A writer of the metrics, rollouts, images and texts of a run."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def text(self, name: str, text: str) -> None:
        """Writes a document of the run in Markdown, once, before its first step."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class GroupLoader(Protocol):
    """A loader, which gives each step its groups, from a position in the data that a checkpoint can hold."""

    async def next(self, step: int) -> list[Group]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def take(self) -> dict[str, float]:
        """Returns counters and times since the last call."""
        ...


class Down(RuntimeError):
    """Raised where a service failed too often in a row; the run saves and ends, whether or not other rewards work, and the same command resumes it."""


class SamplerDown(Down):
    """Raised where no server samples from the newest weights, whatever was tried; the run saves and ends, and the same command resumes it."""
