"""A classmate: a second sampler that continues the policy's chain of thought with an answer (Classmate-CoT).

    prefix = prompt + "<think>" + thought + "</think>\\n\\n"

The thought's token ids are used unchanged where both models have one vocabulary, which is checked; else the whole prefix is decoded and
encoded anew. Calls within `wait_s` of each other are sampled together.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.tokenizer import PretrainedTokenizer, with_stop_ids
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.protocols import Params, Sampler, SamplerFactory
from jaxrl_llm.rewards.classmate import Answer, Asked


@dataclass(frozen=True, kw_only=True)
class SampledClassmate:
    """A classmate with a sampler of its own.

    Attributes:
      weights: origin of the weights: "own" (of `source`, never changed), "policy" (self-play: the policy's as the stage begins, and
        again after every `refresh_every` steps) or "served" (a server's own; none are published to the sampler).
      sampler: generates the answers.
      source: the model, for "own" alone.
      tokenizer: the model's tokenizer, where it differs from the policy's; None takes that of the folder of `source`, or the policy's.
      refresh_every: for "policy": 0 keeps the weights that the stage begins with ("frozen"), 1 takes the policy's of each
        step ("live"), more is "lagged".
      settings: how answers are drawn.
      max_length: most tokens of a prefix and its answer; a thought that leaves no room for an answer has none.
      opening: text before a thought.
      closing: text between a thought and the answer.
      opened: whether the prompt already ends with the opening text.
      template_kwargs: keyword arguments of the model's chat template, where prompts are encoded anew.
      seed: seed of random weights, where `source` has no trained ones.
      wait_s: seconds for which a call waits for others to be sampled with it.
    """

    weights: Literal["own", "policy", "served"]
    sampler: SamplerFactory
    source: PolicySource | None = None
    tokenizer: Any = None
    refresh_every: int = 0
    settings: SamplingParams = field(default_factory=SamplingParams)
    max_length: int = 4096
    opening: str = "<think>"
    closing: str = "</think>\n\n"
    opened: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    wait_s: float = 0.02
    _state: "_State" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.choices(self)
        if (self.source is None) == (self.weights == "own") or (
            self.source is not None and self.source.lora is not None
        ):
            raise ValueError(
                "SampledClassmate.source is the model of weights = 'own', without adapters, and of no other "
                f"(got {self.source} with weights = {self.weights!r})"
            )
        if self.weights == "policy" and self.tokenizer is not None:
            raise ValueError("SampledClassmate.tokenizer must be None with weights = 'policy': it is the policy's")
        if self.refresh_every < 0 or self.wait_s < 0 or (self.refresh_every and self.weights != "policy"):
            raise ValueError(
                "SampledClassmate.refresh_every and wait_s must be >= 0, and refresh_every 0 unless weights = 'policy' "
                f"(got {self.refresh_every} and {self.wait_s} with weights = {self.weights!r})"
            )
        object.__setattr__(self, "_state", _State())

    @property
    def follows(self) -> bool:
        """Whether the classmate uses the policy's weights."""
        return self.weights == "policy"

    # -- as a companion of the run -------------------------------------------------------------------------------------

    def start(self, policy: Policy, tokenizer: Any, run_dir: Path) -> None:
        """Starts the sampler; a classmate's own weights are read at the first answer.

        Raises:
          ValueError: the model's vocabulary is smaller than its tokenizer's.
          FileNotFoundError: `source` names a folder without a model or a tokenizer.
        """
        model = policy if self.source is None else self.source.policy(policy.partitioner)
        own = self._tokenizer(tokenizer)
        if self.weights != "served" and len(own) > model.architecture.vocabulary_size:
            raise ValueError(
                f"the classmate's tokenizer has {len(own)} tokens and its model {model.architecture.vocabulary_size}: set "
                "SampledClassmate.tokenizer to the one the model was made with"
            )
        same = own is tokenizer or own.get_vocab() == tokenizer.get_vocab()
        sampler = self.sampler.start(model, own, max_length=self.max_length, run_dir=run_dir)
        self._state.begin(Running(model, own, tokenizer, same, sampler, with_stop_ids(self.settings, own)))

    async def publish(self, params: Params, version: int) -> None:
        """Publishes the policy's `params` to the sampler; the caller does not change them."""
        await self._state.running.sampler.publish(params, version)

    async def stop(self) -> None:
        """Closes the sampler."""
        if self._state.started:
            await self._state.running.sampler.close()
            self._state.started.clear()

    # -- as a classmate ------------------------------------------------------------------------------------------------

    async def answers(self, asked: Sequence[Asked], samples: int) -> list[list[Answer] | None]:
        """Returns `samples` answers to each thought, in the order of `asked`; None where a thought leaves no room for an answer.

        Raises:
          ValueError: before `start`.
        """
        running = self._state.running
        prefixes = [self.prefix(one) for one in asked]
        fitting = [i for i, prefix in enumerate(prefixes) if len(prefix) + 1 < self.max_length]
        found: list[list[Answer] | None] = [None] * len(asked)
        if fitting:
            call = [(prefixes[i], asked[i].seed) for i in fitting]
            for i, completions in zip(fitting, await self._sampled(call, samples), strict=True):
                found[i] = [self._answer(running, completion) for completion in completions]
        return found

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of ids of the policy's vocabulary."""
        return self._state.running.theirs.decode(tokens, skip_special_tokens=True)

    def prefix(self, asked: Asked) -> np.ndarray:
        """Returns the prefix that the classmate continues, int32 [T] in its own vocabulary."""
        running = self._state.running
        opening = "" if self.opened else self.opening
        if running.same:
            ids = lambda text: running.own.encode(text, add_special_tokens=False) if text else []  # noqa: E731
            return np.concatenate([asked.prompt.prefix, ids(opening), asked.thought, ids(self.closing)]).astype(
                np.int32
            )
        text, special = asked.prompt.text, True
        if asked.prompt.messages is not None:
            text, special = running.own.apply_chat_template(
                [dict(message) for message in asked.prompt.messages], tokenize=False, add_generation_prompt=True,
                **self.template_kwargs,
            ), False  # fmt: skip
        ids = running.own(f"{text}{opening}{asked.text}{self.closing}", add_special_tokens=special)["input_ids"]
        return np.asarray(ids, np.int32)

    def _answer(self, running: "Running", completion: Completion) -> Answer:
        text = running.own.decode(completion.tokens, skip_special_tokens=True)
        if running.same:
            return Answer(text, completion.tokens)
        return Answer(text, np.asarray(running.theirs.encode(text, add_special_tokens=False), np.int32))

    def _tokenizer(self, theirs: Any) -> Any:
        if self.tokenizer is not None:
            return self.tokenizer.load()
        if self.source is not None and self.source.pretrained is not None:
            return PretrainedTokenizer(path=self.source.pretrained).load()
        return theirs

    # -- calls that are sampled together -------------------------------------------------------------------------------

    async def _sampled(self, call: Sequence[tuple[np.ndarray, int]], n: int) -> list[list[Completion]]:
        """Returns the completions of each (prefix, seed) of a call."""
        state = self._state
        future: asyncio.Future[list[list[Completion]]] = asyncio.get_running_loop().create_future()
        state.waiting.append(Call(call, n, future))
        if len(state.waiting) == 1:
            state.flushing = asyncio.ensure_future(self._flush())
        return await future

    async def _flush(self) -> None:
        """Samples the calls of the last `wait_s`, those with equal numbers of samples together."""
        await asyncio.sleep(self.wait_s)
        state = self._state
        calls, state.waiting = state.waiting, []
        try:
            await self._ready()
            for n in sorted({call.n for call in calls}):
                await self._together([call for call in calls if call.n == n], n)
        except BaseException as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)

    async def _together(self, calls: Sequence["Call"], n: int) -> None:
        prefixes = [prefix for call in calls for prefix, _ in call.asked]
        seeds = [seed for call in calls for _, seed in call.asked]
        running, groups = self._state.running, {}
        stream: AsyncIterator[tuple[int, list[Completion]]] = running.sampler.sample(
            prefixes, n, running.settings, seeds
        )
        async for index, completions in stream:
            groups[index] = completions
        start = 0
        for call in calls:
            found = [groups[i] for i in range(start, start + len(call.asked))]
            start += len(call.asked)
            if not call.future.done():
                call.future.set_result(found)

    async def _ready(self) -> None:
        """Reads the classmate's own weights, once."""
        running = self._state.running
        if self.source is not None and running.sampler.version < 0:
            params = self.source.params(running.model, jax.random.key(self.seed))
            await running.sampler.publish(params, 0)


class Running(NamedTuple):
    """A started classmate.

    Attributes:
      model: the classmate's model.
      own: the classmate's tokenizer.
      theirs: the policy's tokenizer.
      same: whether both have one vocabulary.
      sampler: generates the answers.
      settings: how answers are drawn, with the stop ids of its tokenizer.
    """

    model: Policy
    own: Any
    theirs: Any
    same: bool
    sampler: Sampler
    settings: SamplingParams


class Call(NamedTuple):
    """A waiting call of `answers`.

    Attributes:
      asked: (prefix, seed) of each thought.
      n: completions of each prefix.
      future: receives the completions.
    """

    asked: Sequence[tuple[np.ndarray, int]]
    n: int
    future: "asyncio.Future[list[list[Completion]]]"


class _State:
    """The mutable state of a classmate: its running parts once started, and the waiting calls."""

    def __init__(self) -> None:
        self.started: list[Running] = []
        self.waiting: list[Call] = []
        self.flushing: asyncio.Future | None = None

    def begin(self, running: Running) -> None:
        self.started[:] = [running]

    @property
    def running(self) -> Running:
        if not self.started:
            raise ValueError(
                "a classmate was asked before it was started: a run starts the classmates of its stages' rewards; an "
                "evaluation alone has none"
            )
        return self.started[0]
