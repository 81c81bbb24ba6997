"""Lists the macros of the gin files, the usual settings of a run, as the first section of the page of bindings.

A macro is an upper-case name of a gin file that runs include. Its meaning is the comment beside it, or the meaning of the binding that
takes it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Folders of gin/ whose files are parts of runs; gin/base.gin and gin/eval/base.gin are read first.
PARTS = ("models", "data", "samplers", "rewards", "algorithms", "adapters", "schedules", "writers")
DEFINED = re.compile(r"^(?P<name>[A-Z][A-Z0-9_]*)\s*=\s*(?P<value>[^#]*?)\s*(?:#\s*(?P<comment>.*))?$")
BLOCK = re.compile(r"^(?P<selector>[\w/.]+):\s*(?:#.*)?$")
TAKES = re.compile(r"^(?P<indent>\s*)(?P<binding>[\w/.]+)\s*=.*%(?P<macro>[A-Z][A-Z0-9_]*)\b")


@dataclass(frozen=True, kw_only=True)
class Macro:
    """A macro of the gin files.

    Attributes:
      name: its upper-case name.
      values: {file below gin/: value in gin's spelling}, one entry for each file that defines it.
      comment: the files' comment on it; empty where there is none.
      sets: the bindings that take it, with their scopes.
    """

    name: str
    values: dict[str, str] = field(default_factory=dict)
    comment: str = ""
    sets: tuple[str, ...] = ()


def part_files(folder: Path) -> list[Path]:
    """Returns the gin files that runs include: the two bases, then the components."""
    bases = [folder / "base.gin", folder / "eval" / "base.gin"]
    return [f for f in bases if f.exists()] + [f for part in PARTS for f in sorted((folder / part).glob("*.gin"))]


def macros(folder: Path) -> list[Macro]:
    """Returns every macro that the parts below `folder` define, in the order of the files."""
    found: dict[str, Macro] = {}
    for file in part_files(folder):
        text = file.read_text()
        for line in text.splitlines():
            if defined := DEFINED.match(line):
                name, comment = defined["name"], defined["comment"] or ""
                known = found.setdefault(name, Macro(name=name))
                known.values[str(file.relative_to(folder))] = defined["value"]
                found[name] = Macro(name=name, values=known.values, comment=known.comment or comment, sets=known.sets)
        for macro, binding in takers(text):
            known = found.setdefault(macro, Macro(name=macro))
            sets = known.sets if binding in known.sets else (*known.sets, binding)
            found[macro] = Macro(name=macro, values=known.values, comment=known.comment, sets=sets)
    return [macro for macro in found.values() if macro.values]


def takers(text: str) -> Iterator[tuple[str, str]]:
    """Yields (macro, binding that takes it) of a gin file's text."""
    selector = ""
    for line in text.splitlines():
        if block := BLOCK.match(line):
            selector = block["selector"]
        elif taken := TAKES.match(line):
            binding = f"{selector}.{taken['binding']}" if taken["indent"] else taken["binding"]
            if not binding.isupper():
                yield taken["macro"], binding


def section(folder: Path, meanings: Mapping[str, str]) -> str:
    """Writes the section of all macros; `meanings` is {binding without scope: meaning}."""
    lines = ["| macro | value | sets | meaning |", "| --- | --- | --- | --- |"]
    for macro in macros(folder):
        bare = [binding.rpartition("/")[2] for binding in macro.sets]  # train.Stage.steps of rl/train.Stage.steps
        said = macro.comment or next((meanings[s] for s in bare if meanings.get(s)), "")
        several = len(macro.values) > 3
        shown = [f"`{value}` in {file}" for file, value in macro.values.items()]
        if several:
            shown = [f"one of {len(shown)} files of {', '.join(sorted({f.partition('/')[0] for f in macro.values}))}"]
        sets = ", ".join(f"`{binding}`" for binding in macro.sets[:3]) + (" and others" if len(macro.sets) > 3 else "")
        cells = (f"`{macro.name}`", "; ".join(shown), sets, said)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    opening = (
        "## Macros\n\nThe usual knobs, `--gin='GROUP_SIZE=16'`. A value is that of the file named beside it, below gin/; a run's own"
        " file or the command line overrides it.\n\n"
    )
    return opening + "\n".join(lines) + "\n"
