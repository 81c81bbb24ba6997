"""Files and functions stay short enough to be read at once."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxrl_llm", "kernels", "data", "eval", "tests")
FILE_LINES, KERNEL_FILE_LINES = 400, 700
FUNCTION_LINES, PALLAS_BODY_LINES = 80, 150
PARAMETERS, KERNEL_PARAMETERS = 8, 12  # a kernel, and what tests it, takes arrays one by one
PALLAS_FILES = ("mosaic_tpu.py", "mosaic_gpu.py")


def files() -> list[Path]:
    return sorted(f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py") if not inside_a_link(f))


def inside_a_link(file: Path) -> bool:
    return any(parent.is_symlink() for parent in file.relative_to(ROOT).parents if parent != Path("."))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Named parameters, the receiver of a method left out."""
    a = function.args
    named = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return named[1:] if named[:1] in (["self"], ["cls"]) else named


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(ROOT)))
def test_files_and_functions_are_within_their_budgets(file):
    name = file.relative_to(ROOT)
    text = file.read_text()
    limit = KERNEL_FILE_LINES if name.parts[0] == "kernels" else FILE_LINES
    most = KERNEL_PARAMETERS if "kernels" in name.parts[:2] else PARAMETERS
    lines = len(text.splitlines())
    assert lines <= limit, f"{name} has {lines} lines, at most {limit}: is it one thing?"
    body = PALLAS_BODY_LINES if file.name in PALLAS_FILES else FUNCTION_LINES
    for function in functions(ast.parse(text)):
        where = f"{name}:{function.lineno} {function.name}"
        length = function.end_lineno - function.lineno + 1
        assert length <= body, f"{where} has {length} lines, at most {body}"
        taken = parameters(function)
        assert len(taken) <= most, f"{where} takes {len(taken)} parameters, at most {most}: {taken}"
