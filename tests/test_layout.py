"""The outer folders, their links, and what a wheel holds."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTER = ("kernels", "data", "eval", "gin")
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def tracked(*patterns: str) -> list[str]:
    """Paths git tracks; empty outside a checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: tracked files cannot be listed")
    listed = subprocess.run(["git", "ls-files", "-s", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def python_files() -> list[Path]:
    return [f for folder in ("jaxrl_llm", *OUTER[:3]) for f in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("name", OUTER)
def test_the_package_reaches_outer_folders_by_relative_links(name):
    link = ROOT / "jaxrl_llm" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", OUTER)
def test_links_are_tracked_as_links(name):
    (entry,) = tracked(f"jaxrl_llm/{name}")
    assert entry.startswith("120000 "), "git must track the link itself (mode 120000)"


@pytest.mark.parametrize("name", OUTER)
def test_outer_folders_are_no_regular_packages(name):
    reason = "it shadows gin-config, or the distribution named kernels, for everyone who runs from the root"
    assert not (ROOT / name / "__init__.py").exists(), reason


def test_subfolders_with_modules_are_packages_with_a_docstring():
    folders = {f.parent for f in python_files() if f.parent not in {ROOT / n for n in OUTER}}
    folders -= {ROOT / "jaxrl_llm" / n for n in OUTER}
    for folder in sorted(folders):
        text = (folder / "__init__.py").read_text()
        assert text.startswith('"""'), (
            f"{folder.relative_to(ROOT)}/__init__.py says in one sentence what the folder holds"
        )


def test_import_gin_is_gin_config_from_the_root():
    program = "import gin, pathlib; assert hasattr(gin, 'parse_config'); print(pathlib.Path(gin.__file__).name)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "__init__.py", done.stderr


def test_no_module_is_named_like_a_standard_library_module():
    clashes = [f for f in python_files() if f.stem in sys.stdlib_module_names and f.parent.name != "tests"]
    assert not clashes, "a script beside such a file imports it in place of the standard library's"


def test_names_say_what_modules_hold():
    for file in python_files():
        vague = file.stem in VAGUE or file.stem.rpartition("_v")[2].isdigit() or "experimental" in file.parts
        assert not vague, f"{file.relative_to(ROOT)}: name it after what it holds"


def test_modules_open_with_a_docstring():
    for file in python_files():
        assert file.read_text().startswith('"""'), f"{file.relative_to(ROOT)} opens with one sentence saying what it is"


def test_gin_files_that_texts_name_are_there():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(ROOT / "gin").rglob("*.gin"), *python_files()]
    for file in set(texts) - {ROOT / "docs/reference/mistakes.md"}:  # which misspells names on purpose
        for name in re.findall(r"\bgin/[a-z0-9_/]+\.gin\b", file.read_text()):
            missing = not (ROOT / name).exists() and name != "gin/algorithms/mine.gin"  # a user's own, in README.md
            assert not missing, f"{file.relative_to(ROOT)} names {name}, which does not exist"


def test_the_changelog_says_nothing_twice():
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("- ")]
    assert len(set(lines)) == len(lines)


def test_pages_that_the_changelog_names_are_there():
    named = set(re.findall(r"\bdocs/[\w/]+\.md\b", (ROOT / "CHANGELOG.md").read_text()))
    assert named and not {name for name in named if not (ROOT / name).exists()}


def test_a_wheel_holds_the_linked_folders(tmp_path):
    # A copy, so that a build leaves nothing in the checkout and picks up nothing left by an earlier one.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "jaxrl_llm", *OUTER):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    pip += ["--disable-pip-version-check", "-w", str(tmp_path), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    own = {str(f.relative_to(source)) for f in (source / "jaxrl_llm").rglob("*.py")}
    linked = {f"jaxrl_llm/{f.relative_to(source)}" for n in OUTER[:3] for f in (source / n).rglob("*.py")}
    gins = {f"jaxrl_llm/{f.relative_to(source)}" for f in (source / "gin").rglob("*.gin")}
    assets = {f"jaxrl_llm/eval/viewer/assets/{f.name}" for f in (source / "eval/viewer/assets").iterdir()}
    assert held == own | linked | gins | assets
