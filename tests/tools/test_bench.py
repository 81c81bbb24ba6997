"""The benchmark runs the project's own programs, counts as flops.py counts, and keeps going where one case fails."""

import json

import jax
import pytest

from jaxrl_llm.metrics import flops, profiling
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.tools import bench, bench_case, programs

TINY = [
    "--model=tiny", "--devices=1", "--dtype=float32", "--rows=4", "--row_tokens=16", "--segments=2", "--prompts=2", "--group=2", "--prompt_tokens=8",
    "--response_tokens=8", "--slots=4", "--decode_chunk=4", "--repeats=2",
]  # fmt: skip


def rows(capsys, *flags, code=0):
    assert bench.main([*TINY, *flags]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_update_is_counted_by_the_convention_and_traced(capsys, tmp_path):
    (row,) = rows(capsys, "--work=update", f"--profile={tmp_path}")
    sizes = SHAPES["tiny"]
    # Two sequences of eight positions in each of four rows; 2 m k n a product, attention half a square, three forwards.
    weights = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) + 512 * 64
    counted = 3 * (2 * weights * 64 + 4 * 2 * 8 * 32 * 64)
    assert flops.update(sizes, [8] * 8) == counted
    assert row["tflops"] == pytest.approx(counted / row["s"] / 1e12, rel=1e-3)
    assert row["tokens_per_s"] == pytest.approx(64 / row["s"], rel=1e-2)
    assert row["micro_batches"] == 1
    assert row["temporary_gib"] > 0 and row["arguments_gib"] > 0
    kernels = profiling.summary(profiling.newest(tmp_path))
    assert kernels[-1]["kernel"] == "all" and kernels[-1]["ms"] > 0
    assert sum(k["ms"] for k in kernels[:-1]) <= kernels[-1]["ms"] * 1.001


def test_a_whole_step_learns_from_what_the_sampler_drew(capsys):
    (row,) = rows(capsys, "--work=step")
    assert row["s"] == pytest.approx(row["sample_s"] + row["score_s"] + row["update_s"], rel=1e-2)
    assert row["gap"] < 1e-4  # float32: sampler and learner agree
    assert row["fill"] == pytest.approx(4 * 15 / (4 * 16), abs=1e-4)


def test_sampling_counts_what_it_drew_and_fills_its_slots(capsys):
    (row,) = rows(capsys, "--work=sample")
    assert row["generated_per_s"] == pytest.approx(32 / row["s"], rel=1e-2)
    assert row["occupancy"] == 1.0
    cache = (
        4 * (8 + 4) * 2 * 2 * 2 * 16 * 4
    )  # slots x filled entries x keys and values x layers x kv heads x width x bytes
    weights = 4 * (2 * 512 * 64 + 64 + 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64 + 2 * 16))
    assert row["floor_gb"] == pytest.approx((cache + weights) / 1e9, rel=1e-3)


def test_lengths_drawn_at_random_are_those_of_the_sampled_tokens(capsys):
    flags = ("--work=sample", "--group=1", "--prompts=4", "--shortest=2", "--shrink=2")
    (row,) = rows(capsys, *flags)
    case = bench_case.Case(flags={"prompts": 4, "prompt_tokens": 8, "response_tokens": 8, "shortest": 2}, repeats=1)
    assert case.sampled.shape == (4, 2) and 2 <= case.sampled.min() < case.sampled.max() <= 8
    assert row["generated_per_s"] * row["s"] == pytest.approx(case.sampled[:, 1].sum(), rel=1e-2)
    assert row["occupancy"] < 1  # the longest response decides when the last slot is free


@pytest.mark.parametrize("shortest", [-1, 9])
def test_lengths_that_cannot_be_drawn_are_refused(shortest):
    case = bench_case.Case(
        flags={"prompts": 4, "prompt_tokens": 8, "response_tokens": 12, "shortest": shortest}, repeats=1
    )
    with pytest.raises(ValueError, match=rf"at most --prompt_tokens and --response_tokens, 8 \(got {shortest}\)"):
        _ = case.sampled


def test_scoring_reports_its_rate(capsys):
    (row,) = rows(capsys, "--work=score")
    assert row["tflops"] == pytest.approx(flops.forward(SHAPES["tiny"], [8] * 8) / row["s"] / 1e12, rel=1e-3)


def test_an_update_with_moments_on_the_host_is_compiled_for_a_target():
    given = {name.removeprefix("--"): value for name, _, value in (flag.partition("=") for flag in TINY)} | {
        "offload": "1"
    }
    flags = {name: kind(given.get(name, default)) for name, (kind, default, _) in bench_case.SWEPT.items()}
    target = programs.Target(name="v6e:1x1", kind="v6e", devices=jax.devices()[:1])
    found = bench.for_target(bench_case.Case(flags=flags, repeats=1, own=target.devices), target)["programs"]
    weights = 2 * 512 * 64 + 64 + 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64 + 2 * 16)
    assert found["only"]["temporary_bytes"] > 0
    # The fullest moment is when the embedding is updated and the head's moments move in: the weights, and of these two, which are last, the
    # gradients and two moments, four bytes each.
    assert found["apply"] == {"peak_bytes": pytest.approx(4 * weights + 12 * 2 * 512 * 64, rel=1e-4)}


def test_a_combination_that_fails_leaves_the_others_and_the_exit_code_tells(capsys, tmp_path):
    found = rows(
        capsys, "--work=score", "--remat=full,none", "--limit=0.01", f"--output={tmp_path / 'x.jsonl'}", code=1
    )
    assert [r["remat"] for r in found] == ["full", "none"]
    assert all("took more than 0.01 s" in r["error"] for r in found)
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 2


def test_an_unknown_work_or_backend_is_refused_by_name(capsys):
    for flag, said in (
        ("--work=play", "--work=play is not one of update, score"),
        ("--attention=fast", "unknown backend 'fast': use auto or one of"),
    ):
        assert bench.main([*TINY, flag]) == 1 and f"error: {said}" in capsys.readouterr().err


def test_it_says_what_it_measures_before_the_minutes_that_it_takes(monkeypatch, capsys):
    said = []

    def measured(flags, *rest):
        said.append(capsys.readouterr().err)
        return {**flags, "s": 1.0}

    monkeypatch.setattr(bench, "row", measured)
    monkeypatch.setattr(bench, "in_process", measured)
    assert bench.main(["--work=update", "--model=tiny"]) == 0
    assert bench.main(["--work=update,score", "--model=tiny", "--remat=none"]) == 0
    assert [line.partition(": ")[0] for line in said] == ["# 1 of 1", "# 1 of 2", "# 2 of 2"]
    assert "work=update" in said[1] and "work=score, model=tiny" in said[2] and "remat=none" in said[2]
