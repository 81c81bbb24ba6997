"""Figures of training curves: the numbers behind them, both sources of metrics, and what cannot be drawn."""

import csv
import json

import numpy as np
import pytest

from jaxrl_llm.eval.reports.plot import band, main, read, smoothed
from jaxrl_llm.metrics.writers import TensorBoard


def curve(*points):
    return np.array([s for s, _ in points], float), np.array([v for _, v in points], float)


def test_seeds_are_averaged_at_every_step_that_any_has():
    a, b = curve((0, 0), (2, 2), (4, 4)), curve((0, 2), (1, 3), (2, 4))
    found = band([a, b])
    assert found.steps.tolist() == [0, 1, 2, 4]
    assert found.mean.tolist() == [1, 2, 3, 4]  # a is 1 at step 1, and alone at step 4
    assert found.low.tolist() == [0, 1, 2, 4] and found.high.tolist() == [2, 3, 4, 4]
    assert found.seeds.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(("kind", "factor"), [("std", 1), ("ci95", 1.96 / np.sqrt(5))])
def test_bands_are_deviations_of_the_sample(kind, factor):
    values = np.random.default_rng(0).normal(size=(5, 7))
    found = band([(np.arange(7.0), v) for v in values], kind)
    np.testing.assert_allclose(found.high - found.mean, factor * values.std(axis=0, ddof=1))
    np.testing.assert_allclose(found.mean - found.low, factor * values.std(axis=0, ddof=1))
    alone = band([(np.arange(7.0), values[0])], kind)
    assert alone.low.tolist() == alone.mean.tolist() == alone.high.tolist()


def test_smoothing_is_the_mean_of_the_neighbours_there_are():
    values = [3.0, 0.0, 6.0, 9.0]
    assert smoothed((np.arange(4.0), np.array(values)), 3)[1].tolist() == [1.5, 3, 5, 7.5]
    assert smoothed((np.arange(4.0), np.array(values)), 1)[1].tolist() == values


def test_smoothing_goes_by_steps_and_leaves_what_is_rarely_measured_as_it_is():
    rare = np.array([0.0, 50.0, 100.0, 102.0]), np.array([1.0, 2.0, 3.0, 5.0])
    assert smoothed(rare, 5)[1].tolist() == [1, 2, 4, 4]
    assert smoothed(rare, 2)[1].tolist() == [1, 2, 3, 5]


def write(folder, seed, steps=6):
    folder.mkdir(parents=True)
    rows = [{"step": s, "reward/mean": s + seed, "gap/mean": "NaN" if s == 2 else 0.1} for s in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_jsonl_and_tensorboard_give_the_same_curves(tmp_path):
    write(tmp_path / "jsonl", 0.5)
    writer = TensorBoard().open(tmp_path / "board", None)
    for step in range(6):
        writer.write(step, {"reward/mean": step + 0.5, "gap/mean": float("nan") if step == 2 else 0.1})
    writer.text("config", "text")
    writer.close()
    for name in ("jsonl", "board"):
        found = read(tmp_path / name)
        assert found["reward/mean"][0].tolist() == list(range(6)) and found["reward/mean"][1].tolist() == [
            s + 0.5 for s in range(6)
        ]
        assert found["gap/mean"][0].tolist() == [0, 1, 3, 4, 5]


def test_a_figure_and_its_numbers_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'jaxrl-llm[plot]'")
    from PIL import Image

    for seed in range(3):
        write(tmp_path / f"a_{seed}", seed)
    write(tmp_path / "b", 10, steps=4)
    out, numbers = tmp_path / "figures" / "x.png", tmp_path / "x.csv"
    assert main([f"A={tmp_path}/a_*", f"{tmp_path}/b", "--out", str(out), "--csv", str(numbers)]) == 0
    assert "A 3, b 1" in capsys.readouterr().out
    rows = [row for row in csv.DictReader(numbers.read_text().splitlines()) if row["metric"] == "reward/mean"]
    found = {(r["curve"], float(r["step"])): [float(r[n]) for n in ("mean", "low", "high", "seeds")] for r in rows}
    assert found == {("A", float(s)): [s + 1, s, s + 2, 3] for s in range(6)} | {
        ("b", float(s)): [s + 10, s + 10, s + 10, 1] for s in range(4)
    }
    with Image.open(out) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # the lines of both curves
        assert np.sum(np.all(pixels == colour, axis=1)) > 50


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    write(tmp_path / "a", 0)
    (tmp_path / "empty").mkdir()
    for arguments, says in (
        ([str(tmp_path / "none*")], "matches no folder"),
        ([str(tmp_path / "empty")], "has no metrics"),
        ([str(tmp_path / "a"), "--metrics", "loss"], "no run has the metric 'loss'; there are gap/mean, reward/mean"),
        ([f"x={tmp_path}/a", f"x={tmp_path}/a"], "two curves are called 'x'"),
        ([str(tmp_path / "a"), "--smooth", "0"], "--smooth must be at least 1"),
    ):  # fmt: skip
        assert main(arguments) == 1
        assert says in capsys.readouterr().err
