"""Every gin component of data/ and rewards/ builds what its macro names."""

from pathlib import Path
from typing import Any

import gin
import pytest

from jaxrl_llm.protocols import Dataset, Reward

ROOT = Path(__file__).parent.parent.parent / "gin"
REQUIRED = {
    "data/reasoning_gym.gin": "procedural.ReasoningGym.task = 'spell_backward'",
    "data/demonstrations.gin": "sft.Demonstrations.path = 'rows.jsonl'",
    "data/labelled.gin": "sft.Demonstrations.path = 'rows.jsonl'",
    "data/pairs.gin": "preference.Pairs.path = 'rows.jsonl'",
    "data/parquet_rows.gin": "parquet_rows.ParquetRows.path = 'folder'",
    "data/rows.gin": "DATA_SOURCE = 'rows.jsonl'",
    "rewards/function.gin": "REWARD_FUNCTION = 'test_gin_components:one'",
    "data/pretrained_tokenizer.gin": "tokenizer.PretrainedTokenizer.path = 'folder'",
}
# {file: the one that it is included after}.
BASES = {"rewards/judged_partition.gin": "rewards/darling.gin"}


def one(text: str) -> float:
    """What function.gin is given."""
    return float(bool(text))


def parse(file: Path, *bindings: str) -> None:
    name = f"{file.parent.name}/{file.name}"
    needed = [REQUIRED[name]] if name in REQUIRED else []
    before = [str(ROOT / BASES[name])] if name in BASES else []
    gin.parse_config_files_and_bindings([*before, str(file)], [*needed, *bindings])


def built(macro: str) -> Any:
    return gin.query_parameter(f"%{macro}").scoped_configurable_fn()


@pytest.mark.parametrize("file", sorted((ROOT / "rewards").glob("*.gin")), ids=lambda file: file.stem)
def test_a_reward_file_builds_a_reward(file: Path) -> None:
    parse(file)
    assert isinstance(built("REWARD"), Reward)


@pytest.mark.parametrize("file", sorted((ROOT / "data").glob("*.gin")), ids=lambda file: file.stem)
def test_a_data_file_builds_a_source_or_a_tokenizer(file: Path) -> None:
    parse(file)
    if file.stem.endswith("tokenizer"):
        assert hasattr(built("TOKENIZER"), "load")
        return
    source = built("DATA")
    assert isinstance(source, Dataset)
    if "EVAL_DATA" in file.read_text():
        held_out = built("EVAL_DATA")
        assert isinstance(held_out, type(source)) and getattr(held_out, "split", "") in ("heldout", "test")
        assert getattr(source, "split", "") == "train"


def test_held_out_sums_follow_the_options_of_the_training_sums() -> None:
    parse(ROOT / "data" / "sums.gin", "sums.Sums.high = 30", "sums.Sums.noise = 0.5")
    train, heldout = built("DATA"), built("EVAL_DATA")
    texts = [{row.text for row in source.rows()} for source in (train, heldout)]
    assert (train.high, heldout.high, heldout.size) == (30, 30, 512)
    assert texts[0] and texts[1] and not texts[0] & texts[1]


def test_a_mixture_of_files_is_built_from_lists_in_a_gin_file() -> None:
    lists = [
        "parquet_rows.ParquetRows.path = ['a.parquet', 'b.parquet']",
        "parquet_rows.ParquetRows.weights = [2, 0.5]",
    ]
    gin.parse_config_files_and_bindings([str(ROOT / "data" / "parquet_rows.gin")], lists)
    source = built("DATA")
    assert list(source.paths) == ["a.parquet", "b.parquet"] and list(source.weights) == [2, 0.5]
