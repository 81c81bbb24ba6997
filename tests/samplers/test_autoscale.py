"""How many samplers are asked for follows the learner's waiting: simulated over traces of load, and asked of a command."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from jaxrl_llm.samplers.servers.autoscale import Autoscale, Load, Scaler, load_of
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

RULE = Autoscale(command="scale {samplers}", most=64)
OWN = 10.0  # seconds of a step that the learner has work of its own for
STEPS = 120


@dataclass(kw_only=True)
class Run:
    """A run that samples ahead: a step lasts as long as the longer of the learner's part and the samplers'.

    Attributes:
      work: seconds that one sampler would need for the samples of step t.
      start: samplers at the beginning.
      delay: steps until samplers that were asked for serve.
    """

    work: Callable[[int], float]
    start: int
    delay: int = 3

    def counts(self, rule: Autoscale = RULE, steps: int = STEPS) -> list[int]:
        """How many samplers serve at each step."""
        serving, coming, loads, found = self.start, [], [], []
        for t in range(steps):
            if coming and coming[0][0] <= t:
                serving, loads = coming.pop(0)[1], []
            found.append(serving)
            sampling = self.work(t) / serving
            step = max(sampling, OWN)
            loads.append(Load(waiting=(step - OWN) / step, busy=sampling / step))
            if not coming and (wanted := rule.wanted(serving, loads)) != serving:
                coming.append((t + self.delay, wanted))
        return found


def turns(counts: Sequence[int]) -> int:
    """How often a change goes the other way than the one before."""
    signs = [sign for sign in np.sign(np.diff(counts)) if sign]
    return sum(a != b for a, b in pairwise(signs))


def noisy(work: float, seed: int, spread: float = 0.1) -> Callable[[int], float]:
    factors = np.exp(spread * np.random.default_rng(seed).standard_normal(STEPS + 1))
    return lambda t: work * float(factors[t])


def most_for(needed: float) -> float:
    """The most samplers that are kept where so many would do: all but what `slack` leaves idle, and half of it again before any goes."""
    return (needed / (1 - RULE.slack) + 1) / (1 - RULE.slack / 2)


@pytest.mark.parametrize("start", [1, 3, 8, 40])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("samplers_needed", [1, 5, 13, 30])
def test_a_constant_load_settles_and_does_not_oscillate(start, seed, samplers_needed):
    counts = Run(work=noisy(OWN * samplers_needed, seed), start=start).counts()
    last = counts[STEPS // 2 :]
    assert turns(counts) <= 1
    assert len(set(last)) == 1
    # Waiting is `high` at most, and fewer would be asked for above the gap, but for whole samplers and the noise of four steps.
    assert samplers_needed * (1 - RULE.high) * 0.85 <= last[0] <= most_for(samplers_needed) * 1.15


@pytest.mark.parametrize(("before", "after"), [(5, 20), (20, 5), (1, 30), (30, 2)])
def test_a_step_of_load_is_followed_once_and_in_time(before, after):
    counts = Run(work=lambda t: OWN * (before if t < 40 else after), start=before).counts()
    assert len(set(counts[10:40])) == 1, "nothing changes before"
    doublings = int(np.ceil(abs(np.log2(after / before))))
    settled = counts[40 + (doublings + 1) * (RULE.steps + 3) :]
    assert len(set(settled)) == 1
    assert after * (1 - RULE.high) <= settled[0] <= most_for(after)
    assert turns(counts[10:]) == 0


def test_a_slow_growth_is_followed_upwards_alone():
    counts = Run(work=lambda t: OWN * (4 + t / 10), start=4).counts()
    assert all(b >= a for a, b in pairwise(counts))
    for t in range(20, STEPS):
        assert counts[t] >= (4 + t / 10) * 0.7


def test_a_load_that_swings_within_the_gap_changes_nothing():
    swinging = Run(work=lambda t: OWN * 10 * (1.1 if t // 8 % 2 else 0.9), start=10)
    assert set(swinging.counts()) == {10}


def test_bounds_and_the_time_after_a_change_hold():
    starved = [Load(waiting=0.8, busy=1.0)] * 10
    idle = [Load(waiting=0.0, busy=0.01)] * 10
    rule = Autoscale(command="x {samplers}", least=2, most=6, steps=4)
    assert [rule.wanted(n, starved) for n in (2, 3, 4, 6)] == [4, 6, 6, 6]  # at most twice as many, at most 6
    assert [rule.wanted(n, idle) for n in (6, 4, 3, 2)] == [3, 2, 2, 2]  # halves, at least 2
    assert rule.wanted(3, starved[:3]) == 3 and rule.wanted(3, starved[:4]) == 6
    assert rule.wanted(1, []) == 2 and rule.wanted(9, []) == 6


def test_a_step_s_metrics_are_read_without_its_evaluation():
    step = {"time/step_s": 30.0, "time/evaluate_s": 10.0, "time/sample_s": 5.0, "sampler/seconds": 15.0}
    assert load_of(step) == Load(waiting=0.25, busy=0.75)
    assert load_of({"time/step_s": 30.0}) is None and load_of({}) is None


def stepped(scaler: Scaler, serving: int, waiting: float, clock_s: float) -> None:
    for _ in range(scaler.rule.steps):
        scaler.step(serving, Load(waiting=waiting, busy=1.0), clock_s)


def test_the_command_is_run_once_with_the_number_and_no_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "a secret")
    program = "import os, sys; open(sys.argv[1], 'a').write(sys.argv[2] + os.environ.get('SOME_TOKEN', '') + '\\n')"
    file = tmp_path / "called; rm -r x"

    async def run() -> Counter[str]:
        counters: Counter[str] = Counter()
        rule = Autoscale(command=f'{sys.executable} -c "{program}" "{file}" {{samplers}}', most=8, steps=2)
        scaler = Scaler(rule=rule, counters=counters)
        stepped(scaler, 2, 0.5, 0.0)
        await scaler._running
        stepped(scaler, 2, 0.5, 1.0)  # those that were asked for do not serve yet
        assert file.read_text() == "4\n"
        stepped(scaler, 4, 0.5, 2.0)
        await scaler._running
        stepped(scaler, 4, 0.5, 2.0 + rule.start_s)  # they never came
        await scaler._running
        await scaler.close()
        return counters

    assert asyncio.run(run()) == {"scaled": 3}
    assert file.read_text() == "4\n8\n8\n"


@pytest.mark.parametrize(
    "command", ["/nowhere/at/all {samplers}", f"{sys.executable} -c raise(SystemExit({{samplers}}))"]
)
def test_a_command_that_fails_is_told_counted_and_tried_again(command, caplog):
    async def run() -> Counter[str]:
        scaler = Scaler(rule=Autoscale(command=command, steps=1), counters=Counter())
        for clock_s in (0.0, 1.0):
            stepped(scaler, 2, 0.5, clock_s)
            await scaler._running
        return scaler.counters

    assert asyncio.run(run()) == {"scaled": 2, "scale_failed": 2}
    assert "the samplers stay as they are" in caplog.text and "the learner waited 50% of its time" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"command": "kubectl scale"}, "where the number of samplers goes"), ({"least": 9}, "at most `most`"), ({"low": 0.3}, "low < high")],
)  # fmt: skip
def test_settings_that_make_no_rule_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Autoscale(**fields)


def test_a_fleet_whose_servers_are_listed_cannot_be_scaled():
    with pytest.raises(ValueError, match="VLLM_URLS_FILE"):
        VllmSampler(spawn=False, urls=("http://127.0.0.1:1",), autoscale=RULE)
