"""The simulator of fleets against measurements on H200s (docs/measured/speed.md), and its parts against arithmetic by hand."""

import json
from dataclasses import replace

import jax
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.tools import plan
from jaxrl_llm.tools.planning import chips, cost_model

ROW = {
    "work": "update", "device": "NVIDIA H200", "model": "qwen2.5-1.5b", "rows": 8, "row_tokens": 4096, "segments": 1, "unroll": 1,
    "moments_dtype": "float32", "offload": 0, "devices": 1, "fsdp": -1, "tensor": 1, "context": 1,
}  # fmt: skip
SEVEN = {"model": "qwen2.5-7b", "rows": 4, "moments_dtype": "bfloat16"}
HALF = {"model": "qwen2.5-0.5b", "rows": 16, "row_tokens": 2048, "unroll": 24}
MEASURED = [  # what differs from ROW, seconds, GiB a device
    ({"remat": "none", "unroll": 28}, 0.6752, 80.78),
    ({"remat": "full", "moments_dtype": "bfloat16"}, 0.7906, 26.84),
    ({"remat": "attention"}, 0.7674, 32.52),
    ({"remat": "offload", "moments_dtype": "bfloat16"}, 0.8557, 24.31),
    ({**SEVEN, "remat": "projections"}, 1.5376, 116.61),  # sizes and counts of GPUs that no rate was taken from
    ({**HALF, "remat": "none"}, 0.2513, 36.32),
    ({"remat": "attention", "devices": 2, "rows": 16, "fsdp": 2}, 0.8269, 22.82),
    ({"remat": "attention", "devices": 4, "rows": 32, "fsdp": 4}, 0.8233, 16.85),
]


@pytest.mark.parametrize(("changes", "seconds", "gib"), MEASURED)
def test_updates_are_within_15_percent_of_their_time_and_5_percent_of_their_memory(changes, seconds, gib):
    row = {**ROW, **changes}
    setting, tokens, length = cost_model.of_row(row, SHAPES[row["model"]])
    parts = cost_model.update_seconds(chips.CHIPS["h200"], setting, tokens, length)
    assert sum(parts.values()) == pytest.approx(seconds, rel=0.15)
    assert cost_model.memory_bytes(setting, tokens) / 2**30 == pytest.approx(gib, rel=0.05)
    assert (parts["exchange"] > 0) == (row["devices"] > 1)


def test_parameters_and_products_are_those_of_the_model():
    sizes = SHAPES["qwen2.5-1.5b"]
    setting = cost_model.Setting(sizes=sizes, remat="none")
    policy = Policy(sizes, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    assert setting.weights == pytest.approx(sum(x.size for x in jax.tree.leaves(policy.abstract())), rel=1e-3)
    chip = replace(chips.CHIPS["h200"], peak=1e15)
    got = cost_model.update_seconds(chip, setting, 1000, 1000)["products"]
    layer = 1536 * (2 * 12 * 128 + 2 * 2 * 128 + 3 * 8960)
    assert got == pytest.approx(6 * 28 * layer * 1000 / (1e15 * cost_model.RATES["products"]))


STEP = {
    "sequences": 1024,
    "prompt": 128,
    "response": 512,
    "row_tokens": 4096,
    "updates": 1,
    "forwards": 1,
    "slots": 1024,
}


def test_a_fleet_splits_the_state_until_it_fits_and_gains_from_chips_while_there_are_rows():
    chip = chips.CHIPS["v6e"]
    seven = cost_model.Setting(sizes=SHAPES["qwen2.5-7b"], remat="full", moments=6)
    assert cost_model.fleet(chip, seven, 1, STEP) is None  # 7.6 B parameters take 107 GB of state
    few, many = (cost_model.fleet(chip, seven, n, STEP) for n in (8, 64))
    assert few["fsdp"] == 8 and few["gib"] * 2**30 < 0.92 * chip.memory
    assert many["update"] < few["update"] / 4 and few["busy"] == many["busy"] == 1
    assert few["sample"] / 8 < many["sample"] < few["sample"]  # each step reads the weights, however few the slots
    idle = cost_model.fleet(chip, seven, 4096, STEP)
    assert idle["busy"] == pytest.approx(160 / 4096)  # 1024 x 640 tokens are 160 rows
    assert many["ratio"] == pytest.approx(many["sample"] / (many["score"] + many["update"]))


def test_the_command_marks_what_is_extrapolated_and_compares_rows_of_the_benchmark(tmp_path, capsys):
    assert plan.main(["--gin_file=gin/quickstart.gin", "--chips=h200,v5p", "--counts=1,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12].split() for line in lines[-4:]] == [
        ["h200", "1"],
        ["h200", "*", "8"],
        ["v5p", "*", "1"],
        ["v5p", "*", "8"],
    ]
    assert any(line.startswith("assumed") for line in lines)
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({**ROW, "remat": "attention", "s": 0.7674, "peak_gib": 32.52}) + "\n" + '{"error": "x"}\n'
    )
    assert plan.main([f"--compare={file}"]) == 0
    assert capsys.readouterr().out.startswith("update qwen2.5-1.5b 8 x 4096, attention, 1 GPU")
    assert plan.main(["--gin_file=gin/quickstart.gin", "--chips=v6e", "--counts=1,64", "--grow"]) == 0
    one, many = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert float(one[7]) == pytest.approx(float(many[7]), rel=0.05)  # as much sampling a chip
    with pytest.raises(SystemExit):
        plan.main(["--gin_file=gin/quickstart.gin", "--chips=abacus"])
