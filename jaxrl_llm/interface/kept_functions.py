"""Names Python reward functions for gin files: by their file, or by a copy of their source in the run folder.

A function of an importable file is named by that file. A function of a notebook, or of the script that starts the run, is written to
RUN/rewards.py with what it uses: other functions and classes from there, imports and plain values. The run calls the written functions,
so that a resume from the command line calls the same ones.
"""

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

FILE = "rewards.py"
ADVICE = "write it into a file and give reward='FILE.py:NAME', which the command line can go on with too"


def named(functions: Sequence[Callable[..., Any]], folder: Path) -> list[str]:
    """Returns "file.py:name" or "package.module:name" of each function; those without a file of their own are written to `folder`.

    Raises:
      ValueError: a function is a lambda or made inside another function, or uses what cannot be written down; or two have one name.
    """
    places = [_place(function) for function in functions]
    homeless = [f for f, place in zip(functions, places, strict=True) if not place and isinstance(f, FunctionType)]
    file = _kept(homeless, folder) if homeless else None
    return [f"{place or file}:{function.__name__}" for function, place in zip(functions, places, strict=True)]


def _place(function: Callable[..., Any]) -> str:
    """Returns the file or module of a function; "" for a function of a notebook or of the started script."""
    name = getattr(function, "__qualname__", "")
    if not isinstance(function, FunctionType) or not name.isidentifier():
        kind = "a lambda" if "<lambda>" in name else "made inside a function" if "<locals>" in name else "no function"
        raise ValueError(
            f"the reward {name or function!r} is {kind}, so that a resumed run could not find it: {ADVICE}"
        )
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and module.__name__ != "__main__" and file is not None:
        return module.__name__ if module.__package__ else str(Path(file).resolve())
    return ""


def _kept(functions: Sequence[FunctionType], folder: Path) -> Path:
    """Writes the functions and what they use to the folder; a file of earlier functions is renamed with a number."""
    imports, body = _parts(functions)
    opening = '"""Reward functions of this run, written from the notebook or script that started it."""'
    text = "\n\n".join(["\n".join([opening, "", *sorted(imports)]).rstrip(), *body]) + "\n"
    file = folder / FILE
    if file.is_file() and file.read_text() != text:
        file.rename(folder / f"rewards.{len(list(folder.glob('rewards.*.py')))}.py")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _parts(functions: Sequence[FunctionType]) -> tuple[set[str], list[str]]:
    """Returns the imports, and the definitions in an order in which each follows those that it needs when it is executed."""
    imports: set[str] = set()
    body: dict[str, str] = {}
    held: dict[str, Any] = {}

    def take(name: str, value: Any) -> None:
        if held.setdefault(name, value) is not value:
            raise ValueError(f"two of the rewards' functions use the name {name!r} for different things: {ADVICE}")
        if name in body:
            return
        line = _import(name, value)
        if line:
            imports.add(line)
        elif isinstance(value, re.Pattern):
            imports.add("import re")
            body[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif isinstance(value, FunctionType | type):
            body[name] = ""  # reserves its place, since a function may call itself
            source = _source(name, value)
            for used in _globals(source):
                if used in space and used != name:
                    take(used, space[used])
            body[name] = body.pop(name) or source
        else:
            body[name] = f"{name} = {_plain(name, value, function)}"

    for function in functions:
        space = function.__globals__
        take(function.__name__, function)
    return imports, list(body.values())


def _import(name: str, value: Any) -> str:
    """Returns the import that binds `name` to `value`; "" where there is none."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if (
        module in (None, "__main__")
        or not own.isidentifier()
        or getattr(sys.modules.get(module), own, None) is not value
    ):
        return ""
    return f"from {module} import {own}" + (f" as {name}" if own != name else "")


def _source(name: str, value: Any) -> str:
    """Returns the source of a function or class; a notebook's class is found in the cell of its first method."""
    try:
        if isinstance(value, FunctionType):
            return textwrap.dedent(inspect.getsource(value)).rstrip()
        method = next(x for x in vars(value).values() if isinstance(x, FunctionType))
        lines = linecache.getlines(method.__code__.co_filename)
        nodes = ast.parse("".join(lines)).body
        node = next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == value.__name__)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    except (OSError, TypeError, StopIteration) as error:
        raise ValueError(
            f"the source of {name!r} is not known, so that a resumed run could not call it: {ADVICE}"
        ) from error


def _globals(source: str) -> Iterator[str]:
    """Yields the global names that a definition reads, those of its decorators and defaults included."""
    tables = [symtable.symtable(source, "<source>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            of_module = symbol.is_global() or table.get_type() == "module"
            if symbol.is_referenced() and of_module and not hasattr(builtins, symbol.get_name()):
                yield symbol.get_name()


def _plain(name: str, value: Any, function: FunctionType) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(
        f"the reward {function.__name__!r} uses {name!r} ({type(value).__name__}), which cannot be written down for a resumed run: {ADVICE}"
    )
