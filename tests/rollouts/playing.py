"""A typing policy, environments that fail where they are told to, and what watches the event loop."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.experience import Action, Completion, Observation, Prompt, Rollout, SamplingParams, Task
from jaxrl_llm.rollouts.collect import RolloutGenerator
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.rollouts.player import Player
from jaxrl_llm.rollouts.schedule import Slots

TOKENIZER = CharTokenizer(alphabet="abcdefghijklmnopqrstuvwxyz0123456789+-*=[];? ").load()
SETTINGS = SamplingParams(max_tokens=64)
TICK = 0.005  # seconds


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text)["input_ids"], np.int32)


def make_prompt(name: str, text: str = "go ") -> Prompt:
    return Prompt(id=name, text=text, tokens=ids(text))


@dataclass(eq=False)
class Typist:
    """Types two letters that depend on the seed, after `delay_s`.

    Attributes:
      delay_s: seconds of a call.
      failing: raised by every call.
    """

    delay_s: float = 0.0
    failing: Exception | None = None
    version: int = 3
    heard: list[str] = field(default_factory=list)

    async def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        assert n == len(prefixes) == 1
        await asyncio.sleep(self.delay_s)
        if self.failing is not None:
            raise self.failing
        self.heard.append(TOKENIZER.decode(prefixes[0]))
        said = "".join(chr(97 + letter) for letter in np.random.default_rng(seeds[0]).integers(0, 26, 2))
        tokens = ids(said)[: settings.max_tokens]
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        finish = "stop" if len(tokens) == 2 else "length"
        yield (
            0,
            [Completion(tokens=tokens, logprobs=logprobs, versions=np.full(len(tokens), 3, np.int32), finish=finish)],
        )

    async def publish(self, params: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


async def hang() -> None:
    await asyncio.Event().wait()


@dataclass
class Games:
    """Games of two turns with the reward 1 and then 2; some go wrong.

    Attributes:
      wrong: (prompt's id, sample) -> where the game goes wrong: "build", "reset", "step" and "close" raise, "... hangs" never returns.
      said: what it answers.
      seconds: of a step, by (prompt's id, sample).
      built, closed: (prompt's id, sample) of each game.
    """

    wrong: Callable[[str, int], str] = lambda prompt, sample: ""
    said: str = " ok "
    seconds: Callable[[str, int], float] = lambda prompt, sample: 0.0
    built: list[tuple[str, int, int]] = field(default_factory=list)
    closed: list[tuple[str, int]] = field(default_factory=list)

    def build(self, prompt: Prompt, sample: int, seed: int) -> "Game":
        self.built.append((prompt.id, sample, seed))
        wrong = self.wrong(prompt.id, sample)
        if wrong == "build":
            raise LookupError("no board")
        return Game(self, prompt.id, sample, wrong)


@dataclass
class Game:
    games: Games
    prompt: str
    sample: int
    wrong: str
    turns: int = 0

    async def reset(self, task: Task) -> Observation:
        await self._at("reset")
        return Observation(done=self.wrong == "nothing")

    async def step(self, action: Action) -> Observation:
        self.turns += 1
        await asyncio.sleep(self.games.seconds(self.prompt, self.sample))
        await self._at("step")
        if self.wrong == "none":
            return None
        said = "\u2603" if self.wrong == "unknown character" else self.games.said
        message = {"role": "tool", "content": said}
        return Observation(
            messages=[message], done=self.turns == 2, reward=float(self.turns), info={"last": action.text}
        )

    async def close(self) -> None:
        self.games.closed.append((self.prompt, self.sample))
        await self._at("close")

    async def _at(self, where: str) -> None:
        if self.wrong == where:
            raise OSError(f"{where} is broken")
        if self.wrong == f"{where} hangs":
            await hang()


def make_generator(
    environment: Any, sampler: Any = None, *, slots: Slots | None = None, **fields: Any
) -> RolloutGenerator:
    """A generator whose player has these fields of Episodes."""
    sampler = Typist() if sampler is None else sampler
    acting = {"agent" if hasattr(environment, "run") else "environment": environment}
    player = Player(service=TokenService(sampler, SETTINGS), tokenizer=TOKENIZER, config=Episodes(**fields), **acting)
    return RolloutGenerator(sampler=sampler, tokenizer=TOKENIZER, player=player, slots=slots)


async def play(generator: RolloutGenerator, prompts: int = 1, n: int = 4) -> list[list[Rollout]]:
    """The groups of prompts "p0", "p1", ... by prompt."""
    asked = [make_prompt(f"p{i}") for i in range(prompts)]
    found = {i: group async for i, group in generator.groups(asked, n, SETTINGS, list(range(prompts)))}
    await generator.player.close()
    return [found[i] for i in range(prompts)]


def watched(work: Any) -> tuple[Any, float]:
    """Runs `work`; returns its result and the seconds that the event loop was held up at most, and asserts that no task is left.

    What holds up a thread that only sleeps is other programs of the machine, and is taken off.
    """
    lags, over = {"loop": 0.0, "machine": 0.0}, threading.Event()

    def note(who: str, last: float) -> float:
        now = time.perf_counter()
        lags[who] = max(lags[who], now - last - TICK)
        return now

    def sleep() -> None:
        last = time.perf_counter()
        while not over.wait(TICK):
            last = note("machine", last)

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            last = note("loop", last)

    async def run() -> Any:
        ticking = asyncio.create_task(tick())
        try:
            return await work
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    sleeping = threading.Thread(target=sleep)
    sleeping.start()
    try:
        return asyncio.run(run()), lags["loop"] - lags["machine"]
    finally:
        over.set()
        sleeping.join()
