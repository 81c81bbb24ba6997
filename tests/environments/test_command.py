"""Agents that are programs and functions: they find the policy, say what a rollout was worth, and leave no process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environments.players import asked, played

from jaxrl_llm.environments.command import Command, ending
from jaxrl_llm.environments.coroutine import Coroutine
from jaxrl_llm.experience import Ending, Limits
from jaxrl_llm.rewards.services.untrusted.process_tree import children

PROGRAM = str(Path(__file__).parent / "agent_program.py")
PROMPT = asked("1 + 1?", reference="2", extra={"level": 3})
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes that left their group are found on Linux alone")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command(*how: str) -> Command:
    return Command(command=(sys.executable, PROGRAM, *how))


def test_a_program_says_its_rewards_in_its_last_line():
    found = played(PROMPT, ["It is 2."], agent=command("works"))
    assert found.valid, found.error
    assert found.rewards == {"right": 1.0, "unknown": None}
    assert found.info["seed"] == 100 and found.info["columns"] == {"level": 3} and found.info["stop"] == "done"
    assert "It is 2." in found.text and found.mask.any()


def test_a_status_other_than_0_and_wrong_rewards_are_invalid_with_their_cause():
    failed = played(PROMPT, ["It is 2."], agent=command("fails"))
    assert not failed.valid and not failed.rewards
    assert "status 3" in failed.error and "no time today" in failed.error
    wrong = played(PROMPT, ["It is 2."], agent=command("wrong"))
    assert not wrong.valid and "ValueError in run" in wrong.error and "'very'" in wrong.error
    missing = played(PROMPT, ["It is 2."], agent=Command(command=("no-such-program",)))
    assert not missing.valid and "'no-such-program' cannot be started" in missing.error


@LINUX
@pytest.mark.parametrize("how", ["hangs", "leaves"])
def test_a_program_leaves_no_process_behind(how, tmp_path):
    noted = tmp_path / "pid"
    begin = time.monotonic()
    found = played(PROMPT, ["It is 2."], agent=command(how, str(noted)), limits=Limits(episode_s=5.0))
    assert found.valid and time.monotonic() - begin < 60
    assert found.finish == ("length" if how == "hangs" else "stop")
    assert found.rewards == ({} if how == "hangs" else {"right": 1.0, "unknown": None})
    assert not alive(int(noted.read_text()))


@LINUX
def test_a_run_that_is_killed_leaves_no_program_behind(tmp_path):
    """The program sleeps with a process that left its group; nobody of the run is there to end them."""
    noted, here = tmp_path / "pid", Path(__file__).parents[1]
    play = f"""
import sys
from environments.players import asked, played
from jaxrl_llm.environments.command import Command
command = (sys.executable, {PROGRAM!r}, "hangs", {str(noted)!r})
played(asked("1 + 1?", reference="2"), ["It is 2."], agent=Command(command=command))
"""
    path = os.pathsep.join([str(here), str(here.parent)])
    run = subprocess.Popen([sys.executable, "-c", play], env={**os.environ, "PYTHONPATH": path})
    until = time.monotonic() + 200
    while not (noted.exists() and noted.read_text()) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    left = int(noted.read_text())
    (program,) = [pid for pid in children(run.pid) if PROGRAM in Path(f"/proc/{pid}/cmdline").read_text()]
    assert alive(left) and alive(program)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 30
    while (alive(left) or alive(program)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(left) and not alive(program)


def test_a_programs_environment_holds_what_it_is_given_and_no_secret_of_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    monkeypatch.setenv("GIVEN", "y")
    code = "import json, os; print(json.dumps({'rewards': {}, 'info': dict(os.environ, cwd=os.getcwd())}))"
    config = Command(
        command=(sys.executable, "-c", code),
        folder=str(tmp_path),
        passed=("PATH", "GIVEN", "ABSENT"),
        variables={"MORE": "z"},
    )
    # It ends before the policy said anything, so the rollout is invalid, and what it said is kept for the log.
    found = played(PROMPT, ["2"], agent=config)
    assert not found.valid and "NothingSampled" in found.error
    seen = found.info
    assert "SECRET_OF_THE_RUN" not in seen and "ABSENT" not in seen
    assert (seen["GIVEN"], seen["MORE"], seen["OPENAI_MODEL"]) == ("y", "z", "policy")
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:") and seen["cwd"] == os.path.realpath(tmp_path)
    assert not os.path.exists(seen["TMPDIR"])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", Ending()),
        ("3", Ending()),
        ('{"a": 1}', Ending()),
        ('x\n{"rewards": {"a": true}, "stop": "won"}\n\n', Ending(rewards={"a": 1.0}, stop="won")),
    ],
)
def test_a_last_line(said, expected):
    assert ending(said) == expected


@pytest.mark.parametrize("said", ['{"rewards": 1}', '{"rewards": {"a": NaN}}', '{"rewards": {}, "info": 3}'])
def test_a_last_line_that_is_refused(said):
    with pytest.raises(ValueError, match="of an agent"):
        ending(said)


FUNCTIONS = """
import json, urllib.request
import aiohttp

def body(task, endpoint):
    return {"model": endpoint.model, "messages": list(task.messages)}

async def waits(task, endpoint):
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer " + endpoint.key}) as http:
        async with http.post(endpoint.base_url + "/chat/completions", json=body(task, endpoint)) as answer:
            said = (await answer.json())["choices"][0]["message"]["content"]
    return {"right": task.prompt.reference in said}

def blocks(task, endpoint):
    headers = {"Authorization": "Bearer " + endpoint.key, "Content-Type": "application/json"}
    request = urllib.request.Request(endpoint.base_url + "/chat/completions", json.dumps(body(task, endpoint)).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return float(len(json.load(answer)["choices"][0]["message"]["content"]))

def returns_text(task, endpoint):
    blocks(task, endpoint)
    return "good"
"""


def test_functions_play_async_and_in_threads(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    found = played(PROMPT, ["It is 2."], agent=Coroutine(function=f"{file}:waits"))
    assert found.valid and found.rewards == {"right": 1.0}, found.error
    found = played(PROMPT, ["It is 2."], agent=Coroutine(function=f"{file}:blocks"))
    assert found.valid and found.rewards == {"reward": 8.0}, found.error
    found = played(PROMPT, ["It is 2."], agent=Coroutine(function=f"{file}:returns_text"))
    assert not found.valid and "'good'" in found.error
    with pytest.raises(ValueError, match=r"no file .* for Coroutine\.function"):
        Coroutine(function="none.py:f")


def test_a_command_of_one_text_is_refused():
    with pytest.raises(ValueError, match=r"Command\.command must be a program and its arguments"):
        Command(command="python agent.py")
