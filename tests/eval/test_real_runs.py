"""The table of two arms of runs: its numbers by NumPy from the rewards that the run folders are made of."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.eval.reports import real_runs

PROMPTS, SAMPLES = 6, 4


def write(folder: Path, rewards: dict[int, np.ndarray], shown: int | None = None) -> Path:
    """A run folder: rewards [PROMPTS, 1 + SAMPLES] of each evaluated step, the greedy answer's first."""
    folder.mkdir()
    lines, metrics = [], []
    for step, values in rewards.items():
        lines.append({"step": step, "prompt": "trained", "role": "policy", "reward": 1.0})  # of the step itself
        for kind, columns in (("greedy", [0]), ("sampled", range(1, 1 + SAMPLES))):
            for prompt in range(PROMPTS):
                for column in columns:
                    reward = float(values[prompt, column])
                    lines.append({
                        "step": step, "kind": "eval/heldout", "prompt": f"set/test/{prompt}", "role": kind, "response": f"answer {column}",
                        "finish": "stop" if reward else "length", "tokens": 3 + column, "reward": reward,
                        "parts": {"right": reward, "log/class": float(column // 2) if reward else -1.0},
                    })  # fmt: skip
        metrics.append(
            {"step": step, "eval/heldout/prompts": PROMPTS, "eval/heldout/monitor/f1": 0.5, "entropy/mean": 0.01 * step}
        )
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines[:shown]))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return folder


@pytest.fixture
def arms(tmp_path: Path) -> tuple[list[list[Path]], np.ndarray]:
    """The folders of two arms of two seeds, and their rewards [2, 2, 2, PROMPTS, 1 + SAMPLES] by arm, seed and step (0, then the last)."""
    rewards = np.random.default_rng(0).integers(0, 2, (2, 2, 2, PROMPTS, 1 + SAMPLES)).astype(float)
    last = [[50, 50], [50, 47]]  # a time limit ended one run earlier
    folders = [
        [
            write(tmp_path / f"{arm}-{seed}", {0: rewards[i, seed, 0], last[i][seed]: rewards[i, seed, 1]})
            for seed in range(2)
        ]
        for i, arm in enumerate("ab")
    ]
    return folders, rewards


def passed(samples: np.ndarray, k: int) -> np.ndarray:
    """Each prompt's share of choices of k samples that hold a right one."""
    return np.mean([samples[..., list(chosen)].max(-1) for chosen in combinations(range(SAMPLES), k)], axis=0)


def distinct(samples: np.ndarray) -> np.ndarray:
    """Each prompt's number of classes with a right answer; samples 1 to 4 are of the classes 0, 1, 1 and 2."""
    return samples[..., 0] + samples[..., 1:3].max(-1) + samples[..., 3]


def test_means_and_intervals_are_those_of_the_prompts(
    arms: tuple[list[list[Path]], np.ndarray], tmp_path: Path
) -> None:
    folders, rewards = arms
    file = tmp_path / "table.json"
    said = [
        "--a",
        *map(str, folders[0]),
        "--b",
        *map(str, folders[1]),
        "--ks",
        "1",
        "2",
        "4",
        "16",
        "--json",
        str(file),
    ]
    assert real_runs.main(said) == 0
    lines = {(x["step"], x["metric"].removeprefix("eval/heldout/")): x for x in json.loads(file.read_text())}
    samples = rewards[..., 1:]
    expected = {"greedy": rewards[..., 0], "sampled": samples.mean(-1), "classes": distinct(samples)}
    expected |= {f"pass@{k}": passed(samples, k) for k in (1, 2, 4)}
    expected |= {"sampled_truncated": 1 - samples.mean(-1), "greedy_length": np.full((2, 2, 2, PROMPTS), 3.0)}
    for metric, values in expected.items():
        for place, step in enumerate(("first", "last")):
            a, b = values[:, :, place].mean(axis=1)  # each prompt's mean over the seeds
            line, half = lines[step, metric], 1.96 * np.std(b - a, ddof=1) / np.sqrt(PROMPTS)
            assert line["prompts"] == PROMPTS
            found = [line[name] for name in ("a", "b", "difference", "ci95")]
            np.testing.assert_allclose(found, [a.mean(), b.mean(), (b - a).mean(), half], rtol=1e-12, atol=1e-12)
    assert ("last", "pass@16") not in lines
    whole = lines["last", "entropy/mean"]
    assert whole["a_seeds"] == [0.5, 0.5] and whole["b_seeds"] == pytest.approx([0.5, 0.47]) and "ci95" not in whole
    assert lines["first", "monitor/f1"]["difference"] == 0.0


def test_the_table_has_a_line_for_each_metric_of_a_step(
    arms: tuple[list[list[Path]], np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    folders, rewards = arms
    assert real_runs.main(["--a", str(folders[0][0]), "--b", str(folders[0][1]), "--steps", "50"]) == 0
    said = capsys.readouterr().out
    a, b = rewards[0, :, 1, :, 0]
    half = 1.96 * np.std(b - a, ddof=1) / np.sqrt(PROMPTS)
    line = f"| 50 | eval/heldout/greedy | {a.mean():.4g} | {b.mean():.4g} | {(b - a).mean():+.4g} +- {half:.2g} | {PROMPTS} |"
    assert line in said and "| entropy/mean | 0.5 | 0.5 | +0 | 0.5; 0.5 |" in said and "first" not in said


def test_what_cannot_be_paired_is_said(
    arms: tuple[list[list[Path]], np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, rewards = arms
    whole = str(folders[0][0])
    assert real_runs.main(["--a", whole, "--b", str(folders[1][1]), "--steps", "50"]) == 1
    assert "no evaluation at step 50; it has those at [0, 47]" in capsys.readouterr().err
    for shown, said in (
        (5, "answers to 4 of 6 prompts"),
        (12, "or not all of a prompt's"),
        (9, "or not all of a prompt's"),
    ):
        part = write(tmp_path / f"part-{shown}", {0: rewards[0, 0, 0]}, shown=shown)
        assert real_runs.main(["--a", whole, "--b", str(part)]) == 1
        assert said in capsys.readouterr().err
    file = Path(folders[0][1]) / "rollouts.jsonl"
    file.write_text(file.read_text().replace("set/test", "other/test"))
    assert real_runs.main(["--a", whole, "--b", str(folders[0][1])]) == 1
    assert "no prompt in common" in capsys.readouterr().err
    assert real_runs.main(["--a", whole, "--b", str(tmp_path)]) == 1
    assert "holds no rollouts.jsonl" in capsys.readouterr().err
