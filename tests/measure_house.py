"""The house in numbers, of this tree or of a commit: python tests/measure_house.py [COMMIT [--since=COMMIT]]."""

import argparse
import ast
import subprocess
import tempfile
from pathlib import Path

import test_rooms
from test_size import FOLDERS, functions

ROOT = test_rooms.ROOT
PACKAGE = FOLDERS[:4]  # without tests


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def circles() -> list[tuple[str, ...]]:
    """Sets of modules that import each other, at whatever place of the files."""
    graph = test_rooms.edges()

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        left = [module]
        while left:
            new = graph.get(left.pop(), set()) - found
            found |= new
            left += new
        return found

    beyond = {module: reached(module) for module in graph}
    return sorted({tuple(sorted(m for m in beyond[one] if one in beyond[m])) for one in graph if one in beyond[one]})


def longest(files: dict[Path, str]) -> tuple[str, str]:
    """The file and the function of most lines, with where they are."""
    file = max(files, key=lambda f: len(files[f].splitlines()))
    found = [(one.end_lineno - one.lineno + 1, f, one) for f in files for one in functions(ast.parse(files[f]))]
    lines, place, function = max(found, key=lambda one: one[0])
    return f"{len(files[file].splitlines())} {file}", f"{lines} {place}:{function.name}"


def measure(root: Path) -> None:
    test_rooms.ROOT = root
    test_rooms.MODULES = test_rooms.modules()
    folders = [f for f in (root / "jaxrl_llm").iterdir() if f.is_dir() and list(f.glob("*.py"))]
    paths = [f for name in PACKAGE for f in (root / name).rglob("*.py")]
    files = {f.relative_to(root): f.read_text() for f in paths if not any(p.is_symlink() for p in f.parents)}
    kernels = {f: text for f, text in files.items() if f.parts[0] == "kernels"}
    print("modules at the top:", len(list((root / "jaxrl_llm").glob("*.py"))))
    print("rooms:", len(folders), *sorted(f.name for f in folders))
    print("circles:", len(circles()), *circles())
    print("files and lines of Python:", len(files), sum(len(text.splitlines()) for text in files.values()))
    print("longest file and function in kernels:", *longest(kernels))
    print("longest file and function elsewhere:", *longest({f: t for f, t in files.items() if f not in kernels}))


def since(before: str, now: str) -> None:
    """Lines of `now` by what git makes of their files: kept or renamed by likeness, or new."""
    patterns = [f"{name}/*.py" for name in PACKAGE]
    found = git("diff", "--name-status", "-M30%", "--diff-filter=A", "-l0", before, now, "--", *patterns)
    new = [line.split("\t")[1] for line in found.splitlines()]
    lines = sum(git("show", f"{now}:{name}").count("\n") for name in new)
    print(f"of these in files that {before} has not, under this name or another:", len(new), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--since", help="a commit: how many lines are in files that it has not")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", given.commit], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        measure(Path(folder))
    if given.since:
        since(given.since, given.commit)


if __name__ == "__main__":
    main()
