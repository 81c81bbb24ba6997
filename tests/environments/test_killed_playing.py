"""Whole runs of each recipe with an environment or an agent: killed in a step, resumed, started twice, with other and misspelled settings."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_run
from third_party.serving_openenv import PYTHON, has_openenv, serving

PROGRAM = Path(__file__).parent / "agent_program.py"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="code is shut in on Linux alone")
OPENENV = pytest.mark.skipif(not has_openenv(), reason=f"openenv is not installed for {PYTHON} (OPENENV_PYTHON)")
QUESTION = {"question": "A farmer has 3 cows and buys 4. How many has he?", "answer": "He has 3 + 4 = 7.\n#### 7"}
TILL = '''
"""A till that should hold what the row says."""

class Till:
    def reset(self, wanted: int, **row) -> str:
        self.held, self.wanted = 0, wanted
        return " It is empty."

    def put(self, amount: int) -> str:
        """Puts money into the till.

        Args:
            amount: how much
        """
        self.held += amount
        return f"It holds {self.held}."

    def get_reward(self) -> float:
        return float(self.held == self.wanted)
'''


@dataclass(frozen=True)
class Case:
    """A recipe.

    Attributes:
      file: the gin file.
      text: what a run adds to it, with {folder} for a folder with prompts.jsonl, till.py and GSM8K's files.
      other: a setting that a resume refuses, and its path.
      wrong: a misspelled binding, and what it may have meant.
    """

    file: str
    text: str
    other: tuple[str, str]
    wrong: tuple[str, str]


ROWS = """
from jaxrl_llm.data import rows
include 'gin/base.gin'
include 'gin/algorithms/grpo.gin'
include 'gin/samplers/embedded.gin'
DATA = @rows.Rows()
EVAL_DATA = @rows.Rows()
rows.Rows.source = '{folder}/prompts.jsonl'
"""
DIALOGUE = {
    "tools": '[{"name": "time", "description": "Tells the time."}]',
    "conversations": [
        {"from": "human", "value": "What time is it?"},
        {"from": "function_call", "value": '{"name": "time", "arguments": {}}'},
        {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "It is noon."},
    ],
}
CASES = {
    "calculator_tool": Case(
        "gin/environments/calculator_tool.gin", "", ("calculator_tool.CalculatorTool.most_digits=3", "environment.most_digits was 9, is 3"),
        ("calculator_tool.CalculatorTool.most_digit=3", "most_digits"),
    ),
    "command": Case(
        "gin/environments/command.gin", f"COMMAND = ({sys.executable!r}, {str(PROGRAM)!r}, 'knows')\n",
        (f"command.Command.command=({sys.executable!r}, {str(PROGRAM)!r}, 'wrong')", "agent.command was"),
        ("command.Command.folders='x'", "folder"),
    ),
    "methods": Case(
        "gin/environments/methods.gin", "FACTORY = '{folder}/till.py:Till'\n", ("MAX_TURNS=2", "max_turns was 8, is 2"),
        ("methods.Methods.worker=3", "workers"),
    ),
    "openenv": Case(
        "gin/environments/openenv.gin", "OPENENV = '{url}'\nopenenv.OpenEnv.text = 'hint'\nopenenv.OpenEnv.columns = ('highest',)\n",
        ("openenv.OpenEnv.tries=5", "environment.tries was 1, is 5"), ("openenv.OpenEnv.column=()", "columns"),
    ),
    "bash_files": Case(
        "gin/agents/bash_files.gin", "PROMPT_LIMIT = 480\n", ("bash_files.BashFiles.turns=2", "agent.turns was 6, is 2"),
        ("bash_files.BashFiles.turn=2", "turns"),
    ),
    "gsm8k_python": Case(
        "gin/agents/gsm8k_python.gin", "GSM8K_PATH = '{folder}/gsm8k'\n", ("python_tool.Python.cell_s=9.0", "cell_s was 3.0, is 9.0"),
        ("python_tool.Python.cells_s=9.0", "cell_s"),
    ),
    "tool_replay": Case(
        "gin/agents/tool_replay.gin", "DIALOGUES = '{folder}/dialogues.json'\nHELDOUT = 2\n",
        ("replayed_tools.ReplayedTools.most_calls=2", "environment.most_calls was 8, is 2"), ("replayed_tools.ReplayedTools.most_call=2", "most_calls"),
    ),
}  # fmt: skip
MARKS = {"openenv": [OPENENV], "bash_files": [LINUX], "gsm8k_python": [LINUX]}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def gin_file(case: Case, folder: Path, url: str) -> Path:
    """The files of a case in `folder`: its gin file, its data and its class."""
    rows = [json.dumps({"prompt": f"Answer {i}.", "reference": "2", "highest": 5, "wanted": i}) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "till.py").write_text(TILL)
    (folder / "dialogues.json").write_text(json.dumps([DIALOGUE] * 8))
    (folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join([json.dumps(QUESTION)] * 8))
    own = "gin/environments" in case.file and case.file != CASES["calculator_tool"].file
    (folder / "run.gin").write_text(
        "from __gin__ import dynamic_registration\n" + (ROWS if own else "").format(folder=folder)
        + f"include '{case.file}'\n" + imports(case) + "include 'tests/tiny_playing.gin'\n" + case.text.format(folder=folder, url=url)
        + "STEPS = 8\n"
    )  # fmt: skip
    return folder / "run.gin"


def imports(case: Case) -> str:
    """Of the modules that the bindings of a case name."""
    named = {
        binding.split(".")[0] for binding in (case.text, case.other[0], case.wrong[0]) if "." in binding.split("=")[0]
    }
    lines = {"openenv"} if "openenv." in case.text else set()
    known = named | lines
    return "".join(f"from jaxrl_llm.environments import {name}\n" for name in sorted(known) if name.islower())


@pytest.fixture
def url(request, tmp_path: Path) -> Iterator[str]:
    """The address of a server, where the case has one."""
    if request.node.callspec.params["name"] != "openenv":
        yield ""
        return
    with serving("guess", tmp_path) as found:
        yield found


def started(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=tiny_run.ROOT, env=tiny_run.environment(), stdout=output, stderr=output, start_new_session=True
        )


def stop_when(run: "subprocess.Popen[bytes]", log: Path, ready: Callable[[], bool]) -> None:
    """Waits until `ready`, and stops the run's processes there: its few steps take less time than another start."""
    until = time.monotonic() + 600
    while not ready() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert run.poll() is None, log.read_text()
    os.killpg(run.pid, signal.SIGSTOP)
    assert ready(), log.read_text()


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES])
def test_a_run_is_killed_in_a_step_and_goes_on_unless_its_settings_are_others(name: str, url: str, tmp_path: Path):
    case, run_dir, log = CASES[name], tmp_path / "run", tmp_path / "log"
    file = str(gin_file(case, tmp_path, url))
    command = tiny_run.command(run_dir, file)
    misspelled = tiny_run.refused(run_dir, file, **dict([case.wrong[0].split("=", 1)]))
    assert case.wrong[1] in misspelled and "Traceback" not in misspelled and not run_dir.exists()
    first = started(command, log)
    stop_when(first, log, lambda: "step 0/" in log.read_text())
    assert "is writing to" in tiny_run.refused(run_dir, file)
    os.killpg(first.pid, signal.SIGCONT)
    stop_when(first, log, lambda: any(path.name.isdigit() for path in (run_dir / "checkpoints").glob("*")))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert case.other[1] in tiny_run.refused(run_dir, file, **dict([case.other[0].split("=", 1)]))
    done = tiny_run.launch(run_dir, file)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tiny_run.rows(run_dir)
    assert (
        "resuming from step" in done.stdout
        and [row["step"] for row in rows] == list(range(9))
        and all(row["batch/sequences"] >= 4 for row in rows[1:])
    )
    assert all(row["trajectory/invalid"] == 0 for row in rows[1:]), rows
    assert rows[-1]["gap/max"] < 1e-4
