"""Every file of gin/eval builds a harness once the paths it requires are given."""

from pathlib import Path

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.eval.answered import Measure
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.protocols import Dataset, Reward

FOLDER = Path(__file__).parents[2] / "gin" / "eval"
# Files that others include: they name no set of their own.
SHARED = {"base", "maths", "sampled_maths", "safety", "judged_by_rubric", "as_bupo", "as_darling"}
SETS = sorted({file.stem for file in FOLDER.glob("*.gin")} - SHARED - {"gsm8k_vllm"})


@pytest.mark.parametrize("name", SETS)
def test_a_file_builds_a_harness(name):
    built, config = command_line.build(
        [str(FOLDER / f"{name}.gin")], ["MODEL_PATH = 'model'", "DATA_PATH = 'rows.jsonl'"]
    )
    assert isinstance(built, Harness) and built.out_dir == f"results/{name}"
    evaluation = built.evaluation
    assert evaluation.name == name and isinstance(evaluation.data, Dataset) and evaluation.kinds
    assert evaluation.reward is None or isinstance(evaluation.reward, Reward)
    assert evaluation.measures and all(isinstance(m, Measure) for m in evaluation.measures)
    assert getattr(evaluation.data, "path", "") == "rows.jsonl" and "train.TrainedModel.path" in config


def test_a_model_is_required():
    with pytest.raises(ValueError, match=r"MODEL_PATH .*must be set"):
        command_line.build([str(FOLDER / "gsm8k.gin")])


# {file: (samples, temperature, top-p, top-k, response limit)} by hand from the papers' evaluations.
PROTOCOLS = {"as_darling": (256, 0.6, 0.95, 20, 8192), "as_bupo": (32, 1.0, 1.0, 0, 7168)}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_paper_s_evaluation_samples_as_it_did(name):
    files = [str(FOLDER / f"{file}.gin") for file in ("aime25", name)]
    built, _ = command_line.build(files, ["MODEL_PATH = 'model'", "DATA_PATH = 'rows.parquet'"])
    evaluation, settings = built.evaluation, built.evaluation.settings
    found = evaluation.samples, settings.temperature, settings.top_p, settings.top_k, settings.max_tokens
    assert found == PROTOCOLS[name] and not evaluation.greedy


def test_noveltybenchs_modes_differ_in_how_they_ask_alone():
    modes = {"": None, "_paraphrase": "Paraphrases", "_in_context": "InContext", "_system_prompt": "SystemMessage"}
    for mode, asking in modes.items():
        built, _ = command_line.build([str(FOLDER / f"novelty_bench{mode}.gin")], ["MODEL_PATH = 'model'"])
        assert (built.asking and type(built.asking).__name__) == asking
        assert (
            built.evaluation.samples,
            built.evaluation.settings.temperature,
            built.evaluation.settings.max_tokens,
        ) == (10, 1.0, 512)
