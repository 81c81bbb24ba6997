"""A sampler that draws from a script, and what branches must be by its own record of calls."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxrl_llm.experience import Completion, SamplingParams

Script = Callable[[np.ndarray, int, SamplingParams], Sequence[int]]  # prefix, seed, settings -> tokens


@dataclass(eq=False)
class Scripted:
    """A sampler without a model.

    Attributes:
      script: the tokens that follow a prefix; those after `max_tokens` or a stop id are cut off.
      delay_s: seconds of a call.
      max_length: most tokens of a prefix and its completion.
      asked: (prefix, completion) of all calls that were answered.
    """

    script: Script
    delay_s: float = 0.0
    max_length: int = 1 << 20
    version: int = 3
    asked: list[tuple[np.ndarray, Completion]] = field(default_factory=list)
    settings: list[SamplingParams] = field(default_factory=list)
    given_up: int = 0
    running: int = 0

    async def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        assert n == 1 and len(prefixes) == len(seeds) == 1
        self.settings.append(settings)
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.running -= 1
        made = completion(self.script(prefixes[0], seeds[0], settings), settings, self.version)
        self.asked.append((prefixes[0], made))
        yield 0, [made]

    async def publish(self, params, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    def metrics(self):
        return {}


def completion(drawn: Sequence[int], settings: SamplingParams, version: int) -> Completion:
    """A completion of drawn tokens, with log-probs that tell tokens and places apart; a script that ends early has met a stop string."""
    tokens = np.asarray(drawn, np.int32)[: settings.max_tokens]
    stops = np.flatnonzero(np.isin(tokens, settings.stop_token_ids))
    tokens = tokens[: stops[0] + 1] if len(stops) else tokens
    logprobs = [-((zlib.crc32(f"{t} {i}".encode()) % 1000) + 1) / 500 for i, t in enumerate(tokens.tolist())]
    return Completion(
        tokens=tokens, logprobs=np.asarray(logprobs, np.float32), versions=np.full(len(tokens), version, np.int32),
        finish="stop" if len(stops) or len(tokens) < settings.max_tokens else "length",
    )  # fmt: skip


def random_script(vocabulary: int) -> Script:
    """2 to 8 tokens that depend on the seed alone."""

    def script(prefix: np.ndarray, seed: int, settings: SamplingParams) -> list[int]:
        del prefix, settings
        rng = np.random.default_rng(seed)
        return rng.integers(0, vocabulary, rng.integers(2, 9)).tolist()

    return script


def check_branches(branches, sampler: Scripted) -> None:
    """Asserts that branches are what the sampler saw and drew, and that each sampled token is learned from once.

    By the sampler's own record: each branch is a prefix with its completion; the masked tokens of a turn are the completion of a call
    whose prefix is all that stands before them; every call is masked in once.
    """
    seen = [(prefix.tolist(), made.tokens.tolist()) for prefix, made in sampler.asked]
    whole = {(*prefix, *made) for prefix, made in seen}
    learned: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for branch in branches:
        tokens = [*branch.prefix.tolist(), *branch.tokens.tolist()]
        assert tuple(tokens) in whole, "a branch that the sampler never saw"
        begin, covered = len(branch.prefix), np.zeros(len(branch.tokens), bool)
        for turn in branch.turns:
            before, drawn = tokens[: begin + turn.start], tokens[begin + turn.start : begin + turn.end]
            assert (before, drawn) in seen, "a turn that the sampler never drew"
            masks = set(branch.mask[turn.start : turn.end].tolist())
            assert len(masks) < 2, "a turn that is learned from in part"
            assert not covered[turn.start : turn.end].any()
            covered[turn.start : turn.end] = True
            made = next(m for p, m in sampler.asked if p.tolist() == before and m.tokens.tolist() == drawn)
            np.testing.assert_array_equal(branch.sampler_logprobs[turn.start : turn.end], made.logprobs)
            np.testing.assert_array_equal(branch.versions[turn.start : turn.end], made.versions)
            if masks == {True}:
                learned.append((tuple(before), tuple(drawn)))
        assert not branch.mask[~covered].any() and not branch.sampler_logprobs[~covered].any()
    drawn_calls = [(tuple(prefix), tuple(made)) for prefix, made in seen if made]
    assert sorted(learned) == sorted(drawn_calls), "a call that is learned from never, or twice"
