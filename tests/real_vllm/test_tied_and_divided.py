"""Tied heads, and a model divided over two ranks: each reads its part, and both refuse what one of them found damaged."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from published import write_version
from serving import ON_TWO_CORES, environment
from tiny_qwen2 import VOCABULARY, config, weights, write_model

TOLERANCE = 1e-4  # nats, float32
DIVIDED = "model.layers.1.mlp.down_proj.weight"  # by columns: no rank reads it whole
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, 200)]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the engine of two ranks says of versions 0 and 1, and of a version 2 with one changed element."""
    folder = tmp_path_factory.mktemp("divided")
    model = write_model(folder / "model", tied=True)
    paths = [write_version(folder, version, weights(version, tied=True), config=config(True)) for version in (0, 1)]
    damaged = weights(2, tied=True)
    damaged[DIVIDED] = damaged[DIVIDED].copy()
    damaged[DIVIDED][5, 200] += 1
    paths.append(write_version(folder, 2, damaged, weights(2, tied=True), config=config(True)))
    program = Path(__file__).parent / "two_ranks.py"
    done = subprocess.run(
        [sys.executable, str(program), str(model), *paths, json.dumps([[0, 1, 2], TOKENS])],
        env=environment(**ON_TWO_CORES), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[0].removeprefix("FOUND "))


@pytest.mark.parametrize("version", [0, 1])
def test_tied_heads_divided_over_two_ranks_compute_with_the_new_version(found, version):
    from by_transformers import Reference

    expected = Reference(weights(version, tied=True)).logprobs(TOKENS)
    assert np.abs(np.array(found["logprobs"][version]) - expected).max() < TOLERANCE


def test_each_rank_reads_half_of_what_is_divided(found):
    tensors = weights(0, tied=True)
    shared = [n for n in tensors if n.endswith("norm.weight")]
    share = sum(a.nbytes for n, a in tensors.items() if n not in shared) // 2
    for status in found["statuses"][0]:
        assert status["bytes"] == share + sum(tensors[n].nbytes for n in shared)


def test_damage_to_one_ranks_part_is_refused_by_both_and_the_old_version_serves(found):
    assert [status["state"] for status in found["statuses"][2]] == ["staged", "staged"]
    assert [(answer["version"], DIVIDED in answer["error"]) for answer in found["commits"][2]] == [(1, True)] * 2
    assert all(status["state"] == "failed" and DIVIDED in status["error"] for status in found["after"])
    assert [int(version) for version in found["published"]] == [1, 1]
    assert found["logprobs"][2] == pytest.approx(found["logprobs"][1], abs=1e-5)
