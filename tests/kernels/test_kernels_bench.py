"""The benchmark prints one JSON line a backend and pass, with rates by the stated conventions."""

import json

import numpy as np
import pytest
from builders import slow_but

from jaxrl_llm.kernels import bench, peers
from jaxrl_llm.kernels.attention.specs import Spec as AttentionSpec
from jaxrl_llm.kernels.grouped_matmul.specs import Spec as GroupedSpec
from jaxrl_llm.kernels.log_softmax_entropy.specs import Spec as LogitsSpec
from jaxrl_llm.kernels.token_stats.mosaic_gpu import Tiles
from jaxrl_llm.kernels.token_stats.specs import Spec

TINY = {
    "token_stats": Spec(tokens=16, width=8, vocabulary=40),
    "log_softmax_entropy": LogitsSpec(tokens=16, vocabulary=40),
    "attention": AttentionSpec(batch=2, length=16, heads=4, kv_heads=2, width=4, segments=2, window=6),
    "grouped_matmul": GroupedSpec(tokens=16, experts=4, chosen=2, width=8, inner=12),
}


def rows(capsys, monkeypatch, op, *options):
    monkeypatch.setitem(bench.OPS, op, (bench.OPS[op][0], {"tiny": TINY[op]}))
    bench.main([f"--op={op}", "--spec=tiny", "--dtype=float32", "--no-peers", *options])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


AMOUNTS = {
    ("token_stats", "forward"): ("TFLOP/s", 2 * 16 * 8 * 40 / 1e12),
    ("token_stats", "full"): ("TFLOP/s", 8 * 16 * 8 * 40 / 1e12),
    # 2 rows of 2 segments of 8 tokens, of which 6 are seen: 8 x 6 - 18 = 30 pairs each.
    ("attention", "forward"): ("TFLOP/s", 4 * 2 * 2 * 30 * 4 * 4 / 1e12),
    ("attention", "full"): ("TFLOP/s", 14 * 2 * 2 * 30 * 4 * 4 / 1e12),
    # 32 rows of three products of 8 x 12.
    ("grouped_matmul", "forward"): ("TFLOP/s", 2 * 32 * 3 * 8 * 12 / 1e12),
    ("grouped_matmul", "full"): ("TFLOP/s", 6 * 32 * 3 * 8 * 12 / 1e12),
    ("log_softmax_entropy", "forward"): ("GB/s", 4 * 16 * 40 / 1e9),
    ("log_softmax_entropy", "full"): ("GB/s", 3 * 4 * 16 * 40 / 1e9),
}


@pytest.mark.parametrize("op", slow_but(TINY.keys() - {"attention"}, TINY))
def test_every_backend_has_a_row_a_pass_with_the_rate_of_the_convention(op, capsys, monkeypatch):
    monkeypatch.setattr(bench.np, "median", lambda seconds: 1e-9 if len(seconds) == 10 else None)
    found = rows(capsys, monkeypatch, op)
    ours = [row for row in found if row["backend"] not in ("bare product", "copy")]
    names = {
        "token_stats": {"xla", "ordered", "reference"},
        "log_softmax_entropy": {"xla", "reference"},
        "attention": {"blocked", "ordered", "reference"},
        "grouped_matmul": {"xla", "reference"},
    }
    assert {row["backend"] for row in ours} == names[op]
    for row in ours:
        unit, amount = AMOUNTS[op, row["pass"]]
        assert row[unit] == pytest.approx(amount / 1e-9, abs=0.006)
        assert (row["op"], row["spec"], row["dtype"], row["device"]) == (op, "tiny", "float32", "cpu")
        assert row["temp_mib"] >= 0


def test_real_hidden_states_are_read_from_a_file(capsys, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "states.npz"
    hidden, head = rng.normal(size=(6, 4)).astype(np.float16), rng.normal(size=(9, 4)).astype(np.float32)
    np.savez(file, hidden=hidden, head=head, targets=np.arange(6))
    found = rows(capsys, monkeypatch, "token_stats", f"--arrays={file}")
    assert {row["spec"] for row in found} == {str(file)}
    arrays = bench.token_stats_arrays(TINY["token_stats"], "float32", str(file))
    np.testing.assert_array_equal(arrays[0], hidden.astype(np.float32))
    np.testing.assert_array_equal(arrays[2], np.arange(6))
    np.savez(file, hidden=hidden)
    with pytest.raises(ValueError, match=r"lacks \['head', 'targets'\]"):
        bench.token_stats_arrays(TINY["token_stats"], "float32", str(file))


def test_a_check_states_the_errors_of_each_backend(capsys, monkeypatch, tmp_path):
    def wrong(hidden, head, targets):
        out = bench.stats_api.token_stats(hidden, head, targets, backend="xla")
        return {"logprob": 2 * out["logprob"] + 0.5, "entropy": out["entropy"]}

    right = bench.token_stats_functions
    monkeypatch.setattr(bench, "token_stats_functions", lambda *a: [*right(*a), ("wrong", wrong)])
    found = rows(capsys, monkeypatch, "token_stats", "--check", f"--output={tmp_path / 'rows.json'}")
    assert json.loads((tmp_path / "rows.json").read_text()) == found
    checks = {row["backend"]: row for row in found if row["pass"] == "check"}
    assert set(checks) == {"xla", "ordered", "reference", "wrong"}
    for name in ("xla", "ordered", "reference"):
        assert checks[name]["repeats"] is True
        assert max(checks[name][f"{x} error"] for x in ("logprob", "entropy", "dhidden", "dhead")) < 1e-5
    arrays = bench.token_stats_arrays(TINY["token_stats"], "float32", None)
    logprob = np.asarray(bench.stats_api.token_stats(*arrays)["logprob"])
    assert checks["wrong"]["logprob error"] == pytest.approx(np.abs(logprob + 0.5).max(), abs=1e-5)
    assert checks["wrong"]["entropy error"] < 1e-5
    assert checks["wrong"]["dhidden error"] > 0.1


def test_a_failure_is_a_row_and_the_exit_status(capsys, monkeypatch):
    def fail(work, runs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(bench, "measure", fail)
    with pytest.raises(SystemExit, match="1"):
        rows(capsys, monkeypatch, "token_stats")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 7  # two passes of three backends, and the bare product
    assert {row["failed"] for row in found} == {"RuntimeError: no such kernel"}


def test_tiles_are_read_from_the_command_line():
    assert bench.tiles_of(Tiles, "rows=128,columns=128,slice=16") == Tiles(rows=128, columns=128, slice=16)
    with pytest.raises(ValueError, match=r"\['height'\]"):
        bench.tiles_of(Tiles, "height=3")


def test_random_logits_spread_by_two():
    hidden, head, _ = bench.token_stats_arrays(Spec(tokens=64, width=256, vocabulary=500), "float32", None)
    assert np.std(np.asarray(hidden) @ np.asarray(head).T) == pytest.approx(2.0, rel=0.05)


def test_peers_that_cannot_run_say_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["peers", "--spec=quickstart"])
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    peers.main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["backend"]: row["skipped"].split()[0] for row in found} == {
        name: package for name, (package, _) in peers.PEERS.items()
    }


@pytest.mark.parametrize("options", [["--spec=gpt-9"], ["--runs=3"], ["--op=matmul"], ["--spec=quickstart,gpt-9"]])
def test_a_wrong_command_line_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        bench.parse(options)
    assert options[0].partition("=")[2].split(",")[-1] in capsys.readouterr().err
