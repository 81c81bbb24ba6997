"""Every file of gin/eval builds a harness once the paths it requires are given."""

from pathlib import Path

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.eval.answered import Measure
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.protocols import Dataset, Reward

FOLDER = Path(__file__).parents[2] / "gin" / "eval"
# Files that others include: they name no set of their own.
SHARED = {"base", "maths", "sampled_maths", "safety", "judged_by_rubric"}
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
    with pytest.raises(ValueError, match=r"MODEL_PATH.* set to `%gin.REQUIRED`"):
        command_line.build([str(FOLDER / "gsm8k.gin")])
