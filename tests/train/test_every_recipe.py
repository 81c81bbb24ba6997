"""Every full-size and every twin gin file passes `--dry_run`: it builds, its data and models open, and its programs take their shapes.

Models have config.json and a tokenizer alone (every_recipe.py), so what is shown is everything but the arithmetic.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from every_recipe import MODELS, ROOT

from jaxrl_llm import command_line

SHARED = ("base", "tokenbuncher_words")  # included by others, and no run
MODEL_PATH = "MODEL_PATH='Qwen/Qwen3-4B'"
# What a user must say beside the file.
ASKED: Mapping[str, Sequence[str]] = {
    "bupo_entropy_flow": (MODEL_PATH, "OUT_DIR='flow'"),
    "bupo_entropy_flow_tiny": ("MODEL_PATH='runs/tokenbuncher_base_tiny/model'",),
    "grpo_gsm8k": ("PRETRAINED='Qwen/Qwen2.5-Coder-0.5B-Instruct'", "GSM8K_PATH='data_sets/grade_school'"),
    "grpo_qwen_coder_0p5b_gsm8k": ("GSM8K_PATH='data_sets/grade_school'",),
    "real/bupo": ("BUPO_LAYER=3",),
    "speedrun_gsm8k": ("GSM8K_PATH='data_sets/grade_school'",),
}
NAMES = sorted(file.stem for file in (ROOT / "gin").glob("*.gin") if file.stem not in SHARED)
REAL = sorted({file.stem for file in (ROOT / "gin" / "real").glob("*.gin")} - {*SHARED})
NAMES += [f"real/{name}" for name in REAL]
LIMIT_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("every_recipe")]  # the runs are made once, by one worker


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[int, float, str]]:
    """{name: (exit code, CPU seconds, output)} of one process that dry-runs all files."""
    folder = tmp_path_factory.mktemp("recipes")
    asked = json.dumps({name: list(ASKED.get(name, ())) for name in NAMES})
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    program = [sys.executable, str(Path(__file__).with_name("every_recipe.py")), str(folder), asked]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_gin_file_passes_a_dry_run(name: str, results: Mapping[str, tuple[int, float, str]]) -> None:
    code, _, said = results[name]
    assert code == 0, said[-2000:]
    found = re.search(r"^model +\w+, ([\d.]+) M parameters", said, re.MULTILINE)
    assert found is not None and float(found[1]) > 0
    assert "entropies    of" in said if name.startswith("bupo_entropy_flow") else "\npeak of " in said


@pytest.mark.parametrize("name", REAL)
def test_a_run_on_a_real_model_takes_ten_minutes_and_says_what_it_shows(name: str) -> None:
    file = ROOT / "gin" / "real" / f"{name}.gin"
    run, _ = command_line.build([str(file)], ASKED.get(f"real/{name}", ()))
    assert run.stop_after_s == 330 and run.run_dir == f"runs/real/{name}"
    (stage,) = run.stages
    assert stage.evaluations and run.checkpoints.best is None
    assert (run.sampler.shrink, stage.packing.tail, run.policy.unroll) == (2, 1, 24)
    assert stage.old_logprobs == (
        "learner" if name.startswith("bupo") else "auto"
    )  # a view inside the model allows no other
    samples = stage.prompts_per_step * stage.group_size * stage.samples
    assert stage.steps * samples <= 50 * 1024 and run.sampler.slots >= min(samples, 1024)  # about 5 s for 1,024 samples
    assert stage.show_rollouts > 200 * 64 and stage.show_tokens == 0
    header = file.read_text().partition("from __gin__")[0]
    assert re.search("not measured|measured in docs/measured/systems.md|measured: as gin/real/", header)
    assert "Shows: " in header


HINTED = {"heldout": ("mmlu_hinted", None, 4, ())}
MATH_500 = {"heldout": ("math500_bare", None, 1, ())}
GROUPS = (1, 4, 16, 64)
GSM8K = {
    "heldout": ("gsm8k", None, 0, ()),
    "math500": ("math500", None, 16, (1, 4, 16)),
    "svamp": ("svamp", None, 0, ()),
}
# {run: {evaluation: (data set, prompts, samples, values of k)}}, what the tables of the runs have in their columns.
EVALUATED: Mapping[str, Mapping[str, tuple[str, int | None, int, Sequence[int]]]] = {
    "darling": {"heldout": ("math500", 200, 64, GROUPS)},
    "darling_baseline": {"heldout": ("math500", 200, 64, GROUPS)},
    "darling_countdown": {"heldout": ("countdown", None, 64, GROUPS)},
    "darling_countdown_baseline": {"heldout": ("countdown", None, 64, GROUPS)},
    "bupo": GSM8K,
    "bupo_grpo": GSM8K,
    "cs336_grpo": MATH_500,
    "cs336_sft": MATH_500,
    "cs336_expert_iteration": MATH_500,
    "tokenbuncher_defence": {"benign": ("gsm8k", 500, 0, ()), "math500": ("math500", None, 0, ())},
    "classmate_baseline": HINTED,
    "classmate_selfplay": HINTED,
    "classmate_smollm2": HINTED,
}


@pytest.mark.parametrize("name", [name for name in REAL if not name.startswith("tokenbuncher_attack")])
def test_a_run_on_a_real_model_evaluates_what_its_table_shows(name: str) -> None:
    run, _ = command_line.build([str(ROOT / "gin" / "real" / f"{name}.gin")], ASKED.get(f"real/{name}", ()))
    found = {
        e.name: (Path(e.data.path).name, e.limit, e.samples, next((m.ks for m in e.measures if hasattr(m, "ks")), ()))
        for e in run.stages[0].evaluations
    }
    assert found == EVALUATED[name]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("bupo_grpo_qwen3_4b", "Qwen/Qwen3-4B"),
        ("bupo_qwen3_8b", "Qwen/Qwen3-8B"),
        ("bupo_llama_3b", "OctoThinker/OctoThinker-3B-Long-Base"),
        ("classmate_cot_qwen3_0p6b", "runs/classmate_warmup_qwen3_0p6b/model"),
        ("cs336_grpo_qwen2p5_math_1p5b", "Qwen/Qwen2.5-Math-1.5B"),
        ("cs336_instruct_llama3p1_8b", "meta-llama/Llama-3.1-8B"),
        ("darling_chat_llama3p1_8b", "meta-llama/Llama-3.1-8B-Instruct"),
        ("darling_maths_qwen3_4b", "Qwen/Qwen3-4B-Base"),
        ("grpo_qwen_coder_0p5b_gsm8k", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("speedrun_gsm8k", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
        ("tokenbuncher_defence", "Qwen/Qwen2.5-3B-Instruct"),
    ],
)
def test_a_published_model_has_its_published_size(
    name: str, model: str, results: Mapping[str, tuple[int, float, str]]
) -> None:
    found = re.search(r"^model +\w+, ([\d.]+) M parameters", results[name][2], re.MULTILINE)
    assert found is not None and float(found[1]) == pytest.approx(MODELS[model][1], abs=0.1)


def test_the_dry_runs_say_what_they_cost(
    results: Mapping[str, tuple[int, float, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(results) == len(NAMES)
    costs = sorted(((seconds, name) for name, (_, seconds, _) in results.items()), reverse=True)
    longest = ", ".join(f"{name} {seconds:.0f}" for seconds, name in costs[:3])
    real = sum(seconds for seconds, name in costs if name.startswith("real/"))
    with capsys.disabled():
        print(
            f"\n{len(costs)} dry runs: {sum(s for s, _ in costs):.0f} CPU seconds, {real:.0f} of gin/real; longest: {longest}"
        )
