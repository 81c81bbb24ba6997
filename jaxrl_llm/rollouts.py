"""From encoded prompts to rollouts: repeated sampling on a token prefix, with an environment's answers in between.

Token ids and log-probs are the sampler's, never re-tokenised; text that an environment adds is encoded once, appended and
masked out.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenizer import stop_ids
from jaxrl_llm.experience import Completion, Prompt, Role, Rollout, SamplingSettings
from jaxrl_llm.hosts import Processes
from jaxrl_llm.protocols import Environment, Marker, Sampler


def seed_of(*numbers: int) -> int:
    """A 31-bit seed that depends on all of `numbers` (run seed, step, place), by NumPy's SeedSequence."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def stopping(settings: SamplingSettings, tokenizer: Any) -> SamplingSettings:
    """The settings with the ids that end the model's responses among the stop ids."""
    ends = stop_ids(tokenizer)
    if not ends and not settings.stop_token_ids and not settings.stop_strings:
        raise ValueError(
            "the tokenizer has no end-of-sequence token: set SamplingSettings.stop_token_ids or stop_strings"
        )
    return replace(settings, stop_token_ids=tuple(dict.fromkeys((*settings.stop_token_ids, *ends))))


@dataclass(frozen=True, kw_only=True, eq=False)
class Asking:
    """Asks a sampler for groups of rollouts.

    Attributes:
      sampler: the running sampler.
      tokenizer: decodes responses, and encodes what an environment says.
      environment: answers between turns; None for a single turn.
      marker: names ranges of a response's tokens; None names none.
      max_turns: most turns of the policy.
      counters: what was counted: rollouts by the way they ended.
      processes: those that ask together, one sampler on the devices of all; process 0 alone has them scored.
    """

    sampler: Sampler
    tokenizer: Any
    environment: Environment | None = None
    marker: Marker | None = None
    max_turns: int = 8
    counters: Counter[str] = field(default_factory=Counter)
    processes: Processes = field(default_factory=Processes)

    async def groups(
        self, prompts: Sequence[Prompt], n: int, settings: SamplingSettings, seeds: Sequence[int], role: Role = "sample"
    ) -> AsyncIterator[tuple[int, list[Rollout]]]:
        """Yields (index of the prompt, its n rollouts) as they finish; a prompt's group depends on its seed alone."""
        prefixes = [p.prefix for p in prompts]
        talking: set[asyncio.Task[tuple[int, list[Rollout]]]] = set()
        try:
            async for index, completions in self.sampler.sample(prefixes, n, settings, seeds):
                rollouts = [self._first(prompts[index], c, role) for c in completions]
                if self.environment is None:
                    yield self._finished(index, rollouts)
                else:
                    talking.add(asyncio.ensure_future(self._talk(index, rollouts, settings, seeds[index])))
            for talk in asyncio.as_completed(talking):
                yield self._finished(*await talk)
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)

    async def _talk(
        self, index: int, rollouts: Sequence[Rollout], settings: SamplingSettings, seed: int
    ) -> tuple[int, list[Rollout]]:
        """A group's further turns; all groups talk at the same time."""
        talks = [self._converse(r, settings, seed_of(seed, i)) for i, r in enumerate(rollouts)]
        return index, list(await asyncio.gather(*talks))

    def _finished(self, index: int, rollouts: list[Rollout]) -> tuple[int, list[Rollout]]:
        texts = self.tokenizer.batch_decode([r.tokens for r in rollouts], skip_special_tokens=True)
        self.counters.update(f"finish/{r.finish}" for r in rollouts)
        self.counters["empty"] += sum(not t.strip() for t in texts)
        named = [replace(r, text=t) for r, t in zip(rollouts, texts, strict=True)]
        if self.marker is not None:
            named = [replace(r, spans=self.marker.mark(r, self.tokenizer)) for r in named]
        return index, named

    def _first(self, prompt: Prompt, completion: Completion, role: Role) -> Rollout:
        return Rollout(
            prompt=prompt, tokens=completion.tokens, sampler_logprobs=completion.logprobs,
            mask=np.ones(len(completion.tokens), bool), versions=completion.versions, finish=completion.finish, role=role,
        )  # fmt: skip

    async def _converse(self, rollout: Rollout, settings: SamplingSettings, seed: int) -> Rollout:
        """The further turns of one rollout, until the environment is done or the token limit is reached."""
        assert self.environment is not None
        state: Any = None
        for turn in range(1, self.max_turns):
            if rollout.finish != "stop":
                break
            text = self.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
            answer, state = self.environment.step(replace(rollout, text=text), state)
            if answer is None:
                break
            said = np.asarray(self.tokenizer.encode(answer, add_special_tokens=False), np.int32)
            room = settings.max_tokens - len(rollout.tokens) - len(said)
            if room < 1:
                return replace(rollout, finish="length")
            rollout = _append(
                rollout,
                said,
                np.zeros(len(said), np.float32),
                np.full(len(said), self.sampler.version, np.int32),
                learned=False,
            )
            prefix = np.concatenate([rollout.prompt.prefix, rollout.tokens]).astype(np.int32)
            limits = replace(settings, max_tokens=room, min_tokens=min(settings.min_tokens, room))
            async for _, (completion,) in self.sampler.sample([prefix], 1, limits, [seed_of(seed, turn)]):
                rollout = _append(rollout, completion.tokens, completion.logprobs, completion.versions, learned=True)
                rollout = replace(rollout, finish=completion.finish)
        return rollout


def _append(
    rollout: Rollout, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, *, learned: bool
) -> Rollout:
    return replace(
        rollout,
        tokens=np.concatenate([rollout.tokens, tokens]).astype(np.int32),
        sampler_logprobs=np.concatenate([rollout.sampler_logprobs, logprobs]).astype(np.float32),
        mask=np.concatenate([rollout.mask, np.full(len(tokens), learned)]),
        versions=np.concatenate([rollout.versions, versions]).astype(np.int32),
    )
