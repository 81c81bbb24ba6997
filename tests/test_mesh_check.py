"""The comparison of several devices with one, on simulated devices."""

import json

import numpy as np
import pytest

from jaxrl_llm import mesh_check
from jaxrl_llm.models.qwen2 import Qwen2

TINY = Qwen2(vocabulary_size=37, width=16, layers=1, heads=4, kv_heads=2, head_width=4, mlp_width=24, tied=True)


def test_segments_count_up_and_end_without_a_target():
    _, positions, segments, targets = mesh_check.row(32, 37)
    np.testing.assert_array_equal(segments[0], [1] * 16 + [2] * 8 + [3] * 6 + [0] * 2)
    np.testing.assert_array_equal(positions[0, 16:24], range(8))
    assert set(np.flatnonzero(targets[0] == -1)) == {15, 23, 29, 30, 31}


def test_a_row_split_over_context_has_the_log_probs_and_gradients_of_one_device(quick_compilation):
    want = mesh_check.model(TINY, 32, {}, "float32", "full")
    got = mesh_check.model(TINY, 32, {"context": 4}, "float32", "full")
    rows = mesh_check.compared(got, want)
    assert rows["logprob error"] < 1e-5 and rows["entropy error"] < 1e-5 and 0 <= rows["gradient error"] < 1e-5
    assert np.abs(want[0]["logprob"]).max() > 1 and want[0]["logprob"][31] == 0


def test_the_command_compares_token_stats_over_the_devices_and_fails_where_they_differ(
    capsys, monkeypatch, quick_compilation
):
    monkeypatch.setattr(mesh_check.jax, "device_count", lambda: 2)
    assert mesh_check.main(["--kernel=24,8,40", "--most=-1"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["mesh"] for row in rows] == ["tensor=2", "fsdp=2"]
    assert all(row["gradient error"] < 0.01 and row["logprob error"] < 1e-4 for row in rows)


def test_errors_are_norms_over_all_leaves_and_of_the_worst_one():
    one = {"logprob": np.zeros(2)}
    got = one, {"a": np.array([3.0, 4.5]), "b": np.array([0.0, 10.0])}, 2.0
    want = one, {"a": np.array([3.0, 4.0]), "b": np.array([0.0, 10.0])}, 1.0
    rows = mesh_check.compared(got, want)
    assert rows["worst leaf's error"] == pytest.approx(0.1)
    assert rows["gradient error"] == pytest.approx(0.5 / 125**0.5)
    assert (rows["s"], rows["one_device_s"]) == (2.0, 1.0)
