"""The agent on files: what its commands leave is compared with what the task wants."""

import ast
import json
import re
import sys

import pytest
from environments.players import asked, call, played

from jaxrl_llm.data.file_tasks import KINDS, FileTasks
from jaxrl_llm.environments.bash_files import BashFiles
from jaxrl_llm.environments.python_tool import Python

SHUT_IN = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),
]
BY = {  # how each kind is done by the shell
    "count": lambda text: f"grep -c {re.search('the word ([a-z]+)', text)[1]} log.txt > count.txt",
    "total": lambda text: "t=0; while read w n; do t=$((t + n)); done < stock.txt; echo $t > total.txt",
    "order": lambda text: "cut -d ' ' -f 1 notes.txt | sort -u > words.txt",
    "rename": lambda text: "cp {} {}".format(*re.search(r"Copy (\S+) to (\S+),", text).groups()),
}


def command(text: str) -> str:
    return call("bash", json.dumps({"command": text}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [True, False], ids=["done", "undone"])
def test_a_task_is_done_by_a_command(kind, done):
    row = FileTasks(kinds=(kind,), size=3).rows()[2]
    prompt = asked(row.question, extra=row.extra)
    order = BY[kind](row.question) if done else "ls missing; echo tried"
    found = played(prompt, [command(order), "Done."], agent=BashFiles(python=Python(cell_s=20.0)))
    assert found.valid, found.error
    assert found.rewards == {"files": float(done)}
    assert found.info["commands"] == 1 and len(found.turns) == 2
    if not done:
        assert "[status" not in found.text and "tried" in found.text and "missing" in found.text


test_a_task_is_done_by_a_command.pytestmark = [*test_a_task_is_done_by_a_command.pytestmark, *SHUT_IN]


@SHUT_IN[0]
@SHUT_IN[1]
def test_a_command_that_takes_too_long_and_calls_that_are_wrong_are_mistakes_of_the_policy():
    row = FileTasks(size=1).rows()[0]
    prompt = asked(row.question, extra=row.extra)
    lost = played(prompt, [command("while true; do :; done"), "x"], agent=BashFiles(python=Python(cell_s=1.0)))
    assert lost.valid and lost.rewards == {"files": 0.0} and lost.info["lost"], lost.error
    wrong = [call("bash", '{"cmd": "ls"}'), "Done."]
    found = played(prompt, wrong, agent=BashFiles(python=Python(cell_s=20.0)))
    assert found.valid and found.info["commands"] == 0 and "'command' is needed" in found.text
    failing = played(prompt, [command("exit 7"), "Done."], agent=BashFiles(python=Python(cell_s=20.0)))
    assert "[status 7]" in failing.text


def test_a_prompt_without_files_is_invalid():
    found = played(asked("?"), ["x"], agent=BashFiles())
    assert not found.valid and "has no files" in found.error


def test_tasks_say_what_they_want_and_their_splits_share_none():
    rows = FileTasks(size=400).rows()
    assert rows == FileTasks(size=400).rows() and len({row.id for row in rows}) == 400
    for row in rows[:40]:
        kind, wanted, files = row.source.partition("/")[2], row.extra["wanted"], row.extra["files"]
        if kind == "total":
            (held,) = files.values()
            assert int(wanted["total.txt"]) == sum(ast.literal_eval(line.split()[1]) for line in held.splitlines())
        elif kind == "rename":
            assert len(wanted) == 3 and files.items() < wanted.items()
        elif kind == "order":
            words = wanted["words.txt"].split()
            assert words == sorted(words) and {line.split()[0] for line in files["notes.txt"].splitlines()} == set(
                words
            )
        else:
            word = re.search("the word ([a-z]+)", row.question)[1]
            assert int(wanted["count.txt"]) == re.findall("[a-z]+", files["log.txt"]).count(word) > 0
    held = FileTasks(size=None, split="heldout", kinds=("count",)).rows()
    learned = FileTasks(size=None, kinds=("count",)).rows()
    assert not {str(r.extra) for r in held} & {str(r.extra) for r in learned}
    with pytest.raises(ValueError, match=r"FileTasks\.kinds must be one or more of"):
        FileTasks(kinds=("cuont",))
