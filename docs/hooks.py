"""What the site adds to the pages below docs/: the texts of the root and of kernels/, with links that hold on both sides.

A page links to a file of the root by its path (`../../SECURITY.md`), as readers of the repository need it; the site has that
text as a page of its own.
"""

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "build" / "source"
MEASURED = "## Measured on one H200"
MEASURED_ANCHOR = "#measured-on-one-h200"
KERNELS = "kernels/README.md"
# {page of the site: file of the repository}
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
    "reference/kernels.md": KERNELS,
    "measured/kernels.md": KERNELS,
}
MARKED = re.compile(r"^((?:<!--[^\n]*-->\n)+)```(\w+)\n", re.MULTILINE)
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def on_startup(**_: Any) -> None:
    """Makes the folder that mkdocstrings looks for before it is filled."""
    SOURCE.mkdir(parents=True, exist_ok=True)


def on_pre_build(config: Any) -> None:
    """Copies the package for mkdocstrings, which follows no links: kernels, data and eval are links to outer folders."""
    shutil.rmtree(SOURCE / "jaxrl_llm", ignore_errors=True)
    shutil.copytree(
        ROOT / "jaxrl_llm", SOURCE / "jaxrl_llm", ignore=shutil.ignore_patterns("__pycache__", "gin", "assets")
    )
    for name in ("kernels", "data", "eval"):
        first = SOURCE / "jaxrl_llm" / name / "__init__.py"
        if not first.exists():
            first.write_text(f'"""The files of {name}/."""\n')


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages made of files outside of docs/."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=relinked(text_of(page, source), page, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns a page's links to files of the root into links to their pages, and the marks of its blocks into titles."""
    own = page.file.src_uri
    return titled(markdown if own in FROM_ROOT else relinked(markdown, own, f"docs/{own}"))


def on_page_content(html: str, **_: Any) -> str:
    """Lets the browser break a name in a table's cell after its dots, slashes and underscores, and nowhere else."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: re.sub(r"([./_])(?=\w)", r"\1<wbr>", code[0]), cell[0]), html)


def titled(text: str) -> str:
    """`text` with a title over each block whose marks say what file it is, or what it needs to run."""

    def block(found: re.Match[str]) -> str:
        marks = dict(re.findall(r"<!-- (\w+): (.*?) -->", found[1]))
        title = marks.get("file") or (f"needs {marks['needs']}" if "needs" in marks else "")
        return f'```{found[2]} title="{title}"\n' if title else found[0]

    return MARKED.sub(block, text)


def text_of(page: str, source: str) -> str:
    """The part of a file that a page shows: of the kernels' README the tables apart from the rest."""
    text = (ROOT / source).read_text()
    if source != KERNELS:
        return text
    before, heading, measured = text.partition(MEASURED)
    if not heading:
        raise ValueError(f"{source} has no heading {MEASURED!r}, at which docs/hooks.py divides it")
    return f"# Kernels\n\n{heading}{measured}" if page.startswith("measured/") else before


def relinked(text: str, page: str, source: str) -> str:
    """`text` of a file of the repository, with its links as the site's page needs them."""
    folder = posixpath.dirname(source)
    pages = {file: name for name, file in reversed(FROM_ROOT.items())}

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[2]))
        if target == KERNELS and found[3].startswith(MEASURED_ANCHOR):
            target = "measured/kernels.md"
        elif target in pages:
            target = pages[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return found[0]
        return f"{found[1]}{posixpath.relpath(target, posixpath.dirname(page) or '.')}{found[3]}"

    return LINK.sub(link, text)
