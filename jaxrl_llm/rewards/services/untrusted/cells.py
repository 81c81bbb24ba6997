"""Runs the cells of a session one after another in one interpreter, which keeps their names and files (standard library only).

The text of this file is the program of a session, as the guard starts one (sessions.py). A cell comes on standard input as four bytes
of length and its text; a line of JSON on descriptor 4 says how it went. The session's own program writes these records:
they are for the author of the cells, and no verdict may rest on them.
"""

import ast
import builtins
import json
import os
import sys
import traceback

RECORDS = 4
VALUE = "__value__"  # the name of a cell's last expression, while it is executed
MOST_VALUE, MOST_ERROR = 4000, 4000  # characters


def shortened(text: str, most: int) -> str:
    """Returns the text, without its middle where it is longer than `most` characters."""
    left_out = len(text) - most
    return (
        text if left_out <= 0 else f"{text[: most // 2]}[... {left_out} characters left out ...]{text[-(most // 2) :]}"
    )


def carried_out(code: str, scope: dict[str, object]) -> str:
    """Executes a cell; returns the repr of its last expression, where it ends with one that is not None, else ""."""
    tree = ast.parse(code, "<cell>")
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name(VALUE, ast.Store())], last.value), last)
    exec(compile(ast.fix_missing_locations(tree), "<cell>", "exec"), scope)  # nosec B102
    value = scope.pop(VALUE, None)
    return "" if value is None else shortened(repr(value), MOST_VALUE)


def told(error: BaseException) -> str:
    """Returns the traceback of a cell's error, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "<cell>":
        trace = trace.tb_next
    return shortened("".join(traceback.format_exception(type(error), error, trace)).strip(), MOST_ERROR)


def record(value: str, error: str) -> None:
    """Writes how a cell went."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    line = json.dumps({"value": value, "error": error}).encode() + b"\n"
    while line:
        line = line[os.write(RECORDS, line) :]


def main() -> None:
    """Executes cells until there are no more."""
    cells = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    scope: dict[str, object] = {"__name__": "__main__", "__builtins__": builtins}
    record("", "")
    while head := cells.read(4):
        code, value, error = cells.read(int.from_bytes(head, "big")).decode("utf-8", "surrogatepass"), "", ""
        if sys.stdin.closed:  # as exit() leaves it
            sys.stdin = open(os.devnull)  # noqa: SIM115
        try:
            value = carried_out(code, scope)
        except BaseException as found:
            error = told(found)
        record(value, error)


if __name__ == "__main__":
    main()
