"""The proofs' verdicts, from numbers whose outcome is known; and what differs between two checkpoints."""

import json

import numpy as np
import pytest

from jaxrl_llm.eval.reports import phase_proofs as proofs
from jaxrl_llm.eval.reports import phase_switch

LAYERS_OF_ONE = {"embedding": True, "head": True, "layers": [True, True, True, False], "norm": False}


def tb_rows(last_entropy=0.05, benign=0.98, defended=0.1):
    """The metrics of a seed's runs, by name."""
    attack = lambda before, one, three: [{"step": s, proofs.OPEN: v} for s, v in ((0, before), (10, one), (30, three))]  # noqa: E731
    defence = [{"step": 0, proofs.BENIGN: 0.99}, {"step": 1, proofs.ENTROPY: 1.2, "time/step_s": 2.0}]
    defence += [{"step": s, proofs.ENTROPY: last_entropy} for s in range(2, 7)] + [{"step": 7, proofs.BENIGN: benign}]
    return {
        "tb_defence-0": defence,
        "tb_grpo_on_base-0": attack(0.3, 0.9, 1.0),
        "tb_grpo_on_defence-0": attack(0.0, defended, 0.4),
    }


def reader(runs):
    def read(name):
        if name not in runs:
            raise FileNotFoundError(name)
        return runs[name]

    return read


def test_token_buncher_reaches_its_aims_where_all_four_hold():
    found = proofs.token_buncher(reader(tb_rows()), 0)
    assert all(found["reached"].values()) and set(found["attacks"]) == {"grpo"}
    assert found["attacks"]["grpo"]["base"]["gain"] == pytest.approx(0.6)
    assert found["attacks"]["grpo"]["defence"]["gain_3x"] == pytest.approx(0.1)
    assert found["attacks"]["grpo"]["defence"]["own_gain_3x"] == pytest.approx(0.4)


@pytest.mark.parametrize(("change", "aim"), [
    ({"last_entropy": 0.13}, "entropy falls"), ({"benign": 0.96}, "benign"), ({"defended": 0.16}, "quarter"),
])  # fmt: skip
def test_each_aim_can_fail_alone(change, aim):
    reached = proofs.token_buncher(reader(tb_rows(**change)), 0)["reached"]
    assert [name for name, well in reached.items() if not well] == [name for name in reached if aim in name]


def test_bupo_needs_the_exact_parts_counts_and_gains(tmp_path):
    steps = [{"step": 54 + s, "phase": float(s > 8), "time/step_s": 1.0} for s in range(1, 51)]
    run = lambda end: [{"step": 54, proofs.BENIGN: 0.4}, *steps, {"step": 104, proofs.BENIGN: end}]  # noqa: E731
    counts = {"embedding": 32, "head": 32, "layers": [32, 32, 32, 0], "norm": 0}
    switch = {"changed": LAYERS_OF_ONE, "moments": LAYERS_OF_ONE, "counts": counts}
    (tmp_path / "switch-0.json").write_text(json.dumps(switch))
    found = proofs.bupo(reader({"bupo-0": run(0.8), "grpo-0": run(0.7)}), tmp_path, 0)
    assert all(found["reached"].values())
    low = proofs.bupo(reader({"bupo-0": run(0.45), "grpo-0": run(0.7)}), tmp_path, 0)
    assert not low["reached"]["both gain 0.1 held out"]
    switch["counts"]["norm"] = 32
    (tmp_path / "switch-0.json").write_text(json.dumps(switch))
    wrong = proofs.bupo(reader({"bupo-0": run(0.8), "grpo-0": run(0.7)}), tmp_path, 0)
    assert not wrong["reached"]["counts per partition right at the switch"]


def test_what_differs_in_a_single_bit_has_changed():
    before = {
        "embedding": np.ones(3, np.float32),
        "layers": {"w": np.ones((2, 2), np.float32)},
        "norm": np.zeros(1, np.float32),
    }
    after = {
        "embedding": before["embedding"].copy(),
        "layers": {"w": before["layers"]["w"].copy()},
        "norm": -before["norm"],
    }
    after["layers"]["w"][1, 0] = np.nextafter(np.float32(1), np.float32(2))
    assert phase_switch.changed(before, after) == {
        "embedding": False,
        "layers": [False, True],
        "norm": True,
    }  # -0 is not 0


def test_a_seed_s_jobs_begin_from_its_base_and_the_times_are_taken_last(tmp_path):
    made = proofs.jobs(["tokenbuncher", "bupo"], [0, 1], tmp_path, ["X=1"])
    names = [job.name for job in made]
    assert len(set(names)) == len(names) and set(made[-1].after) == set(names[:-1])
    after = {job.name: list(job.after) for job in made}
    assert after["tb_base-1"] == [] and after["tb_defence-1"] == ["tb_base-1"]
    assert (
        after["tb_grpo_on_defence-1"] == ["tb_defence-1"]
        and "tb_ppo_on_base-0" in after
        and "tb_ppo_on_base-1" not in after
    )
    assert all(names.index(earlier) < names.index(name) for name, waits in after.items() for earlier in waits)
