"""The report on how far sampler and learner were apart."""

import json

from jaxrl_llm.eval.reports import gaps


def run_of(folder, *steps):
    """A run folder whose steps compared tokens with these sizes of their difference; None is a step without a comparison."""
    folder.mkdir()
    rows = []
    for step, sizes in enumerate(steps, 1):
        row = {"step": step, "loss/total": 0.0}
        if sizes is not None:
            row |= {"gap/compared": len(sizes), "gap/differing": sum(size > 0 for size in sizes)}
            row |= {f"gap/above_1e-{n}": sum(size > 10.0**-n for size in sizes) for n in range(1, 7)}
        rows.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    return str(folder)


def test_a_histogram_has_a_bar_of_each_size_and_one_bar_without_differences(tmp_path, capsys):
    apart = run_of(tmp_path / "apart", [0.0] * 20 + [5e-7] * 40, None, [2e-6, 2e-6, 0.03, 0.5])
    same = run_of(tmp_path / "same", [0.0] * 7, [0.0] * 5)
    assert gaps.main([apart, same]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{apart}: tokens compared 64, differing 44"
    assert [line.split() for line in said[1:9]] == [
        ["no", "bit", "differs", "20", "#" * 20], ["to", "1e-6", "40", "#" * 40], ["1e-6", "to", "1e-5", "2", "##"],
        ["1e-5", "to", "1e-4", "0"], ["1e-4", "to", "1e-3", "0"], ["1e-3", "to", "1e-2", "0"],
        ["1e-2", "to", "1e-1", "1", "#"], ["above", "1e-1", "1", "#"],
    ]  # fmt: skip
    assert said[9] == f"{same}: tokens compared 12, differing 0"
    assert said[10].split()[-2:] == ["12", "#" * 40] and all(line.split()[-1] == "0" for line in said[11:])


def test_a_folder_that_compared_nothing_is_refused(tmp_path, capsys):
    assert gaps.main([run_of(tmp_path / "none", None)]) == 1
    assert "no step compared tokens" in capsys.readouterr().err
    assert gaps.main([str(tmp_path / "missing")]) == 1
