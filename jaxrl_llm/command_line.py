"""What the commands share: help that keeps its lines, and one line where the user can put an error right."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

# Errors of the user's making: one line says what to do, and a stack would hide it.
EXPECTED = (ValueError, OSError, FloatingPointError, TimeoutError, ImportError, MemoryError)


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m jaxrl_llm.MODULE`."""
    keeps = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m jaxrl_llm.{module}", description=description, formatter_class=keeps)


def told(main: Callable[Given, Found]) -> Callable[Given, Found | int]:
    """`main`, which prints an expected error and returns the exit code 1 instead of raising it."""

    @functools.wraps(main)
    def run(*args: Given.args, **options: Given.kwargs) -> Found | int:
        try:
            return main(*args, **options)
        except EXPECTED as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return run


def ended(main: Callable[[], object]) -> None:
    """Carries out a `main` that returns no exit code, and leaves with 1 where an expected error ends it."""
    if told(main)() == 1:
        raise SystemExit(1)
