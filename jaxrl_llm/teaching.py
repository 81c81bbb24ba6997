"""A frozen model that says how likely it finds what the policy sampled."""

from dataclasses import dataclass
from typing import Any

from jax import Array

from jaxrl_llm.batch import Batch
from jaxrl_llm.eval.harness import ModelSource, Opened
from jaxrl_llm.learner import Learner
from jaxrl_llm.mesh import Partitioner
from jaxrl_llm.protocols import Params


@dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A teacher on the policy's mesh; of any architecture, with the policy's tokens.

    Attributes:
      learner: scores; it trains nothing.
      params: the teacher's parameters.
    """

    learner: Learner
    params: Params

    @classmethod
    def open(cls, opened: Opened, learner: Learner) -> "Teacher":
        """Reads the parameters; the teacher is scored as `learner` scores the policy."""
        scoring = Learner(
            models={"policy": opened.policy}, algorithm=learner.algorithm, optimizers={}, updates=1,
            temperature=learner.temperature, max_segments=learner.max_segments,
        )  # fmt: skip
        return cls(learner=scoring, params=opened.params())

    def logprobs(self, batch: Batch) -> Array:
        """Log-probs [B, T] of the batch's targets."""
        return self.learner.score_frozen(self.params, batch)


def found(source: ModelSource, tokenizer: Any, partitioner: Partitioner) -> Opened:
    """The teacher, its parameters not yet read.

    Raises:
      OSError: no such folder or checkpoint.
      ValueError: its tokens are others than those of `tokenizer`.
    """
    opened = source.open(partitioner)
    theirs, ours = opened.tokenizer.get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t))
        raise ValueError(
            f"the teacher {opened.name} has other tokens than the policy ({len(theirs)} and {len(ours)}; such as {different[:3]}) "
            "and is asked about the policy's token ids: set TEACHER_PATH to a model with the policy's tokenizer"
        )
    return opened
