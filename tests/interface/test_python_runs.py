"""A run of ten lines of Python is the run that launch starts from its config.gin, bit for bit, and either goes on with the other's."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import tiny_run

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"Write about {subject}.", "letters": "abcdefgh"}
    for subject in ("rain", "snow", "salt", "iron", "bread")
]
# The README's ten lines, with settings and a model that train in seconds.
SCRIPT = """
import json, sys
import jaxrl_llm as rl

LEAST = 1

def share(letter, letters):
    return letter in letters

def my_reward(prompt, text, letters):
    assert prompt.startswith("Write about")
    return sum(share(letter, letters) for letter in text) / max(len(text), LEAST)

SMALL = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 16, "mlp_width": 64}
run = rl.grpo(
    model="tiny", data="my.jsonl", reward=my_reward, steps=4, learning_rate=1e-2, prompts_per_step=4, group_size=4, response_limit=8,
    prompt_limit=40, row_tokens=48, rows=8, evaluate_every=2, run_dir=sys.argv[1],
    bindings={f"qwen3.Qwen3.{name}": size for name, size in SMALL.items()},
)
"""
TRAINED = """
run.train()
answers = [run.chat("Write about rain.", max_tokens=4), run.chat("Write about rain.", max_tokens=4)]
print(json.dumps({"history": run.history, "answers": answers, "evaluated": run.evaluate(), "shown": run._repr_html_()}))
run.export("model")
"""
STEPPED = """
import asyncio

async def work():  # where an event loop runs already, as in a notebook
    seen = []
    for step in run:
        seen.append(step["step"])
        if step["step"] == 2:
            break
    saved = run.step
    for step in run:
        seen.append(step["step"])
    return seen, saved, run.history

print(json.dumps(asyncio.run(work())))
"""


def python(folder: Path, *parts: str, run_dir: str) -> Any:
    """Runs a script in `folder`; returns the JSON of its last line."""
    (folder / "script.py").write_text("".join(map(textwrap.dedent, parts)))
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    environment = tiny_run.environment() | {"PYTHONPATH": str(tiny_run.ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py", run_dir], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1])


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Starts `launch` in the folder of a script."""
    command = [sys.executable, "-m", "jaxrl_llm.launch", *arguments]
    environment = tiny_run.environment() | {"PYTHONPATH": str(tiny_run.ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def same(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock or a restart decides."""
    clocked = ("time/", "speed/", "sampler/", "compilations")
    return [{n: v for n, v in row.items() if not n.startswith(clocked)} for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ten_lines")
    return folder, python(folder, SCRIPT, TRAINED, run_dir="runs/one")


def test_launch_from_its_config_gives_the_same_metrics(trained):
    folder, found = trained
    done = launch(folder, "--gin_file=runs/one/config.gin", "--gin=RUN_DIR='runs/launched'")
    assert done.returncode == 0, done.stderr
    of_python, of_launch = tiny_run.rows(folder / "runs/one"), tiny_run.rows(folder / "runs/launched")
    assert of_python == of_launch == same(found["history"])
    assert [row["step"] for row in of_python] == [0, 1, 2, 3, 4]
    assert any(row["reward/mean"] != of_python[1]["reward/mean"] for row in of_python[2:])  # it learns something


def test_it_chats_evaluates_exports_and_shows_itself(trained):
    folder, found = trained
    first, second = found["answers"]
    assert first == second and len(first.encode()) <= 4 * 3  # a byte that is no UTF-8 becomes a character of three
    last = found["history"][-1]
    assert found["evaluated"]["greedy"] == pytest.approx(last["eval/heldout/greedy"], abs=1e-6)
    assert (folder / "model/config.json").is_file() and (folder / "model/tokenizer.json").is_file()
    assert "step 4 of 4" in found["shown"] and "Write about" in found["shown"] and "<polyline" in found["shown"]
    drawn = re.findall(r"<svg [^>]*aria-label=\"([^\"]+)\"", found["shown"])
    assert drawn[:2] == ["reward/mean", "loss/total"] and {"entropy/mean", "response/length"} <= set(drawn)


def test_the_command_line_goes_on_with_it(trained):
    folder, _ = trained
    before = tiny_run.rows(folder / "runs/one")
    subprocess.run(["cp", "-a", "runs/one", "runs/longer"], cwd=folder, check=True)
    flags = ["--gin=RUN_DIR='runs/longer'", "--gin=STEPS=5"]
    done = launch(folder, "--gin_file=runs/one/config.gin", *flags)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stdout
    rows = tiny_run.rows(folder / "runs/longer")
    assert rows[:4] == before[:4] and [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]


def test_a_loop_that_is_left_is_saved_and_goes_on_to_the_same_metrics(trained, tmp_path):
    _, whole = trained
    seen, saved, history = python(tmp_path, SCRIPT, STEPPED, run_dir="runs/stepped")
    assert saved == 2 and seen == [0, 1, 2, 3, 4]
    assert same(history) == same(whole["history"])


def test_a_script_that_is_told_to_end_saves_and_says_so(tmp_path):
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    wait = 'for step in run:\n    print("step", step["step"], flush=True)\n'
    (tmp_path / "script.py").write_text(SCRIPT.replace("steps=4", "steps=10**6") + wait)
    environment = tiny_run.environment() | {"PYTHONPATH": str(tiny_run.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "script.py", "run"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2\n"):
            break
    os.kill(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 75, rest
    last = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit())
    assert last == tiny_run.rows(tmp_path / "run")[-1]["step"] >= 2
