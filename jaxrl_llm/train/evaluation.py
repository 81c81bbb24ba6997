"""Evaluation of a stage: prompts that the policy answers, and given responses that it never learns from."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed.preemption import Preemption, Stopping
from jaxrl_llm.eval.evaluate import evaluate
from jaxrl_llm.experience import Group, Prompt
from jaxrl_llm.metrics import rollout_rows
from jaxrl_llm.rollouts.collect import RolloutGenerator
from jaxrl_llm.train.stage import Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """The held-out data of a stage.

    Attributes:
      config: the stage.
      prompts: encoded prompts of each of its evaluations.
      given: groups of responses whose loss is measured.
      generator: generates the answers.
      preemption: listens for signals, which end an evaluation where process 0 alone asks the sampler.
    """

    config: Stage
    prompts: Sequence[Sequence[Prompt]] = ()
    given: Sequence[Group] = ()
    generator: RolloutGenerator
    preemption: Preemption

    @property
    def reading(self) -> dict[str, Any]:
        """Options for writing rollouts for people to read."""
        config = self.config
        return {"tokenizer": self.generator.tokenizer, "rollouts": config.show_rollouts, "tokens": config.show_tokens}

    async def answers(self) -> tuple[dict[str, float], list[rollout_rows.Row]]:
        """Runs all evaluations with the weights that the sampler holds; returns their metrics, and their first rollouts to be read.

        Raises:
          Stopping: a signal came first; all processes of the run raise it.
        """
        processes = self.preemption.processes
        if processes.count == self.generator.processes.count:
            metrics, rows = await self._answers()
            return processes.broadcast(metrics), rows
        found: dict[str, float] | None = None
        rows = []
        if processes.main:  # it alone asks the sampler
            with contextlib.suppress(Stopping):
                found, rows = await self.preemption.unless(self._answers())
        found = processes.broadcast(found)
        if found is None:
            raise Stopping
        return found, rows

    async def _answers(self) -> tuple[dict[str, float], list[rollout_rows.Row]]:
        metrics: dict[str, float] = {}
        rows: list[rollout_rows.Row] = []
        for evaluation, prompts in zip(self.config.evaluations, self.prompts, strict=True):
            reward = evaluation.reward or self.config.reward
            if reward is None and not self.config.plays:
                raise ValueError(
                    f"evaluation {evaluation.name!r} has no reward: set Evaluation.reward, or Stage.reward of stage {self.config.name!r}"
                )
            settings = with_stop_ids(evaluation.settings, self.generator.tokenizer)
            found, groups = await evaluate(replace(evaluation, settings=settings), prompts, self.generator, reward)
            metrics |= found
            rows += rollout_rows.held_out(evaluation.name, list(evaluation.kinds), groups, **self.reading)
        return metrics, rows
