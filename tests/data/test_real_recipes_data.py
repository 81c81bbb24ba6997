"""The data commands in the headers of gin/real, on the real files: what they write is what the runs read, at small sizes."""

import importlib
import shlex
from pathlib import Path

import pytest
from test_documented_commands import COMMAND, GIN

from jaxrl_llm import command_line
from jaxrl_llm.data.prepare import preparation

SHARED = ("base", "tokenbuncher_words")  # included by others, and no run
FILES = sorted(file for file in (GIN / "real").glob("*.gin") if file.stem not in SHARED)
ASKED = {"bupo": ["BUPO_LAYER=3"]}
# What makes a command small: it comes last, so that it replaces the header's own.
SMALL = {"countdown": ["--sizes", "train=20", "test=5"], "anthropic_hh_rlhf": []}


def commands() -> dict[str, list[str]]:
    """{module and arguments: both as words}, each command once."""
    found = {}
    for file in FILES:
        header = file.read_text().partition("from __gin__")[0]
        for module, given in COMMAND.findall(header):
            if module.startswith("jaxrl_llm.data.prepare"):
                found[module + given] = [module, *shlex.split(given)]
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def counts(real_data: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """{folder: counts} of the commands, run where the runs are started."""
    monkeypatch.chdir(prepared)
    found = {}
    for module, *given in commands().values():
        own = [word.replace("DATA/", f"{real_data}/", 1) for word in given]
        out = own[own.index("--out") + 1]
        small = SMALL.get(module.rpartition(".")[2], ["--limit", "150"])
        found[out] = preparation.main(importlib.import_module(module).PREPARATION, [*own, *small])
    return found


def test_the_commands_write_what_the_runs_read(counts: dict[str, dict[str, int]]) -> None:
    assert sorted(counts) == [
        f"data_sets/{name}"
        for name in (
            "anthropic_hh_rlhf", "countdown", "gsm8k", "hendrycks_math", "math500", "math500_bare", "math_bare", "mmlu_hinted", "svamp",
        )
    ]  # fmt: skip
    harmless = counts["data_sets/anthropic_hh_rlhf"]
    assert (harmless["written/test"], harmless["written/train"], harmless["shared/train"]) == (64, 131, 0)
    for file in FILES:
        run, _ = command_line.build([str(file)], ASKED.get(file.stem, []))
        (stage,) = run.stages
        for data in (stage.data, *(evaluation.data for evaluation in stage.evaluations)):
            assert data.rows(), file.stem
        if file.stem == "cs336_sft":
            first = stage.data.rows()[0]
            assert first.text.endswith("\nAssistant: <think>") and "\\boxed{}" not in first.text
            assert first.response.endswith("\\boxed{0}$.\n</think> <answer>0</answer>")


def test_no_prompt_of_a_training_set_is_evaluated(counts: dict[str, dict[str, int]]) -> None:
    for file in FILES:
        (stage,) = command_line.build([str(file)], ASKED.get(file.stem, []))[0].stages
        learned = {prompt.question for prompt in stage.data.rows()}
        for evaluation in stage.evaluations:
            assert learned.isdisjoint({prompt.question for prompt in evaluation.data.rows()}), (
                file.stem,
                evaluation.name,
            )
