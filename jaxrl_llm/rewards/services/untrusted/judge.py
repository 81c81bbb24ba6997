"""Runs a test in a process that the tested program never enters, and asks for the program's names by a pipe.

A test is Python that follows the program, such as `assert f(1) == 2`. It runs here, and what it takes from the program stands for
objects in the program's process: calls, attributes and items go there, plain values come back as copies, and the test compares
them here. So a program knows the arguments of its calls, and neither the test nor what it expects.

What only the program could decide is refused and fails the test: comparing one of its objects with a plain value, and whatever
follows from an operation between the two (`f(1) - 2.5`), because its object would be asked whether it is right. Objects of the
program may be compared with each other. A test imports the modules that it needs.
"""

import ast
import builtins
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.rewards.services.untrusted.handles import Peer, is_instance, is_subclass
from jaxrl_llm.rewards.services.untrusted.values import Line

# Common in tests, where they help to compare; one of these is taken from a program only where a test calls nothing else.
HELPERS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "enumerate",
        "float",
        "frozenset",
        "int",
        "isinstance",
        "len",
        "list",
        "map",
        "print",
        "range",
        "repr",
        "round",
        "set",
        "sorted",
        "str",
        "tuple",
        "type",
        "zip",
    ]
)
ALIASES = {"np": "numpy", "pd": "pandas"}


class Scope(dict[str, Any]):
    """The names of a test: its own, the modules that it uses, and the program's; `taken` says which are which."""

    def __init__(self, peer: Peer, names: set[str], tree: ast.AST) -> None:
        changed = {"isinstance": is_instance, "issubclass": is_subclass}
        super().__init__(__name__="test", __builtins__={**vars(builtins), **changed})
        self.peer, self.names = peer, names
        self.modules, self.entry = taken(tree, names)

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            try:
                return importlib.import_module(ALIASES.get(name, name))
            except ImportError:
                raise KeyError(name) from None
        if name not in self.names or (hasattr(builtins, name) and name != self.entry):
            raise KeyError(name)
        return self.peer.ask("get", name)


def taken(tree: ast.AST, names: set[str]) -> tuple[set[str], str]:
    """Finds what a test takes from elsewhere than the program although the program may have such names.

    Returns:
      The modules whose attributes the test uses without importing them, which are the judge's own; and the name of the one builtin
      function that is nevertheless the program's, or "". That is the first one that the test calls, where it takes
      nothing else from the program, as the test of a `sum` of one's own does: the program has no say in this.
    """
    nodes = list(ast.walk(tree))
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    bound |= {(alias.asname or alias.name).partition(".")[0] for n in imports for alias in n.names}
    called = [name for name in _calls(tree) if name not in bound]
    owners = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    known = sys.stdlib_module_names | set(ALIASES)
    modules = {name for name in owners if name in known and name not in bound and name not in called}
    if any(not hasattr(builtins, name) and name not in modules for name in loaded - bound):
        return modules, ""
    functions = [name for name in called if hasattr(builtins, name)]
    first = next((name for name in functions if name not in HELPERS), functions[0] if functions else "")
    return modules, first if first in names else ""


def _calls(node: ast.AST) -> Iterator[str]:
    """Yields the names of the functions that are called, in the order of their calls."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


def judged(test: str, calls: int, answers: int) -> tuple[str, str]:
    """Returns (status, detail) of a test of the program at the other end of two descriptors."""
    peer = Peer(Line(answers, calls))
    stage = "program"
    try:
        hello = peer.receive()
        if "names" not in hello:
            return _said(peer.error(hello), stage)
        stage = "test"
        names = {name for name in hello["names"] if isinstance(name, str)}
        tree = ast.parse(test, "test.py")
        exec(compile(tree, "test.py", "exec"), Scope(peer, names, tree))  # nosec B102
    except BaseException as error:
        return _said(error, stage)
    return "passed", ""


def _said(error: BaseException, stage: str) -> tuple[str, str]:
    if isinstance(error, MemoryError):
        return "memory", f"out of memory in the {stage}"
    if isinstance(error, SystemExit):
        return "error", f"exited in the {stage}"
    status = "failed" if stage == "test" and isinstance(error, AssertionError) else "error"
    return status, f"{type(error).__name__} in the {stage}: {error}"[:2000]


def judge(test: str, calls: int, answers: int, verdict: int) -> None:
    """Judges and writes the verdict to the descriptor `verdict`, which the program does not have; ends this process."""
    status, detail = judged(test, calls, answers)
    os.write(verdict, f"{status}\n{detail}".encode(errors="replace"))
    os._exit(0)
