"""Two evaluations compared prompt by prompt."""

import json
from pathlib import Path

import pytest

from jaxrl_llm.eval import compare


def write(folder: Path, scores: dict[str, list[float | None]], kind: str = "greedy") -> Path:
    folder.mkdir()
    lines = [
        json.dumps({"id": prompt, "kind": kind, "sample": i, "score": score, "scores": {"right": score}})
        for prompt, values in scores.items()
        for i, score in enumerate(values)
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_difference_is_taken_prompt_by_prompt(tmp_path, capsys):
    a = write(tmp_path / "a", {"p": [1, 0], "q": [0, 0], "r": [1, 1], "s": [1], "only a": [1]})
    b = write(tmp_path / "b", {"p": [1, 1], "q": [1, 0], "r": [1, 1], "s": [None]})
    assert compare.main([str(a), str(b)]) == 0
    # On p, q and r: a 0.5, 0, 1 and b 1, 0.5, 1; differences 0.5, 0.5, 0 with mean 1/3 and deviation sqrt(1/12).
    half = 1.96 * (1 / 12) ** 0.5 / 3**0.5
    said = capsys.readouterr().out
    assert f"greedy: 0.5000 and 0.8333 on 3 prompts; difference +0.3333 +- {half:.4f} (outside" in said
    assert "2 and 1 prompts left out" in said


def test_an_evaluation_agrees_with_itself(tmp_path, capsys):
    a = write(tmp_path / "a", {"p": [1], "q": [0]}, kind="sampled")
    assert compare.main([str(a), str(a), "--part", "right"]) == 0
    assert capsys.readouterr().out.startswith(
        "sampled: 0.5000 and 0.5000 on 2 prompts; difference +0.0000 +- 0.0000 (within"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no samples.jsonl"),
        ('{"id": "p"}\n', "samples.jsonl:1 is no record"),
        ('{"id": "z", "kind": "greedy", "score": 1, "scores": {}}\n', "no graded prompt in common"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, capsys, content, said):
    a, b = write(tmp_path / "a", {"p": [1], "q": [0]}), tmp_path / "b"
    b.mkdir()
    if content is not None:
        (b / "samples.jsonl").write_text(content)
    assert compare.main([str(a), str(b)]) == 1
    assert said in capsys.readouterr().err
