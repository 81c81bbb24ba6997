"""Generated tasks on text files, such as "write the sum of the numbers in stock.txt into total.txt", with the files that must be there in the end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data import generated
from jaxrl_llm.experience import Prompt

WORDS = (
    "amber", "barge", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "kayak", "ledge", "maple",
    "north", "ocean", "pearl", "quail", "ridge", "slate", "tidal", "umber", "valve", "wharf", "xenon", "yacht", "zebra",
)  # fmt: skip
VARIANTS = 2**14  # number of problems of each kind of task

Files = dict[str, str]


def _lines(random: np.random.Generator, count: int) -> list[str]:
    return [f"{WORDS[random.integers(len(WORDS))]} {random.integers(1, 100)}" for _ in range(count)]


def _text(lines: Sequence[object]) -> str:
    return "".join(f"{line}\n" for line in lines)


def count(random: np.random.Generator, lines: int) -> tuple[str, Files, Files]:
    """Asks for the number of lines that contain a word."""
    found = _lines(random, lines)
    word = found[0].split()[0]
    number = sum(line.startswith(f"{word} ") for line in found)
    return (
        f"Count the lines of log.txt that contain the word {word}, and write the number into count.txt.",
        {"log.txt": _text(found)},
        {"count.txt": _text([number])},
    )


def total(random: np.random.Generator, lines: int) -> tuple[str, Files, Files]:
    """Asks for the sum of a column."""
    found = _lines(random, lines)
    number = sum(int(line.split()[1]) for line in found)
    return (
        "Each line of stock.txt is a word and a number. Write the sum of the numbers into total.txt.",
        {"stock.txt": _text(found)},
        {"total.txt": _text([number])},
    )


def order(random: np.random.Generator, lines: int) -> tuple[str, Files, Files]:
    """Asks for the different words, each once, in alphabetical order."""
    found = _lines(random, lines)
    words = sorted({line.split()[0] for line in found})
    return (
        "Write the first words of the lines of notes.txt into words.txt: each word once, one a line, in alphabetical order.",
        {"notes.txt": _text(found)},
        {"words.txt": _text(words)},
    )


def rename(random: np.random.Generator, lines: int) -> tuple[str, Files, Files]:
    """Asks for a file to be copied under another name, while another file stays as it is."""
    old, new, other = (WORDS[i] for i in random.choice(len(WORDS), 3, replace=False))
    moved, stays = _text(_lines(random, lines)), _text(_lines(random, lines))
    return (
        f"Copy {old}.txt to {new}.txt, and change nothing else.",
        {f"{old}.txt": moved, f"{other}.txt": stays},
        {f"{old}.txt": moved, f"{new}.txt": moved, f"{other}.txt": stays},
    )


KINDS: Mapping[str, Callable[[np.random.Generator, int], tuple[str, Files, Files]]] = {
    "count": count, "total": total, "order": order, "rename": rename,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FileTasks(generated.Family):
    """Prompts that ask for a change of files; `Prompt.extra` has "files", which are there at first, and "wanted", which must be there in the end.

    Attributes:
      kinds: kinds of tasks, out of "count", "total", "order" and "rename", used in turn.
      lines: number of lines of a file.
    """

    kinds: Sequence[str] = tuple(KINDS)
    lines: int = 8
    size: int | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        components.at_least(self, 1, "lines")
        if not self.kinds or set(self.kinds) - set(KINDS):
            components.refuse(self, "kinds", f"one or more of {tuple(KINDS)}")

    def rows(self) -> Sequence[Prompt]:
        """Returns all prompts; every call returns the same."""
        problems = self.problems([VARIANTS] * len(self.kinds), lambda kind, index: f"{self.kinds[kind]}/{index}")
        return [self._prompt(row, self.kinds[kind], index) for row, (kind, index) in enumerate(problems)]

    def _prompt(self, row: int, kind: str, index: int) -> Prompt:
        asked, files, wanted = KINDS[kind](np.random.default_rng([index, list(KINDS).index(kind)]), self.lines)
        text = f"{asked} The files are in the current folder: {', '.join(sorted(files))}. Use the tool bash."
        return Prompt(
            id=f"file_tasks/{self.split}/{row}", messages=[{"role": "user", "content": text}], source=f"file_tasks/{kind}",
            extra={"files": files, "wanted": wanted},
        )  # fmt: skip
