"""Procedural tasks of the reasoning-gym package, generated offline; each row carries what the package's own scorer needs."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data import generated, templates
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(generated.Family, templates.Templated):
    """Rows of one reasoning-gym task; the held-out questions never occur in training, for any seed.

    Attributes:
      task: the task's name in reasoning-gym, such as "spell_backward".
      size: number of rows.
      config: the task's own options.
    """

    task: str
    size: int = 1000
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generated.Family.__post_init__(self)
        templates.Templated.__post_init__(self)
        own = sorted({"size", "seed"} & set(self.config))
        if own:
            raise ValueError(f"ReasoningGym.config must not hold {own}: they are fields of ReasoningGym itself")

    def rows(self) -> Sequence[Prompt]:
        """Returns `size` prompts; `extra` holds the task, its options and the scorer's entry, `reference` the task's answer.

        Raises:
          ValueError: the task is unknown, lacks one of the options, or has too few different questions.
        """
        return [
            Prompt(
                id=f"{self.task}/{self.split}/{number}",
                reference=str(entry["answer"]),
                source=self.task,
                extra={"task": self.task, "config": dict(self.config), "entry": entry},
                **self.asked(entry["question"]),
            )
            for number, entry in enumerate(self._entries())
        ]

    def _entries(self) -> Iterator[Mapping[str, Any]]:
        share = self.heldout_share if self.split == "heldout" else 1 - self.heldout_share
        most = int(10 * self.size / share) + 1000
        dataset = self._dataset(most)
        found = 0
        for index in range(most):
            entry = dataset[index]
            if self.within(entry["question"]):
                yield entry
                found += 1
                if found == self.size:
                    return
        raise ValueError(
            f"reasoning-gym's {self.task!r} gave {found} of {self.size} {self.split} questions in {most} draws: it has "
            "too few different ones; lower ReasoningGym.size or change heldout_share or config"
        )

    def _dataset(self, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            close = difflib.get_close_matches(self.task, DATASETS, n=3) or sorted(DATASETS)[:5]
            raise ValueError(
                f"ReasoningGym.task={self.task!r} is none of reasoning-gym's {len(DATASETS)}; did you mean {close}?"
            )
        try:
            return reasoning_gym.create_dataset(self.task, size=size, seed=self.seed, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"reasoning-gym's {self.task!r} does not take ReasoningGym.config={dict(self.config)}: {error}"
            ) from error
