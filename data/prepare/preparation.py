"""Shared code of the preparation commands: reads raw rows, writes verl's rows as Parquet files and reports what was left out.

A data set's module holds a Preparation, which converts a raw row into an Item, and passes it to `command`:

    python -m jaxrl_llm.data.prepare.<name> --out DIR [--source HF-id-or-path]

A written row has the columns data_source, prompt (chat messages), ability, reward_model {style, ground_truth} and
extra_info {split, index, question, rendered}, and those that its data set adds. `rendered` is true where a text template
wrote the whole prompt, which no chat template may wrap again.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.data import files, templates, tokenizer
from jaxrl_llm.data.prepare import contamination, prepared

Raw = Mapping[str, Any]
Options = argparse.Namespace


class Drop(ValueError):
    """Raised by a conversion that leaves a row out; rows are counted by the message, which gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A raw row's content, before template, split and index are applied.

    Attributes:
      question: the user's request, without the instruction that the preparation appends.
      problem: the bare problem, which is hashed and kept as extra_info.question; empty takes the question.
      truth: the gold answer, for verl's reward_model.ground_truth.
      style: "rule" (a verifier decides) or "model" (a judge or a reward model does).
      history: chat messages before the question.
      reward: further fields of reward_model.
      info: further fields of extra_info.
      columns: further columns.
    """

    question: str
    problem: str = ""
    truth: Any = None
    style: str = "rule"
    history: Sequence[Mapping[str, str]] = ()
    reward: Raw = field(default_factory=dict)
    info: Raw = field(default_factory=dict)
    columns: Raw = field(default_factory=dict)

    def bare(self) -> str:
        """Returns the bare problem."""
        return self.problem or self.question


Pools = Mapping[str, Iterable[Item]]


def by_sizes(pools: Pools, options: Options) -> dict[str, Sequence[Item]]:
    """Returns the pools unchanged or, with --sizes, consecutive parts of all of them; --shuffle shuffles by the seed.

    Raises:
      ValueError: there are fewer rows than the sizes need.
    """
    if not options.sizes:
        return {part: _shuffled(list(items), options) for part, items in pools.items()}
    items = _shuffled([item for pool in pools.values() for item in pool], options)
    parts: dict[str, Sequence[Item]] = {}
    start = 0
    for part, size in options.sizes.items():
        rest = len(items) - start
        count = rest if size == -1 else int(size * len(items)) if isinstance(size, float) else size
        if count > rest:
            raise ValueError(
                f"--sizes asks for {count} rows of {part!r}, and {rest} of {len(items)} are left: name smaller sizes, "
                f"such as --sizes {part}=-1 for all that is left"
            )
        parts[part] = items[start : start + count]
        start += count
    return parts


def _shuffled(items: list[Item], options: Options) -> list[Item]:
    if not options.shuffle:
        return items
    return [items[i] for i in np.random.default_rng(options.seed).permutation(len(items))]


def from_files(preparation: "Preparation", options: Options, split: str) -> Iterator[files.Located]:
    """Returns the rows of the source by `files.each`."""
    return files.each(options.source, preparation.columns, split=split, subset=preparation.subset)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The conversion of one data set into verl's rows; most fields are defaults of the command's options.

    Attributes:
      name: name of the data set in messages.
      source: a Hugging Face id or a path.
      convert: a raw row -> Item; raises Drop with a reason.
      columns: columns in which every raw row has a value.
      subset: configuration of the Hugging Face data set.
      data_source: verl's column of that name; empty takes `name`.
      ability: verl's column of that name.
      splits: {part that is written: split that is read}.
      sizes: {part: rows}, parts of all rows that are read; a float is a share and -1 the rest. Empty writes one part a split.
      shuffle: whether rows are shuffled by the seed before parts are cut.
      unique: whether rows with a repeated question are left out.
      against: evaluation sets ("path" or "path@split") whose questions are left out.
      template: name in data/templates.py.
      instruction: text that follows the question, after a space.
      tokenizer: tokenizer that counts tokens for the limits.
      min_tokens: smallest number of tokens of a prompt and its response.
      max_tokens: largest number of tokens of a prompt and its response, without a chat template's own tokens; None for no limit.
      system: part -> its system message; empty for none.
      arguments: {flag: keyword arguments of argparse}, the data set's own options.
      read: (preparation, options, split) -> located raw rows.
      carve: (items by part read, options) -> items by part written.
    """

    name: str
    source: str
    convert: Callable[[Raw, Options], Item]
    columns: Sequence[str] = ()
    subset: str | None = None
    data_source: str = ""
    ability: str = "math"
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train"})
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    shuffle: bool = False
    unique: bool = False
    against: Sequence[str] = ()
    template: str = "chat"
    instruction: str = ""
    tokenizer: str = "Qwen/Qwen2.5-3B-Instruct"
    min_tokens: int = 0
    max_tokens: int | None = None
    system: Callable[[str], str] = lambda part: ""
    arguments: Mapping[str, Raw] = field(default_factory=dict)
    read: Callable[["Preparation", Options, str], Iterator[files.Located]] = from_files
    carve: Callable[[Pools, Options], Mapping[str, Sequence[Item]]] = by_sizes


def main(preparation: Preparation, arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Prepares the data set with the options of the command line, prints the counts and returns them.

    Returns:
      "read", "written/<part>", "dropped/<reason>", "unused" (passed but beyond the sizes) and "shared/<part>": the number of
      questions of a later part that also occur in the first part.

    Raises:
      ValueError: the data or the options are bad, or a part has no rows; then no file is written.
    """
    options = _parse(preparation, arguments)
    work = _Work(preparation, options)
    parts = preparation.carve({part: work.items(split) for part, split in options.splits.items()}, options)
    empty = [part for part, items in parts.items() if not items]
    if empty or not parts:
        raise ValueError(
            f"no rows are left for {empty or 'any part'} of {preparation.name} ({dict(work.counts)}): check --source "
            f"{options.source} and the limits"
        )
    rows = {part: [work.row(part, i, item) for i, item in enumerate(items)] for part, items in parts.items()}
    first, *others = ({contamination.problem_hash(item.bare()) for item in items} for items in parts.values())
    counts = dict(work.counts) | {f"written/{part}": len(items) for part, items in parts.items()}
    counts["unused"] = work.passed - sum(map(len, parts.values()))
    counts |= {f"shared/{part}": len(first & other) for part, other in zip(list(parts)[1:], others)}
    prepared.write(options.out, rows, {"name": preparation.name, "options": _plain(options), "counts": counts})
    prepared.report(preparation.name, options.out, counts)
    return counts


def command(preparation: Preparation) -> None:
    """Runs `main` with the command line's arguments; errors are printed in one line."""
    command_line.ended(lambda: main(preparation))


@dataclass(eq=False)
class _Work:
    """One run of a preparation: its options, the questions that it has seen and its counts."""

    preparation: Preparation
    options: Options

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter(read=0)
        self.passed = 0
        self._seen: set[str] = set()
        self._evaluated = {name: contamination.hashes(name) for name in self.options.against}
        counted = self.options.min_tokens > 0 or self.options.max_tokens is not None
        self._tokenizer: Any = tokenizer.PretrainedTokenizer(path=self.options.tokenizer).load() if counted else None

    def items(self, split: str) -> Iterator[Item]:
        """Yields the split's rows that are kept, in the source's order."""
        for where, raw in islice(self.preparation.read(self.preparation, self.options, split), self.options.limit):
            self.counts["read"] += 1
            try:
                item = self.preparation.convert(raw, self.options)
                self._check(item)
            except Drop as drop:
                self.counts[f"dropped/{drop}"] += 1
                continue
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                name = self.preparation.name
                raise ValueError(f"{where}: no row of {name} ({error!r}); it has {sorted(raw)}") from error
            self.passed += 1
            yield item

    def _check(self, item: Item) -> None:
        if not item.question.strip():
            raise Drop("empty")
        name = contamination.problem_hash(item.bare())
        if self.preparation.unique and name in self._seen:
            raise Drop("duplicate")
        self._seen.add(name)
        for evaluation, questions in self._evaluated.items():
            if name in questions:
                raise Drop(f"contaminated by {evaluation}")
        if self._tokenizer is not None:
            self._measure(item)

    def _measure(self, item: Item) -> None:
        texts = [*(message["content"] for message in self._messages("", item)), item.columns.get("response") or ""]
        tokens = sum(len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
        if tokens < self.options.min_tokens:
            raise Drop("too_short")
        if self.options.max_tokens is not None and tokens > self.options.max_tokens:
            raise Drop("too_long")

    def _messages(self, system: str, item: Item) -> list[dict[str, str]]:
        space = "" if not self.options.instruction or item.question.endswith("\n") else " "
        asked = templates.TEMPLATES[self.options.template](item.question + space + self.options.instruction)
        if isinstance(asked, str) and (system or item.history):
            raise ValueError(
                f"--template {self.options.template} renders a question alone, and rows of {self.preparation.name} "
                "have a system message or earlier turns: use --template chat, or --no_system where that is enough"
            )
        first = [{"role": "system", "content": system}] if system else []
        last = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [*first, *map(dict, item.history), *last]

    def row(self, part: str, index: int, item: Item) -> dict[str, Any]:
        """Returns a row in verl's schema."""
        messages = self._messages("" if self.options.no_system else self.preparation.system(part), item)
        rendered = isinstance(templates.TEMPLATES[self.options.template](""), str)
        return {
            "data_source": self.preparation.data_source or self.preparation.name,
            "prompt": messages,
            "ability": self.preparation.ability,
            "reward_model": {"style": item.style, "ground_truth": item.truth, **item.reward},
            "extra_info": {"split": part, "index": index, "question": item.bare(), "rendered": rendered, **item.info},
            **item.columns,
        }


def _parse(preparation: Preparation, arguments: Sequence[str] | None) -> Options:
    defaults = preparation
    parser = argparse.ArgumentParser(
        prog=f"python -m jaxrl_llm.data.prepare.{preparation.name}",
        description=f"Writes {preparation.name} as Parquet files in verl's schema.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the Parquet files")
    add("--source", default=defaults.source, help="Hugging Face id, file, or folder with a file for each split")
    add("--splits", nargs="+", type=_named, default=defaults.splits, metavar="PART=SPLIT", help="what is read")
    add(
        "--sizes",
        nargs="*",
        type=_sized,
        default=defaults.sizes,
        metavar="PART=ROWS",
        help="rows, share, or -1 for the rest",
    )
    add("--shuffle", action=argparse.BooleanOptionalAction, default=defaults.shuffle, help="shuffle before the parts")
    add("--seed", type=int, default=42, help="seed of every choice")
    add("--limit", type=_positive, help="most raw rows of a split")
    add("--template", choices=sorted(templates.TEMPLATES), default=defaults.template, help="form of the prompt")
    add("--instruction", default=defaults.instruction, help="follows the question")
    add("--no_system", action="store_true", help="leave out system messages")
    add("--against", nargs="*", default=list(defaults.against), metavar="PATH[@SPLIT]", help="evaluation sets to avoid")
    add("--tokenizer", default=defaults.tokenizer, help="folder or id; counts tokens for the limits")
    add("--min_tokens", type=int, default=defaults.min_tokens, help="fewest tokens of a prompt")
    add("--max_tokens", type=_positive, default=defaults.max_tokens, help="most tokens of a prompt and its response")
    for flag, given in preparation.arguments.items():
        add(flag, **given)
    options = parser.parse_args(arguments)
    options.splits, options.sizes = dict(options.splits), dict(options.sizes)
    return options


def _named(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise argparse.ArgumentTypeError(f"{text!r} is no PART=VALUE")
    return name, value


def _sized(text: str) -> tuple[str, int | float]:
    """Parses a part and its rows: a number, a share below 1, or -1 for the rest."""
    name, value = _named(text)
    size = float(value) if "." in value else int(value)
    if size != -1 and not (0 < size < 1 if isinstance(size, float) else size >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: a size is a number of rows, a share below 1, or -1 for the rest")
    return name, size


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return int(text)


def _plain(options: Options) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
