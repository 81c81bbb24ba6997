"""Plays the rollouts of environments and agents under limits; a failure makes one rollout invalid, which records its cause."""

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.agents.dialogue import Dialogue
from jaxrl_llm.agents.plain_text import PlainText
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Ended, TooLong
from jaxrl_llm.experience import (
    Action,
    Branch,
    Ending,
    Finish,
    Limits,
    Observation,
    Prompt,
    Role,
    Rollout,
    SamplingParams,
    Task,
)
from jaxrl_llm.protocols import AgentFactory, Down, Environment, EnvironmentFactory
from jaxrl_llm.rollouts.episodes import Episodes

# Why a rollout ended before its environment or agent did, such that its finish is "length".
_CUT = ("max_tokens", "max_length", "max_response", "max_calls", "episode_s")


class Failed(Exception):
    """Raised where a part of an episode fails.

    Attributes:
      where: "build", "tools", "reset", "step", "run", "dialogue", "score", "close", "branches" or "episode".
      kind: the type of the error.
    """

    def __init__(self, where: str, kind: str, text: str) -> None:
        super().__init__(f"{kind} in {where}: {text}")
        self.where, self.kind = where, kind


async def within(where: str, limit: str, seconds: float | None, call: Callable[[], Awaitable[Any]]) -> Any:
    """Returns what `call` returns; raises Failed where it fails or takes longer than `seconds`, the limit of this name."""
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            return await call()
    except (Down, Failed):
        raise
    except TimeoutError as error:
        if timer.expired():
            raise Failed(where, "TimeoutError", f"it took longer than {limit} = {seconds:g} s") from error
        raise Failed(where, "TimeoutError", str(error)) from error
    except Exception as error:  # an environment is foreign code: any exception concerns this rollout alone
        raise Failed(where, type(error).__name__, str(error)) from error


@dataclass(eq=False)
class Watched:
    """An environment whose calls are timed and held to their time limits."""

    environment: Environment
    limits: Limits
    seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)

    async def reset(self, task: Task) -> Observation:
        """Begins the episode; raises Failed."""
        return await self._heard("reset", "reset_s", self.limits.reset_s, lambda: self.environment.reset(task))

    async def step(self, action: Action) -> Observation:
        """Answers one turn of the policy; raises Failed."""
        return await self._heard("step", "step_s", self.limits.step_s, lambda: self.environment.step(action))

    async def close(self) -> None:
        """Does nothing, since the builder of the environment closes it."""

    async def _heard(
        self, where: str, limit: str, seconds: float, call: Callable[[], Awaitable[Observation]]
    ) -> Observation:
        begin = time.perf_counter()
        try:
            found = await within(where, limit, seconds, call)
        finally:
            self.seconds += time.perf_counter() - begin
        if not isinstance(found, Observation):
            raise Failed(where, "TypeError", f"it returned {type(found).__name__} and not an Observation")
        if found.reward is not None:
            self.rewards.append(float(found.reward))
        return found


@dataclass(kw_only=True, eq=False)
class Player:
    """Plays rollouts, each in a session of its own.

    Attributes:
      service: continues token ids by the policy.
      tokenizer: renders messages, and decodes responses.
      environment: makes an environment for each rollout; None where an agent plays.
      agent: makes an agent for each rollout, which calls the policy through the gateway.
      config: the settings of episodes.
      template_kwargs: keyword arguments of the chat template.
      max_prompt_tokens: most tokens of a rollout's first prompt, which the schemas of an environment's tools make longer than the
        row's; None is the row's own number.
      counters: numbers of failures by cause, of rollouts that were played again, ended late or were cancelled.
    """

    service: TokenService
    tokenizer: Any
    environment: EnvironmentFactory | None = None
    agent: AgentFactory | None = None
    config: Episodes = field(default_factory=Episodes)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if (self.environment is None) == (self.agent is None):
            raise ValueError(
                "rollouts are played by an environment or by an agent: set one of Stage.environment and Stage.agent"
            )
        self._in_a_row = self._playing = 0
        self._dialogues: dict[bool, Dialogue] = {}
        self._gateway: Any = None  # an agents.gateway.RunningGateway
        self._opening = asyncio.Lock()
        if self.agent is not None:  # nobody else imports an HTTP server
            from jaxrl_llm.agents.gateway import Gateway

            self._default_gateway = Gateway()

    async def play(
        self, prompt: Prompt, sample: int, settings: SamplingParams, seed: int, role: Role = "sample"
    ) -> Rollout:
        """Plays rollout number `sample` of a prompt; raises Down after `stop_after` failures in a row, and whatever the sampler raises."""
        self._playing += 1
        try:
            for attempt in range(self.config.tries):
                self.counters["episodes/again"] += attempt > 0
                rollout = await _Episode(self, prompt, sample, settings, seed, role).play()
                if rollout.valid:
                    break
        finally:
            self._playing -= 1
        self._note(rollout)
        return rollout

    def _note(self, rollout: Rollout) -> None:
        """Counts failures in a row; the limit grows by the rollouts in progress, which may succeed, since a failure is often quicker."""
        self._in_a_row = 0 if rollout.valid else self._in_a_row + 1
        if self._in_a_row >= self.config.stop_after + self._playing:
            raise Down(
                f"{self._in_a_row} rollouts in a row failed (Episodes.stop_after), the last one of prompt {rollout.prompt.id!r} by "
                f"{rollout.error}: mend the environment or the agent, or set its limits higher"
            )

    async def dialogue(self, prompt: Prompt) -> Dialogue:
        """Returns the dialogue for a prompt: in plain text where the prompt is, else by the tokenizer's chat template."""
        plain = prompt.messages is None
        async with self._opening:
            if plain not in self._dialogues:  # a large tokenizer loads slowly, hence in a thread
                rendering = await asyncio.to_thread(PlainText, self.tokenizer) if plain else await self._rendering()
                self._dialogues[plain] = Dialogue(self.service, rendering)
        return self._dialogues[plain]

    async def _rendering(self) -> Rendering:
        given = {"history": self.config.history, "template_kwargs": self.template_kwargs}
        return await asyncio.to_thread(Rendering, self.tokenizer, **given)  # type: ignore[arg-type]

    async def gateway(self) -> Any:
        """Returns the agents.gateway.RunningGateway, which the first call starts."""
        async with self._opening:
            if self._gateway is None:
                chats = getattr(self.tokenizer, "chat_template", None) is not None
                rendering = await self._rendering() if chats else None
                self._gateway = await (self.config.gateway or self._default_gateway).start(self.service, rendering)
            return self._gateway

    async def close(self) -> None:
        """Closes the sessions, the gateway, and the factory where it has an async method `close`."""
        await self.service.close()
        for factory in (self.environment, self.agent):
            if inspect.iscoroutinefunction(close := getattr(factory, "close", None)):
                await close()
        if self._gateway is not None:
            await self._gateway.close()
            self._gateway = None


@dataclass(eq=False)
class _Episode:
    """One rollout being played."""

    player: Player
    prompt: Prompt
    sample: int
    settings: SamplingParams
    seed: int
    role: Role
    failure: Failed | None = None
    watched: Watched | None = None

    def __post_init__(self) -> None:
        own, most = self.player.config.limits, self.settings.max_tokens
        length = most + (self.player.max_prompt_tokens or len(self.prompt.prefix))
        self.limits = replace(
            own, max_length=min(own.max_length, length), max_response=min(own.max_response or most, most)
        )
        self.session = self.player.service.open(
            seed=self.seed, settings=self.settings, max_length=self.limits.max_length, max_tokens=self.limits.max_tokens,
            max_calls=self.limits.max_calls,
        )  # fmt: skip

    async def play(self) -> Rollout:
        """Plays to the end or to a limit, and always closes the session and the environment."""
        ending = Ending(stop="failed")
        try:
            ending = await self._scored(await self._timed())
        except Failed as failure:
            self.failure = failure
        except asyncio.CancelledError:
            self.player.counters.update({"episodes/cancelled": 1, "episodes/cancelled_tokens": self.session.sampled})
            raise
        finally:
            self.session.close()
            await self._close()
        return self._rollout(ending)

    async def _timed(self) -> Ending:
        """Returns the ending, the agent's or environment's own or that of the limit `episode_s`."""
        timer = asyncio.timeout(self.limits.episode_s)
        try:
            async with timer:
                return await self._acted()
        except TimeoutError as error:
            if not timer.expired():
                raise Failed("episode", "TimeoutError", str(error)) from error
            kept = self.player.config.late == "length"
            self.player.counters[f"episodes/late_{'kept' if kept else 'dropped'}"] += 1
            if not kept:
                text = f"it took longer than episode_s = {self.limits.episode_s:g} s"
                raise Failed("episode", "TimeoutError", text) from error
            rewards = self.watched.rewards if self.watched is not None else []
            return Ending(rewards={"reward": sum(rewards)} if rewards else {}, stop="episode_s")

    async def _scored(self, ending: Ending) -> Ending:
        """Adds the rewards of an environment that scores whole episodes, however they ended."""
        score = None if self.watched is None else getattr(self.watched.environment, "score", None)
        if score is None:
            return ending
        found = await within("score", "step_s", self.limits.step_s, score)
        return replace(ending, rewards={**ending.rewards, **found})

    async def _acted(self) -> Ending:
        """Builds the environment or the agent and lets it act; raises Failed where it fails."""
        player, built = self.player, (self.prompt, self.sample, self.seed)
        messages = self.prompt.messages or ({"role": "user", "content": self.prompt.text or ""},)
        tools = tuple(self.prompt.extra.get("tools") or ())
        task = Task(prompt=self.prompt, messages=messages, tools=tools, seed=self.seed, limits=self.limits)
        if player.agent is not None:
            agent = _built(player.agent.build, built)
            endpoint = (await player.gateway()).endpoint(self.session)
            ending = await within("run", "", None, lambda: agent.run(task, endpoint))
            if not isinstance(ending, Ending):
                raise Failed("run", "TypeError", f"it returned {type(ending).__name__} and not an Ending")
            return ending
        assert player.environment is not None
        environment = _built(player.environment.build, built)
        self.watched = Watched(environment, self.limits)
        if (offered := getattr(environment, "tools", None)) is not None:
            task = replace(task, tools=await self._offered(offered))
        try:
            return await (await player.dialogue(self.prompt)).play(self.watched, task, self.session)
        except (Ended, TooLong) as error:
            rewards = {"reward": sum(self.watched.rewards)} if self.watched.rewards else {}
            return Ending(rewards=rewards, stop=error.limit if isinstance(error, Ended) else "max_length")
        except ValueError as error:  # what the environment said cannot be rendered; others are the sampler's
            raise Failed("dialogue", type(error).__name__, str(error)) from error

    async def _offered(self, offered: Callable[..., Any]) -> tuple[Mapping[str, Any], ...]:
        """Returns the schemas of the environment's tools, by a plain or an async method; raises Failed."""
        found = _built(offered, (self.prompt,))
        if inspect.isawaitable(found):
            waited: Awaitable[Any] = found
            found = await within("tools", "reset_s", self.limits.reset_s, lambda: waited)
        return tuple(found)

    async def _close(self) -> None:
        """Closes the environment, where one was built; a failure makes the rollout invalid."""
        if self.watched is None:
            return
        try:
            await within("close", "close_s", self.player.config.close_s, self.watched.environment.close)
        except Failed as failure:
            self.failure = self.failure or failure

    def _rollout(self, ending: Ending) -> Rollout:
        branches: tuple[Branch, ...] = ()
        try:
            branches = self.session.branches()
        except ValueError as error:
            self.failure = self.failure or Failed("branches", type(error).__name__, str(error))
        if not any(branch.mask.any() for branch in branches):
            self.failure = self.failure or Failed(
                "episode", "NothingSampled", "it ended before the policy said anything"
            )
        if (failure := self.failure) is not None:
            self.player.counters[f"invalid/environment/{failure.where}/{failure.kind}"] += 1
        last = branches[-1] if branches else _nothing(self.prompt)
        alone = len(branches) < 2 and np.array_equal(last.prefix, self.prompt.prefix)
        return Rollout(
            prompt=self.prompt, tokens=last.tokens, sampler_logprobs=last.sampler_logprobs, mask=last.mask, versions=last.versions,
            finish=self._finish(ending, last), text=self.player.tokenizer.decode(last.tokens, skip_special_tokens=True),
            role=self.role, branches=() if alone else branches, turns=last.turns, valid=failure is None,
            error="" if failure is None else str(failure), rewards={} if failure is not None else dict(ending.rewards),
            info=self._info(ending),
        )  # fmt: skip

    def _finish(self, ending: Ending, last: Branch) -> Finish:
        if self.failure is not None or ending.stop == "aborted":
            return "aborted"
        return "length" if ending.stop in _CUT else last.finish

    def _info(self, ending: Ending) -> dict[str, Any]:
        seconds = 0.0 if self.watched is None else self.watched.seconds
        said: dict[str, Any] = json.loads(json.dumps(dict(ending.info), default=str))
        return {**said, "stop": ending.stop, "environment_s": seconds, "session": dict(self.session.metrics())}


def _built(build: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Returns what `build` returns; raises Failed where it raises."""
    try:
        return build(*given)
    except Down:
        raise
    except Exception as error:  # a factory is foreign code: any exception concerns this rollout alone
        raise Failed("build", type(error).__name__, str(error)) from error


def _nothing(prompt: Prompt) -> Branch:
    """Returns a branch without a token, for an episode in which the policy was not called."""
    none = np.zeros(0, np.int32)
    return Branch(
        prefix=prompt.prefix, tokens=none, sampler_logprobs=none.astype(np.float32), mask=none.astype(bool), versions=none,
        finish="aborted",
    )  # fmt: skip
