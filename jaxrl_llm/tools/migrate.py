"""Rewrites gin files and run folders of an earlier version: python -m jaxrl_llm.tools.migrate FILE_OR_RUN_FOLDER ...

Imports and class names become the present ones, and removed settings become comments; everything else is unchanged, and a second run
changes nothing. A run folder's former config.gin is kept as config.gin.old.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.command_line import MOVED

_IMPORT = re.compile(
    r"^from (?P<package>[\w.]+) import (?P<name>\w+)(?: as (?P<alias>\w+))?[ \t]*(?:#.*)?$", re.MULTILINE
)
_COMMENT = re.compile(r"#.*")
# The canary's limit is derived from the weights and the dtype.
_GONE = re.compile(r"^(?P<binding>[ \t]*(?:[\w./]+\.)?canary_(?:mean|max)[ \t]*=.*)$", re.MULTILINE)


def migrated(text: str) -> str:
    """Returns the gin text with the present imports and names."""
    new_imports: dict[str, list[str]] = {}  # old line -> lines in its place
    for found in _IMPORT.finditer(text):
        module, local = f"{found['package']}.{found['name']}", found["alias"] or found["name"]
        classes = MOVED.get(module)
        if classes is None:
            continue
        lines: list[str] = []
        for name, new in classes.items():
            used = re.compile(rf"(?<![\w.]){local}\.{name}\b")
            home, _, kind = new.rpartition(".")
            if used.search(text):
                package, _, today = home.rpartition(".")
                text = used.sub(f"{today}.{kind}", text)
                lines.append(f"from {package} import {today}")
        stays = module in {new.rpartition(".")[0] for new in classes.values()}
        new_imports[found[0]] = [found[0]] if stays else lines
    text = _GONE.sub(r"# \g<binding>  # no setting any more: the limit is derived", text)
    return _with_imports(_COMMENT.sub(_today, text), new_imports)


def _today(comment: re.Match[str]) -> str:
    """Returns a comment with the present names, whatever its file imports."""
    moved = command_line.moved_selectors()
    old = "|".join(map(re.escape, moved))
    return re.sub(rf"(?<![\w.])({old})\b", lambda found: moved[found[1]], comment[0])


def _with_imports(text: str, new_imports: dict[str, list[str]]) -> str:
    """Returns the text with each old import replaced, without duplicates."""
    kept, seen = [], set()
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        for new in new_imports.get(bare, [bare]):
            if _IMPORT.match(new) and new in seen:
                continue
            seen.add(new)
            kept.append(new + "\n" * line.endswith("\n"))
    return "".join(kept)


def migrate(path: Path) -> bool:
    """Rewrites a gin file, or a run folder's config.gin; returns whether anything changed.

    Raises:
      OSError: the file does not exist or cannot be written.
    """
    file = path / "config.gin" if path.is_dir() else path
    text = file.read_text()
    new = migrated(text)
    if new == text:
        return False
    if path.is_dir():
        (path / "config.gin.old").write_text(text)
    file.write_text(new)
    return True


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.migrate", __doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_RUN_FOLDER")
    for path in parser.parse_args(argv).paths:
        print(f"{path}: {'rewritten' if migrate(path) else 'nothing to change'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
