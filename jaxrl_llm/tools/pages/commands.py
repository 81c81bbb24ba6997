"""Prints the Markdown page of all commands: `python -m jaxrl_llm.tools.pages.commands > docs/reference/commands.md`.

The verbs of `jaxrl` come first, with the help that they print. A command is a module that may be started by `python -m`, and its
docstring says what it does; nothing is imported.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
OUTER = ("kernels", "data", "eval")
# Started by other commands instead of a user.
INTERNAL = (
    "environments.verifiers_worker",
    "rewards.services.worker",
    "rewards.services.untrusted.guard",
    "rewards.services.untrusted.cells",
    "rewards.services.untrusted.sessions",
)
GROUPS = {
    "launch": "Runs and evaluations",
    "tools": "Beside a run",
    "eval": "Evaluation and reports",
    "data": "Data sets",
    "rewards": "Services of rewards",
    "samplers": "Services of samplers",
    "publication": "Services of published weights",
}


def commands() -> dict[str, str]:
    """Returns {module without "jaxrl_llm.": its docstring} of every module that may be started."""
    found = {}
    for module, file in files():
        tree = ast.parse(file.read_text())
        started = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
        if started and module not in INTERNAL:
            found[module.removesuffix(".__main__")] = ast.get_docstring(tree) or ""
    return dict(sorted(found.items()))


def files() -> Iterator[tuple[str, Path]]:
    """Yields (module without "jaxrl_llm.", file) of the package, including the linked folders."""
    for folder in (PACKAGE, *((PACKAGE / name).resolve() for name in OUTER)):
        prefix = "" if folder == PACKAGE else f"{folder.name}."
        for file in sorted(folder.rglob("*.py")):
            yield prefix + ".".join(file.relative_to(folder).with_suffix("").parts), file


def section(name: str, docstring: str) -> str:
    """Writes a command's heading and its docstring; commands within sentences become code, as indented examples already are."""
    text = re.sub(
        r"(?<!`)\bpython -m jaxrl_llm[^`\n]*?(?=(?<!\.)\.$|$|, where)", r"`\g<0>`", docstring, flags=re.MULTILINE
    )
    text = re.sub(r"^( {4,}.*)`(python.*)`$", r"\1\2", text, flags=re.MULTILINE)
    return f"### {name}\n\n`python -m jaxrl_llm.{name} --help`\n\n{text}\n"


def verbs() -> Iterator[str]:
    """Yields the part on `jaxrl`: a line for each verb, then the help of those that have options of their own."""
    module = ast.parse((PACKAGE / "interface" / "commands.py").read_text())
    handed = {
        name: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        for name in [node.targets[0].id]
        if name == "COMMANDS"
    }["COMMANDS"]
    whole = _help()
    own = {
        verb: _help(verb)
        for verb in re.findall(r"^  (\w+)  ", whole.partition("Commands:")[2], re.MULTILINE)
        if verb not in handed
    }
    yield "## The command jaxrl\n"
    yield "`name=value` settings need no quotes: [compose a run](../howto/compose.md) says what they mean. With this line in a shell's profile, Tab"
    yield "completes them (`zsh_source` and `fish_source` for other shells):\n"
    yield "    " + str(re.search(r'eval ".*?"', whole, re.DOTALL)[0]).replace("\n", "") + "\n"  # type: ignore[index]
    yield "| verb | what it does | options |\n|---|---|---|"
    for verb, text in own.items():
        yield f"| `jaxrl {verb}` | {text.split(chr(10) * 2)[1].strip()} | [below](#jaxrl-{verb}) |".replace("\n ", "")
    for verb, (target, short) in handed.items():
        name = target.removeprefix("jaxrl_llm.").removesuffix(".__main__")
        yield f"| `jaxrl {verb}` | {short} | those of [{name}](#{name.replace('.', '')}) |"
    for verb, text in own.items():
        yield f"\n### jaxrl {verb}\n\n```text\n{text}```"
    yield ""


def _help(*verb: str) -> str:
    """Returns the output of `jaxrl VERB --help`, in 80 columns."""
    command = [sys.executable, "-m", "jaxrl_llm.interface.commands", *verb, "--help"]
    done = subprocess.run(command, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    return re.sub(r"\n {20,}", " ", done.stdout.replace("python -m jaxrl_llm.interface.commands", "jaxrl"))


def page() -> str:
    """Returns the whole page."""
    parts = [
        "# Commands\n\nWritten by `python -m jaxrl_llm.tools.pages.commands > docs/reference/commands.md` from the docstrings; `--help` of each"
        " lists its options.\n"
    ]
    parts += verbs()
    listed = commands()
    rooms = {name: name.partition(".")[0] for name in listed}
    for room in [*GROUPS, *sorted(set(rooms.values()) - set(GROUPS))]:
        own = [section(name, text) for name, text in listed.items() if rooms[name] == room]
        if own:
            parts += [f"## {GROUPS.get(room, room.capitalize())}\n", *own]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
