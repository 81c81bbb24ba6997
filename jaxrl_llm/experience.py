"""The host data that flows between the parts of a run: prompts, completions, rollouts and scored groups (NumPy alone)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jaxrl_llm import components


def seed_of(*numbers: int) -> int:
    """Returns a 31-bit seed that depends on all of `numbers` (run seed, step, place), by NumPy's SeedSequence."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


Finish = Literal["stop", "length", "aborted"]
Role = Literal["sample", "greedy", "given"]
CallStatus = Literal["ok", "bad_json", "unclosed", "unknown_tool"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task of a dataset.

    Attributes:
      id: unique within its source; names the prompt in logs and in per-sample files.
      messages: chat messages ({"role", "content"}), or None where `text` is given.
      text: the prompt as plain text, or None where `messages` is given.
      tokens: int32 [T] token ids, or None before the prompt was encoded.
      reference: the gold answer, as the reward expects it.
      source: name of the data source; rewards and statistics are kept by source.
      response: the demonstration that supervised training imitates, or None.
      extra: further columns, JSON-like.
    """

    id: str
    messages: Sequence[Mapping[str, str]] | None = None
    text: str | None = None
    tokens: np.ndarray | None = None
    reference: str = ""
    source: str = ""
    response: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None) and self.tokens is None:
            raise ValueError(f"prompt {self.id!r} needs either `messages` or `text`, and got both or neither")

    @property
    def whole(self) -> str:
        """The text, or the contents of all messages."""
        return self.text if self.text is not None else "\n\n".join(m["content"] for m in self.messages or ())

    @property
    def question(self) -> str:
        """The text, or the last message's content."""
        return self.messages[-1]["content"] if self.messages else self.text or ""

    @property
    def prefix(self) -> np.ndarray:
        """The token ids, int32 [T]; raises ValueError before encoding."""
        if self.tokens is None:
            raise ValueError(f"prompt {self.id!r} was not encoded: pass it through data.pipeline.Encoder first")
        return self.tokens


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The settings by which a sampler draws tokens.

    Attributes:
      max_tokens: largest number of tokens of one response.
      min_tokens: stop ids and stop strings count only from this many tokens on.
      temperature: divides the logits; 0 is greedy.
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
      min_p: keep tokens with at least min_p times the likeliest token's probability; 0 keeps all.
      repetition_penalty: divides positive (multiplies negative) logits of tokens seen before; 1 is off.
      stop_token_ids: token ids that end a response; the id itself is kept.
      stop_strings: strings whose appearance in the text ends a response; the tokens are kept.
      adapter: name of the adapters that draw, where a sampler has loaded several (embedded.EmbeddedSampler.loaded); '' for the published
        policy.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    adapter: str = ""

    def __post_init__(self) -> None:
        components.at_least(self, 1, "max_tokens")
        components.at_least(self, 0, "temperature", "top_k")
        components.within(self, f"[0, {self.max_tokens}]", "min_tokens")
        components.within(self, "(0, 1]", "top_p")
        components.within(self, "[0, 1)", "min_p")
        components.above(self, 0, "repetition_penalty")

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the policy's tempered softmax alone, the distribution whose log-probs the learner computes."""
        others = (self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.adapter)
        return self.temperature > 0 and others == (0, 1, 0, 1, "")

    def greedy(self) -> "SamplingParams":
        """Returns the same limits and stops, with the likeliest token at each step."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled continuation of a token prefix.

    Attributes:
      tokens: int32 [T] sampled ids, the stop id included.
      logprobs: float32 [T] log-prob of each token under the distribution it was drawn from.
      versions: int32 [T] policy version that drew each token.
      finish: "stop" (stop id or string), "length" (limit reached) or "aborted".
      routes: uint [P + T - 1, L, k] experts in the L layers with experts, to which each token of the prefix and each but the last of
        `tokens` went, or None; the dtype's largest number stands for what was not recorded.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Finish
    routes: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The tokens of one call of the sampler, within a branch.

    Attributes:
      start: place of the first sampled token in the branch's `tokens`; `end` is the place after the last one.
      call: number of the call in its session, from 0.
    """

    start: int
    end: int
    call: int


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One exact sequence that the sampler saw: a path from the root of a rollout's calls to a leaf.

    Attributes:
      prefix: int32 [P] tokens of the first call's prompt.
      tokens: int32 [T] what follows: sampled tokens, and what other parties said in between.
      sampler_logprobs: float32 [T], 0 where the policy did not choose the token.
      mask: bool [T], True where the policy chose the token and no other branch learns from it.
      versions: int32 [T] policy version that drew each token, or that was served when another party's token came.
      finish: why the last call of the branch ended, as in `Completion`.
      turns: the calls on the path, in their order; a call that another branch learns from is among them, with `mask` False.
    """

    prefix: np.ndarray
    tokens: np.ndarray
    sampler_logprobs: np.ndarray
    mask: np.ndarray
    versions: np.ndarray
    finish: Finish
    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens", "sampler_logprobs", "mask", "versions")}
        if len(set(lengths.values())) > 1 or len(self.prefix) == 0:
            raise ValueError(f"a branch needs a prefix and arrays of one length (got {len(self.prefix)} and {lengths})")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A prompt and the transcript that followed it; index t describes tokens[t], given the prompt and tokens[<t].

    Attributes:
      prompt: the task; its `tokens` are the prefix.
      tokens: int32 [T] response tokens, text of an environment included.
      sampler_logprobs: float32 [T], 0 where the policy did not choose the token.
      mask: bool [T], True where the policy chose the token (learned from).
      versions: int32 [T] policy version that drew each token.
      finish: why the response ended, as in `Completion`.
      text: the decoded response.
      spans: named token ranges, bool [T] each, for algorithms whose advantages differ between parts of a response.
      role: "sample"; "greedy" rollouts are scored but left out of statistics and loss; "given" ones are a dataset's, preferred to a sample.
      branches: all branches in the order of their calls; the rollout's own arrays are those of the last one; () where there is no other.
      turns: the calls of the sampler in `tokens`; () where there is one call.
      valid: False where the environment or the agent failed; such a rollout has no reward, not even 0, and is not learned from.
      error: what failed: the error's type, where, and its text; "" where `valid`.
      rewards: rewards that the environment or the agent gave, {name: reward, or None where it is not known}.
      info: what else it reports, JSON-like, for people to read and for rewards.
      routes: uint [at most P + T - 1, L, k] experts of the prompt's and the response's tokens, as in `Completion`, or None.
    """

    prompt: Prompt
    tokens: np.ndarray
    sampler_logprobs: np.ndarray
    mask: np.ndarray
    versions: np.ndarray
    finish: Finish
    text: str = ""
    spans: Mapping[str, np.ndarray] = field(default_factory=dict)
    role: Role = "sample"
    branches: tuple[Branch, ...] = ()
    turns: tuple[Turn, ...] = ()
    valid: bool = True
    error: str = ""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    routes: np.ndarray | None = None

    @property
    def paths(self) -> tuple[Branch, ...]:
        """All branches, at least one; `branches`, or the one that the rollout's own arrays are."""
        names = ("tokens", "sampler_logprobs", "mask", "versions", "finish", "turns")
        return self.branches or (Branch(prefix=self.prompt.prefix, **{n: getattr(self, n) for n in names}),)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one rollout of an environment or an agent.

    Attributes:
      reset_s: largest number of seconds of the environment's reset.
      step_s: largest number of seconds of one step of the environment.
      episode_s: largest number of seconds of the whole rollout.
      max_turns: largest number of turns of the policy.
      max_tokens: largest number of tokens that the policy samples, over all turns; None for no limit but the others.
      max_length: largest number of tokens of one call's prompt and completion together.
      max_response: largest number of tokens that follow the first prompt of a dialogue, sampled or not; None for no limit but the others.
      max_calls: largest number of requests of an agent; None for no limit but the others.
      most_text: largest number of characters of one observation; a longer one is cut in its middle, with a mark.
    """

    reset_s: float = 60.0
    step_s: float = 60.0
    episode_s: float = 600.0
    max_turns: int = 8
    max_tokens: int | None = None
    max_length: int = 1 << 30
    max_response: int | None = None
    max_calls: int | None = None
    most_text: int = 20_000

    def __post_init__(self) -> None:
        components.above(self, 0, "reset_s", "step_s", "episode_s")
        components.at_least(self, 1, "max_turns", "max_tokens", "max_length", "max_response", "max_calls")
        components.at_least(self, 100, "most_text")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task that an environment or an agent is given at its start.

    Attributes:
      prompt: the row of the dataset.
      messages: the prompt's chat messages; a prompt of plain text is one message of the role "user".
      tools: schemas of the functions that the policy may call, in the form of OpenAI's "tools".
      seed: seed of everything that the environment draws.
      limits: limits of the rollout.
    """

    prompt: Prompt
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    seed: int = 0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool that was read in a completion.

    Attributes:
      id: names the call in the tool's answer.
      name: the tool; "" where it could not be read.
      arguments: the arguments by name; None where they could not be read.
      raw: the call as it was written.
      status: "ok", "bad_json", "unclosed" (the completion ended within it) or "unknown_tool".
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str = ""
    status: CallStatus = "ok"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One turn of the policy, as an environment sees it.

    Attributes:
      text: the content, without thoughts and without well-formed calls.
      reasoning: the thoughts.
      calls: calls of tools in their order, those that could not be read among them.
      finish: why the turn ended, as in `Completion`.
    """

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: Finish = "stop"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An environment's answer to a reset or a step.

    Attributes:
      messages: messages that are appended to the dialogue, of the roles "tool" and "user".
      done: whether the episode ended; the messages of the last observation are not shown to the policy.
      reward: reward of this step; None for none.
      info: further facts, JSON-like.
      appended: text that continues the task's last message, before `messages`; of a reset alone.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    appended: str = ""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a rollout of an environment or an agent.

    Attributes:
      rewards: {name: reward, or None where not known}; they become the score parts "env/<name>".
      stop: why it ended, in a word: "done", "stop", or the name of the limit in `Limits`.
      info: further facts, JSON-like.
    """

    rewards: Mapping[str, float | None] = field(default_factory=dict)
    stop: str = "done"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The result of a reward for a group: its named parts, and where each part is valid.

    Attributes:
      parts: {name: float [G]}; names that start with "log/" are logged and never summed.
      valid: {name: bool [G]}, False where the part could not be computed (a failure, not a 0).
      weights: {name: weight} in the total; a part that is absent weighs 1.
    """

    parts: Mapping[str, np.ndarray]
    valid: Mapping[str, np.ndarray]
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt with their rewards; the group size may differ by group.

    Attributes:
      rollouts: G rollouts of one prompt.
      scores: rewards [G] by part, with validity and weights.
    """

    rollouts: Sequence[Rollout]
    scores: Scores

    def total(self) -> np.ndarray:
        """Returns the weighted sum of the parts, float64 [G]; an invalid part counts 0 here, and `valid` leaves its rollout out."""
        total = np.zeros(len(self.rollouts))
        for name, values in self.scores.parts.items():
            if not name.startswith("log/"):
                total += self.scores.weights.get(name, 1.0) * np.where(self.scores.valid[name], values, 0.0)
        return total

    def valid(self) -> np.ndarray:
        """Returns whether the rollout and every part of the total that has a weight are valid, bool [G]."""
        valid = np.array([r.valid for r in self.rollouts], bool)
        for name, weight in ((n, self.scores.weights.get(n, 1.0)) for n in self.scores.parts):
            if weight != 0 and not name.startswith("log/"):
                valid &= np.asarray(self.scores.valid[name], bool)
        return valid


def unscored(rollouts: Sequence[Rollout], sides: Sequence[int] | None = None) -> Group:
    """Returns a group without rewards; `sides` (1 preferred, -1 rejected) makes it a pair."""
    if sides is None:
        return Group(rollouts=rollouts, scores=Scores(parts={}, valid={}))
    side = np.asarray(sides, float)
    return Group(
        rollouts=rollouts, scores=Scores(parts={"log/side": side}, valid={"log/side": np.ones(len(side), bool)})
    )
