"""Every command that a page shows builds its run, those too that need a GPU, a model or a cluster: no setting is unknown, missing or refused."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import blocks

from jaxrl_llm import command_line
from jaxrl_llm.interface import commands, composition

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"^(?:    )?(?:\w+=\S+ +)*((?:jaxrl|python -m jaxrl_llm\.\w|launch/\w+\.sh)[^\n]*)$", re.MULTILINE)
VERBS = ("train", "eval", "plan", "doctor")
MODULES = ("jaxrl_llm.launch", "jaxrl_llm.tools.plan", "jaxrl_llm.tools.doctor")


def told(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page, its variables filled in and its comments left out."""
    text = page.read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(?:    )?(?:export )?([A-Z_]+)=(\"[^\"\n]*\"|\S+)", text, re.MULTILINE))
    for found in LINE.findall(text):
        line = found
        for _ in range(2):  # a variable may hold another one
            line = re.sub(r"\$([A-Z_]+)", lambda name: shlex.split(variables.get(name[1], name[1]))[0], line)
        words = shlex.split(line, comments=True)
        words = words[: min((words.index(end) for end in ("&&", "&", ";") if end in words), default=len(words))]
        if "..." not in line:
            yield words


def configures(words: list[str]) -> bool:
    """Whether a command takes the settings of a run."""
    if words[0] == "jaxrl":
        return words[1] in VERBS and any(not word.startswith("-") for word in words[2:])
    return any(word.startswith("--gin_file") for word in words) and (words[0] != "python" or words[2] in MODULES)


def asked(words: list[str]) -> tuple[list[str], list[str]]:
    """The gin files and bindings of a command that takes the settings of a run."""
    if words[0] == "jaxrl":
        files, settings = commands._given([word for word in words[2:] if not word.startswith("-")])
        composed = (composition.evaluation if words[1] == "eval" else composition.compose)(files, settings)
        return composed.files, composed.lines
    given = re.findall(r"--(gin|gin_file)[=\0]([^\0]+)", "\0".join(words))
    return [value for flag, value in given if flag == "gin_file"], [value for flag, value in given if flag == "gin"]


CONFIGURING = {str(page.relative_to(ROOT)): [words for words in told(page) if configures(words)] for page in PAGES}


def test_commands_are_found_in_each_way_that_pages_write_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nA=1 jaxrl train tiny steps=2  # two\n```\n\n    SERVER=\"X=('$SITE',)\"\n    export SITE=/site\n"
        "    python -m jaxrl_llm.launch --gin_file=a.gin \\\n      --gin=\"$SERVER\" --gin 'Y=1' && next\n    launch/go.sh up --gin_file=b.gin\n"
    )
    train, launch, script = told(page)
    assert train == ["jaxrl", "train", "tiny", "steps=2"]
    assert asked(launch) == (["a.gin"], ["X=('/site',)", "Y=1"]) and asked(script) == (["b.gin"], [])


@pytest.mark.parametrize("name", [name for name, found in CONFIGURING.items() if found])
def test_the_commands_of_a_page_build_their_runs(name, tmp_path, monkeypatch):
    (tmp_path / "gin").symlink_to(ROOT / "gin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_file.py").write_text("def my_reward(prompt, text): ...\n")  # the reader's, which no page writes
    for block in blocks(ROOT / name):
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.code)
    before = set(sys.modules)
    for words in CONFIGURING[name]:
        run, _ = command_line.build(*asked(words))
        assert run is not None, shlex.join(words)
    for module in set(sys.modules) - before:  # another page may have a file of the same name
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]
