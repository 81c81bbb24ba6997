"""Every command and program of the README and the tutorial runs, on a CPU, in the order of its page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import RUN, WRITTEN, Block, blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_runs_is_a_file_or_says_what_it_needs(page):
    for block in blocks(page):
        assert set(block.marks) <= {"file", "ci", "needs"}, f"{page.name}:{block.line}: unknown marks {block.marks}"
        assert block.language in {*RUN, *WRITTEN, "text"}, f"{page.name}:{block.line}: name the language of the block"
        told = block.runs or "needs" in block.marks or "file" in block.marks or block.language == "text"
        assert told, f"{page.name}:{block.line}: say `<!-- file: NAME -->` or `<!-- needs: WHAT -->` above the block"
        assert block.small, "a replaced text must be in the block"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_name_of_a_file_is_read_before_its_block(page):
    lines = page.read_text().splitlines()
    for block in blocks(page):
        above = "\n".join(line for line in lines[: block.line - 1] if not line.startswith("<!--"))
        told = re.sub(r"^```.*?^```$", "", above, flags=re.MULTILINE | re.DOTALL)
        if "file" in block.marks:
            assert f"`{block.marks['file']}`" in told or f"={block.marks['file']}`" in told, f"{page.name}:{block.line}"


def test_commands_outside_of_fences_are_none_in_readme_and_tutorial():
    for page in PAGES:
        indented = [line for line in page.read_text().splitlines() if line.startswith("    ") and "jaxrl" in line]
        held = "".join(block.code for block in blocks(page))
        assert all(line in held for line in indented), f"{page.name}: put {indented} into a fence, so that it is run"


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a block in the page's folder as a reader would, on the CPU."""
    command = ["bash", "-euo", "pipefail", "-c", block.small]
    if block.language == "python":
        command = [sys.executable, "-c", block.small]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path, "PYTHONPATH": f"{ROOT}:{folder}"}
    environment.pop("XLA_FLAGS", None)  # the suite's eight devices
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.skipif(
    "JAXRL_LLM_PAGES" not in os.environ, reason="minutes of whole runs: set JAXRL_LLM_PAGES=1, as .ci/run does"
)
@pytest.mark.timeout(1500)  # of several runs, each of which compiles
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.runs for block in blocks(page))], ids=lambda p: p.name
)
def test_the_blocks_of_a_page_run_in_order(page, tmp_path):
    for block in blocks(page):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.code)
        elif block.runs:
            done = run(block, tmp_path)
            assert done.returncode == 0, (
                f"{page.name}:{block.line}\n{block.small}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
            )
            assert "Traceback" not in done.stderr, done.stderr[-5000:]
            assert "(dropped/" not in done.stdout, f"{page.name}:{block.line} loses rows: {done.stdout[:3000]}"


def test_a_block_is_read_with_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n\n<!-- ci: 20 => 2 -->\n```bash\nrun steps=20\n```\n\n<!-- needs: a GPU -->\n```python\nx = 1\n```\n"
    )
    first, second = blocks(page)
    assert (first.line, first.language, first.small, first.runs) == (4, "bash", "run steps=2\n", True)
    assert second.marks == {"needs": "a GPU"} and not second.runs


def test_a_replacement_that_finds_nothing_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- ci: 30 => 2 -->\n```bash\nrun steps=20\n```\n")
    with pytest.raises(ValueError, match="line 2: the block has no '30'"):
        _ = blocks(page)[0].small
