"""Finds a function that is named by a file or a module, and identifies it by a hash of its source."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

WANTED = "'path/to/file.py:name', 'package.module:name' or a callable"


def load(function: Any, setting: str = "the reward function") -> Callable[..., Any]:
    """Returns the function of "path/to/file.py:name" or "package.module:name"; a callable is returned unchanged.

    Args:
      function: a name, or a callable.
      setting: the setting whose value it is, for errors.

    Raises:
      ValueError: there is no such file, module or function, or the file cannot be run; the message says what was looked for.
    """
    if not isinstance(function, str):
        if not callable(function):
            raise ValueError(f"{setting} must be {WANTED} (got {type(function).__name__} {function!r})")
        return function
    place, colon, name = function.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{setting} must be {WANTED} (got {function!r})")
    module = _of_file(place, setting) if place.endswith(".py") else _of_name(place, setting)
    found = module
    for step in name.split("."):
        if not hasattr(found, step):
            names = sorted(n for n, v in vars(module).items() if isinstance(v, FunctionType) and not n.startswith("_"))
            raise ValueError(f"{place} has no {name!r}; its functions are {names}")
        found = getattr(found, step)
    if not callable(found):
        raise ValueError(f"{function} is no function (got {type(found).__name__})")
    return found


def _of_file(place: str, setting: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"no file {place!r} for {setting} (looked for {file})")
    return _run(file, hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest())


@functools.cache
def _run(file: Path, digest: str) -> ModuleType:
    """Runs a file as a module of its own, once for each content; its folder is searched last for what it imports."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"jaxrl_llm_reward_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # by the suffix .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything
        del sys.modules[name]
        where = _line(error, file)
        raise ValueError(f"{file}{where} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _line(error: Exception, file: Path) -> str:
    """Returns ":LINE" of the file that raised the error; empty where none is known."""
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    lines = (
        [frame.lineno for frame in inspect.getinnerframes(error.__traceback__) if frame.filename == str(file)]
        if error.__traceback__
        else []
    )
    return f":{lines[-1]}" if lines else ""


def _of_name(place: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ValueError(
            f"no module {place!r} for {setting} ({error}); a file is named with its suffix, such as 'reward.py:score'"
        ) from error


def content(function: Callable[..., Any]) -> str:
    """Returns a hash of a function's code, of the functions of its module that it calls and of the plain values it reads there.

    Comments and formatting do not change it, nor does the place of the file. Where the source is not known,
    it is the function's name.
    """
    try:
        texts = sorted(_sources(function, set()))
    except (OSError, TypeError):
        return getattr(function, "__qualname__", type(function).__qualname__)
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()


def _sources(function: Any, seen: set[Any]) -> Iterator[str]:
    while isinstance(function, functools.partial):
        yield repr((function.args, sorted(function.keywords.items())))
        function = function.func
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType | type):
        function = getattr(function, "__func__", type(function))  # a method, or an object that can be called
    if function in seen:
        return
    seen.add(function)
    yield _normal(inspect.getsource(function))
    if not isinstance(function, FunctionType):
        return
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _sources(value, seen)
        elif isinstance(value, str | int | float):
            yield f"{name} = {value!r}"


def _names(code: CodeType) -> set[str]:
    """Returns the names that code reads, including those of functions inside it."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _normal(source: str) -> str:
    """Returns the source without comments and formatting; unchanged where it is part of a longer statement."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(source)))
    except SyntaxError:
        return source
