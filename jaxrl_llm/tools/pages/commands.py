"""Prints the Markdown page of all commands: `python -m jaxrl_llm.tools.pages.commands > docs/reference/commands.md`.

A command is a module that may be started by `python -m`. What it does is its docstring; nothing is imported.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
OUTER = ("kernels", "data", "eval")
# Started by other commands, not by a user.
INTERNAL = ("rewards.services.worker", "rewards.services.untrusted.guard")
GROUPS = {
    "launch": "Runs and evaluations",
    "tools": "Beside a run",
    "eval": "Evaluation and reports",
    "data": "Data sets",
    "rewards": "Services of rewards",
    "samplers": "Services of samplers",
}


def commands() -> dict[str, str]:
    """{module without "jaxrl_llm.": its docstring} of every module that may be started."""
    found = {}
    for module, file in files():
        tree = ast.parse(file.read_text())
        started = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
        if started and module not in INTERNAL:
            found[module.removesuffix(".__main__")] = ast.get_docstring(tree) or ""
    return dict(sorted(found.items()))


def files() -> Iterator[tuple[str, Path]]:
    """Yields (module without "jaxrl_llm.", file) of the package, the linked folders included."""
    for folder in (PACKAGE, *((PACKAGE / name).resolve() for name in OUTER)):
        prefix = "" if folder == PACKAGE else f"{folder.name}."
        for file in sorted(folder.rglob("*.py")):
            yield prefix + ".".join(file.relative_to(folder).with_suffix("").parts), file


def section(name: str, docstring: str) -> str:
    """A command's heading and its docstring: commands in a sentence become code, indented examples are code already."""
    text = re.sub(
        r"(?<!`)\bpython -m jaxrl_llm[^`\n]*?(?=(?<!\.)\.$|$|, where)", r"`\g<0>`", docstring, flags=re.MULTILINE
    )
    text = re.sub(r"^( {4,}.*)`(python.*)`$", r"\1\2", text, flags=re.MULTILINE)
    return f"### {name}\n\n`python -m jaxrl_llm.{name} --help`\n\n{text}\n"


def page() -> str:
    """Returns the whole page."""
    parts = [
        "# Commands\n\nWritten by `python -m jaxrl_llm.tools.pages.commands > docs/reference/commands.md` from the docstrings; `--help` of each"
        " lists its options.\n"
    ]
    listed = commands()
    rooms = {name: name.partition(".")[0] for name in listed}
    for room in [*GROUPS, *sorted(set(rooms.values()) - set(GROUPS))]:
        own = [section(name, text) for name, text in listed.items() if rooms[name] == room]
        if own:
            parts += [f"## {GROUPS.get(room, room.capitalize())}\n", *own]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
