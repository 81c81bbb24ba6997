"""Classmate-CoT rewards a chain of thought for what other models do with it (github.com/Lorenayannnnn/classmate-cot-verl).

    main      = sign x behaviour(prompt, output)
    classmate = sign x weight x mean over classmates and samples of behaviour(prompt, answer after the same thought)

The two are parts of the reward, [G] each: the algorithms gdpo and grpo_w_classmate use the second for the thought's tokens
alone. sign = 1 rewards the behaviour (as the original does, despite its name) and makes the thought reveal it; -1
rewards its absence. Deviations from the original: missing ratings are invalid instead of 0; a thought that is empty or has no end
tag has no score (`absent`); remove_wo_cot subtracts as documented, where the original does nothing; reward types that the
original only names are refused, and so is its correction by the classmate's log-probs, which its authors removed.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm import components
from jaxrl_llm.experience import Group, Prompt, Rollout, Scores
from jaxrl_llm.protocols import Reward
from jaxrl_llm.rewards.thought_span import OUTPUT, THOUGHT
from jaxrl_llm.rewards.wrap import Failed, PlainReward, report

DEFINED = ("vanilla_reward", "remove_wo_cot", "random_truncate")
NAMED_ONLY = (
    "random_truncate_remove_wo_cot",
    "random_truncate_step_wise_utility",
    "help_other_questions",
    "help_other_similar_questions",
)
CONDITIONS = ("always", "no_classmate", "no_classmate_when_main_incorrect", "neg_classmate_when_main_incorrect")


class Asked(NamedTuple):
    """A thought that a classmate continues.

    Attributes:
      prompt: the task.
      thought: int32 [T] ids of the chain of thought, in the policy's vocabulary.
      text: the thought as text.
      seed: seed of the sampled answers.
    """

    prompt: Prompt
    thought: np.ndarray
    text: str
    seed: int


class Answer(NamedTuple):
    """A classmate's answer after a thought.

    Attributes:
      text: the answer without the thought.
      tokens: int32 [T], in the policy's vocabulary.
    """

    text: str
    tokens: np.ndarray


@runtime_checkable
class Classmate(Protocol):
    """A model that answers after another model's thought."""

    async def answers(self, asked: Sequence[Asked], samples: int) -> list[list[Answer] | None]:
        """Returns `samples` answers for each thought; None where one exceeds its limits. Raises wrap.Failed."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of ids of the policy's vocabulary."""
        ...


class Ratings(NamedTuple):
    """Ratings of the answers after the thoughts of R rollouts.

    Attributes:
      values: float64 [R] mean rating; 0 where there is none.
      known: bool [R], whether a rating was obtained.
      lacking: bool [R], whether there was no usable thought: none that is closed, or one that is empty or too long.
    """

    values: np.ndarray
    known: np.ndarray
    lacking: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ClassmateCoT(PlainReward):
    """A reward for a behaviour in two parts, "main" and "classmate". Rollouts need the spans of thought_span.ThoughtSpan (Stage.marker).

    Attributes:
      behaviour: rates an output of the policy or of a classmate; the thought precedes both.
      sign: 1 rewards the behaviour, -1 its absence; there is no default.
      classmates: models that continue the thoughts; may be empty with condition "no_classmate", the baseline.
      reward_type: "vanilla_reward"; "remove_wo_cot" (subtracts the mean rating of answers without any thought);
        "random_truncate" (answers continue a first part of the thought, its share drawn from [0.1, 0.9] for each rollout).
      condition: when the classmate part counts: "always", "no_classmate" (0), "no_classmate_when_main_incorrect" (0 where
        the behaviour is not above 0; classmates are not asked), "neg_classmate_when_main_incorrect" (its sign flips there).
      weight: weight of the classmate part.
      samples: number of answers of each classmate to each thought.
      keep: the part of a thought that is passed on: 1.0 (all), a share of its tokens from the start (at least one token),
        "first-N" or "last-N" tokens.
      absent: the classmate part of a rollout whose thought is empty, too long or without end tag; None makes it invalid.
      seed: seeds the truncations and the classmates' sampling, which depend on the rollout alone.
    """

    behaviour: Reward
    sign: Literal[1, -1]
    classmates: Sequence[Classmate] = ()
    reward_type: str = "vanilla_reward"
    condition: str = "always"
    weight: float = 1.0
    samples: int = 1
    keep: float | str = 1.0
    absent: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.reward_type not in DEFINED:
            known = "is only named by the original, which does not define it" if self.reward_type in NAMED_ONLY else ""
            raise ValueError(
                f"ClassmateCoT.reward_type must be one of {DEFINED} (got {self.reward_type!r}{', which ' * bool(known)}{known})"
            )
        components.one_of(self, CONDITIONS, "condition")
        components.choices(self)
        if not self.classmates and self.condition != "no_classmate":
            raise ValueError(
                "ClassmateCoT.classmates is empty: name one, or set ClassmateCoT.condition = 'no_classmate'"
            )
        components.at_least(self, 1, "samples")
        components.at_least(self, 0, "weight")
        if self.behaviour.needs_stats:
            raise ValueError("ClassmateCoT.behaviour must not need the learner's statistics")
        kept(np.zeros(1, np.int32), self.keep)

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns the two parts [G]; classmates run while the behaviour is rated, unless the condition depends on its rating.

        Raises:
          ValueError: a rollout lacks the spans "thought" and "output".
        """
        del stats
        thoughts = [self._thought(rollout) for rollout in rollouts]
        rating = asyncio.ensure_future(self._rated(rollouts))
        if self.condition == "no_classmate_when_main_incorrect":
            base, valid = await rating
            wanted = valid & (base > 0)
        else:
            wanted = np.full(len(rollouts), self.condition != "no_classmate")
        try:
            helped = await self._helped(rollouts, thoughts, wanted)
            base, valid = await rating
        except BaseException:
            rating.cancel()
            raise
        return self._scores(base, valid, wanted, helped)

    def _scores(
        self, base: Float[np.ndarray, "G"], valid: Bool[np.ndarray, "G"], wanted: Bool[np.ndarray, "G"], helped: Ratings
    ) -> Scores:
        """Returns the parts from the behaviour's ratings of the policy (`base`) and of the classmates (`helped`, where `wanted`)."""
        flip = np.where((self.condition == "neg_classmate_when_main_incorrect") & ~(base > 0), -1.0, 1.0)
        part, known = self.sign * self.weight * flip * helped.values, helped.known | ~wanted
        if self.absent is not None:
            part, known = np.where(helped.lacking, self.absent, part), known | helped.lacking
        if self.condition.endswith("incorrect"):
            known = known & valid  # without the behaviour's rating it is unknown whether the part counts
        parts = {
            "main": (self.sign * base, valid),
            "classmate": (np.where(known, part, 0.0), known),
            "log/behaviour": (base, valid),
            "log/classmate_behaviour": (helped.values, helped.known),
            "log/classmate_lacking": (helped.lacking.astype(float), wanted),
        }
        return Scores(parts={n: v for n, (v, _) in parts.items()}, valid={n: ok for n, (_, ok) in parts.items()})

    # -- asking the classmates -----------------------------------------------------------------------------------------

    def _thought(self, rollout: Rollout) -> np.ndarray | None:
        """Returns the ids of the rollout's thought that are passed on; None without a closed thought."""
        if THOUGHT not in rollout.spans or OUTPUT not in rollout.spans:
            raise ValueError(
                "ClassmateCoT needs to know where the thought stands: set train.Stage.marker = @thought_span.ThoughtSpan()"
            )
        if not rollout.spans[OUTPUT].any():
            return None
        ids = rollout.tokens[rollout.spans[THOUGHT]]
        if self.reward_type == "random_truncate" and len(ids):
            share = np.random.default_rng(self._seed(rollout)).uniform(0.1, 0.9)
            return kept(ids, float(share))
        return kept(ids, self.keep)

    async def _helped(
        self, rollouts: Sequence[Rollout], thoughts: Sequence[np.ndarray | None], wanted: Bool[np.ndarray, "G"]
    ) -> Ratings:
        """Returns the mean rating over the classmates for the rollouts in `wanted`."""
        there = np.array([t is not None and len(t) > 0 for t in thoughts], bool)
        values, known, lacking = np.zeros(len(rollouts)), wanted & there, wanted & ~there
        rows = np.flatnonzero(known)
        given = [(rollouts[i], t) for i in rows.tolist() if (t := thoughts[i]) is not None]
        if given:
            for found in await asyncio.gather(*(self._by_one(mate, given) for mate in self.classmates)):
                values[rows] += found.values / len(self.classmates)
                known[rows] &= found.known
                lacking[rows] |= found.lacking
        return Ratings(np.where(known, values, 0.0), known, lacking)

    async def _by_one(self, mate: Classmate, given: Sequence[tuple[Rollout, np.ndarray]]) -> Ratings:
        """Returns ratings of one classmate's answers to R thoughts; "remove_wo_cot" subtracts those of answers without a thought."""
        try:
            found = await self._answered(mate, given)
            if self.reward_type == "remove_wo_cot":
                alone = await self._answered(mate, [(given[0][0], np.zeros(0, np.int32))])
                found = Ratings(found.values - alone.values, found.known & alone.known, found.lacking)
        except Failed as failure:
            report("classmate", [(failure, given[0][0])], f"{len(given)} thoughts")
            nothing = np.zeros(len(given), bool)
            return Ratings(np.zeros(len(given)), nothing, nothing)
        return found

    async def _answered(self, mate: Classmate, given: Sequence[tuple[Rollout, np.ndarray]]) -> Ratings:
        """Returns the mean rating of a classmate's answers to each thought."""
        asked = [Asked(r.prompt, t, mate.decode(t), self._seed(r)) for r, t in given]
        answers = await mate.answers(asked, self.samples)
        if len(answers) != len(given):
            raise ValueError(f"{type(mate).__name__} gave {len(answers)} answers to {len(given)} thoughts")
        places = np.array([i for i, several in enumerate(answers) for _ in several or ()], np.int64)
        said = [following(given[i][0], a, mate) for i, several in enumerate(answers) for a in several or ()]
        values, counts = np.zeros(len(given)), np.zeros(len(given))
        if said:
            rated, known = await self._rated(said)
            np.add.at(values, places, np.where(known, rated, 0.0))
            np.add.at(counts, places, known)
        lacking = np.array([several is None for several in answers], bool)
        return Ratings(values / np.maximum(counts, 1), ~lacking & (counts == self.samples), lacking)

    async def _rated(self, rollouts: Sequence[Rollout]) -> tuple[Float[np.ndarray, "R"], Bool[np.ndarray, "R"]]:
        group = Group(rollouts=rollouts, scores=await self.behaviour.score(rollouts))
        return group.total(), group.valid()

    def _seed(self, rollout: Rollout) -> int:
        """Returns a seed from the rollout's own tokens, independent of when and with which others it is scored."""
        name = rollout.prompt.id.encode() + np.asarray(rollout.tokens, np.int32).tobytes()
        return int(np.random.SeedSequence((self.seed, zlib.crc32(name))).generate_state(1)[0] >> 1)


def kept(thought: np.ndarray, keep: float | str) -> np.ndarray:
    """Returns the ids of a thought that `keep` passes on; raises ValueError, naming the binding, for an invalid `keep`."""
    if isinstance(keep, str):
        side, _, count = keep.removesuffix("-tokens").partition("-")
        if side not in ("first", "last") or not count.isdigit() or int(count) < 1:
            raise ValueError(f"ClassmateCoT.keep must be a share in (0, 1], 'first-N' or 'last-N' (got {keep!r})")
        return thought[: int(count)] if side == "first" else thought[-int(count) :]
    if not 0 < keep <= 1:
        raise ValueError(f"ClassmateCoT.keep must be a share in (0, 1], 'first-N' or 'last-N' (got {keep})")
    return thought if keep == 1 or not len(thought) else thought[: max(1, int(len(thought) * keep))]


def following(rollout: Rollout, answer: Answer, mate: Classmate) -> Rollout:
    """Returns the rollout with a classmate's answer in place of its output."""
    head = rollout.tokens[: int(np.argmax(rollout.spans[OUTPUT]))]
    tokens = np.concatenate([head, answer.tokens]).astype(np.int32)
    return replace(
        rollout, tokens=tokens, text=mate.decode(head) + answer.text, mask=np.zeros(len(tokens), bool), spans={},
        sampler_logprobs=np.zeros(len(tokens), np.float32), versions=np.full(len(tokens), -1, np.int32), finish="stop",
    )  # fmt: skip
