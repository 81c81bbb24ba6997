"""What fails in an environment or an agent is one invalid rollout with its cause; the others go on, and nothing is left behind."""

import asyncio
import sys
import time

import aiohttp
import numpy as np
import pytest
from playing import TOKENIZER, Games, Typist, ids, make_generator, make_prompt, play, watched

from jaxrl_llm.environments.threaded import Threaded
from jaxrl_llm.experience import Action, Ending, Limits, Observation, Task, seed_of
from jaxrl_llm.protocols import Agent, AgentFactory, Down, Environment, EnvironmentFactory
from jaxrl_llm.rollouts.schedule import Slots

QUICK = Limits(reset_s=0.5, step_s=0.5)


def test_the_doubles_and_the_projects_own_are_what_the_protocols_ask_for():
    assert isinstance(Games(), EnvironmentFactory) and isinstance(Games().build(make_prompt("p"), 0, 0), Environment)
    threaded = Threaded(environment=Blocking())
    assert isinstance(threaded, EnvironmentFactory) and isinstance(threaded.build(make_prompt("p"), 0, 0), Environment)
    assert isinstance(Caller("x"), AgentFactory) and isinstance(Caller("x"), Agent)


def test_a_rollout_is_what_the_policy_and_the_environment_said_in_turn():
    sampler = Typist()
    generator = make_generator(Games(), sampler)
    ((rollout, other),), _ = watched(play(generator, n=2))
    first, second = rollout.text[:2], rollout.text[-2:]
    assert rollout.text == f"{first} ok {second}" and f"go {first} ok " in sampler.heard
    assert rollout.tokens.tolist() == ids(rollout.text).tolist()
    assert rollout.mask.tolist() == [True] * 2 + [False] * 4 + [True] * 2
    assert rollout.sampler_logprobs.tolist() == [-1, -2, 0, 0, 0, 0, -1, -2]
    assert [(t.start, t.end, t.call) for t in rollout.turns] == [(0, 2, 0), (6, 8, 1)]
    assert rollout.branches == () and rollout.valid and rollout.finish == "stop"
    assert rollout.rewards == {"reward": 3.0} and rollout.info["last"] == second and rollout.info["stop"] == "done"
    assert other.text != rollout.text
    assert generator.counters["finish/stop"] == 2


BROKEN = {
    "build": ("build/LookupError", "LookupError in build: no board"),
    "reset": ("reset/OSError", "OSError in reset: reset is broken"),
    "reset hangs": ("reset/TimeoutError", "TimeoutError in reset: it took longer than reset_s = 0.5 s"),
    "step": ("step/OSError", "OSError in step: step is broken"),
    "step hangs": ("step/TimeoutError", "TimeoutError in step: it took longer than step_s = 0.5 s"),
    "none": ("step/TypeError", "TypeError in step: it returned NoneType and not an Observation"),
    "unknown character": ("dialogue/ValueError", "ValueError in dialogue: "),
    "nothing": ("episode/NothingSampled", "NothingSampled in episode: it ended before the policy said anything"),
    "close": ("close/OSError", "OSError in close: close is broken"),
    "close hangs": ("close/TimeoutError", "TimeoutError in close: it took longer than close_s = 0.5 s"),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_failure_makes_its_rollout_invalid_and_no_other(wrong: str):
    games = Games(wrong=lambda prompt, sample: wrong if sample == 1 else "")
    generator = make_generator(games, limits=QUICK, close_s=0.5)
    (group,), lag = watched(play(generator))
    cause, error = BROKEN[wrong]
    assert [r.valid for r in group] == [True, False, True, True]
    assert group[1].error.startswith(error) and group[1].rewards == {} and group[1].finish == "aborted"
    assert [r.rewards for r in group if r.valid] == [{"reward": 3.0}] * 3
    assert {name: n for name, n in generator.player.counters.items() if n} == {f"invalid/environment/{cause}": 1}
    said = {"build": 0, "reset": 0, "reset hangs": 0, "nothing": 0, "close": 4, "close hangs": 4}.get(wrong, 2)
    assert int(group[1].mask.sum()) == said, "what was sampled before the failure is kept for the log"
    assert sorted(games.closed) == [("p0", k) for k in range(4) if (wrong, k) != ("build", 1)]
    assert lag < 0.1 and generator.player.service.sessions == ()


def test_a_failed_rollout_is_tried_again_as_a_new_object_with_the_same_seed():
    games = Games()
    games.wrong = lambda prompt, sample: "step" if sample == 2 and len(games.built) == 3 else ""
    generator = make_generator(games, tries=2)
    (group,), _ = watched(play(generator))
    plain, _ = watched(play(make_generator(Games())))
    assert all(r.valid for r in group) and [r.text for r in group] == [r.text for r in plain[0]]
    again = [built for built in games.built if built[1] == 2]
    assert len(again) == 2 and again[0] == again[1] == ("p0", 2, seed_of(0, 2))
    assert generator.player.counters["episodes/again"] == 1 and len(games.closed) == 5


def test_failures_in_a_row_end_the_run_with_the_last_error():
    generator = make_generator(Games(wrong=lambda prompt, sample: "reset"), stop_after=6)
    with pytest.raises(
        Down, match=r"7 rollouts in a row failed .* of prompt 'p1' by OSError in reset: reset is broken"
    ):
        watched(play(generator, prompts=2))
    games = Games(wrong=lambda prompt, sample: "reset" if sample else "")
    seldom = make_generator(games, slots=Slots(concurrency=1), stop_after=6)
    watched(play(seldom, prompts=4))


def test_an_error_of_the_sampler_is_no_failure_of_the_environment():
    games = Games()
    with pytest.raises(ConnectionError, match="no server"):
        watched(play(make_generator(games, Typist(failing=ConnectionError("no server")))))
    assert len(games.closed) == len(games.built)


def test_a_cancelled_rollout_closes_its_environment_once():
    games = Games(seconds=lambda prompt, sample: 60.0)

    async def run() -> None:
        generator = make_generator(games)
        task = asyncio.create_task(play(generator))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generator.player.service.sessions == ()
        assert generator.player.counters["episodes/cancelled_tokens"] == 4 * 2

    watched(run())
    assert sorted(games.closed) == [("p0", k) for k in range(4)]


@pytest.mark.parametrize("late", ["length", "aborted"])
def test_a_late_rollout_is_kept_or_dropped_as_set_and_counted(late: str):
    games = Games(seconds=lambda prompt, sample: 1.5 if sample == 3 else 0.0)
    generator = make_generator(games, limits=Limits(episode_s=2.5), late=late)
    (group,), _ = watched(play(generator))
    last = group[3]
    counters = {name: n for name, n in generator.player.counters.items() if n}
    if late == "length":  # the first step had its reward, the second was not over
        assert (
            last.valid
            and last.finish == "length"
            and last.rewards == {"reward": 1.0}
            and last.info["stop"] == "episode_s"
        )
        assert counters == {"episodes/late_kept": 1}
    else:
        assert not last.valid and "longer than episode_s = 2.5 s" in last.error and last.finish == "aborted"
        assert counters == {"episodes/late_dropped": 1, "invalid/environment/episode/TimeoutError": 1}
    assert [r.valid for r in group[:3]] == [True] * 3


@pytest.mark.parametrize(
    ("limits", "stop", "finish", "text"),
    [
        (Limits(max_turns=1), "max_turns", "stop", 2),
        (Limits(max_tokens=2), "max_tokens", "length", 2),
        (Limits(max_tokens=3), "done", "length", 7),  # the second turn is cut after its first letter
        (Limits(max_length=9), "max_length", "length", 2),  # "go ", two letters, " ok ": no room
    ],
)
def test_limits_end_a_rollout_and_are_named(limits: Limits, stop: str, finish: str, text: int):
    (group,), _ = watched(play(make_generator(Games(), limits=limits), n=1))
    assert (group[0].info["stop"], group[0].finish, len(group[0].text)) == (stop, finish, text) and group[0].valid


class Blocking:
    """Plain functions that take their time."""

    def __init__(self, seconds: float = 0.2) -> None:
        self.seconds, self.closed = seconds, 0

    def build(self, prompt, sample: int, seed: int) -> "Blocking":
        return self

    def reset(self, task: Task) -> Observation:
        return Observation()

    def step(self, action: Action) -> Observation:
        time.sleep(self.seconds)
        return Observation(done=True, reward=1.0)

    def close(self) -> None:
        self.closed += 1


def test_blocking_environments_run_side_by_side_and_never_hold_up_the_loop():
    blocking, begin = Blocking(1.0), time.perf_counter()
    (group,), lag = watched(play(make_generator(Threaded(environment=blocking, workers=16)), n=16))
    assert [r.rewards for r in group] == [{"reward": 1.0}] * 16 and blocking.closed == 16
    assert time.perf_counter() - begin < 8 * blocking.seconds and lag < 0.1


def test_a_bounded_number_of_threads_takes_turns():
    begin = time.perf_counter()
    (group,), _ = watched(play(make_generator(Threaded(environment=Blocking(0.1), workers=2)), n=8))
    assert time.perf_counter() - begin >= 4 * 0.1 and all(r.valid for r in group)


def test_a_blocking_call_that_is_given_up_is_closed_when_it_returns():
    blocking = Blocking(0.5)
    generator = make_generator(Threaded(environment=blocking, workers=2), limits=Limits(step_s=0.1), close_s=5.0)
    (group,), lag = watched(play(generator, n=1))
    assert "step_s = 0.1 s" in group[0].error and blocking.closed == 1 and lag < 0.1


class Caller:
    """An agent that asks twice by the generate route, or does what its name says."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def build(self, prompt, sample: int, seed: int) -> "Caller":
        if self.wrong == "build" and sample == 1:
            raise LookupError("no agent")
        return Caller(self.wrong if sample == 1 else "")

    async def run(self, task: Task, endpoint) -> Ending:
        if self.wrong == "no call":
            return Ending(rewards={"won": 1.0})
        url = endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
            for prompt in ("one ", "two "):
                body = {"token_ids": ids(prompt).tolist(), "sampling_params": {"max_tokens": 8, "logprobs": 1}}
                async with http.post(url, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                if self.wrong == "killed":
                    child = await asyncio.create_subprocess_exec(
                        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
                    )
                    child.kill()
                    if await child.wait():
                        raise ChildProcessError("the agent was killed")
                if self.wrong == "hangs":
                    await asyncio.Event().wait()
        return Ending(rewards={"won": None if task.prompt.id == "p1" else 1.0}, info={"asked": 2})


@pytest.mark.parametrize(
    ("wrong", "cause", "sampled"),
    [
        ("build", "build/LookupError", 0),
        ("killed", "run/ChildProcessError", 2),
        ("no call", "episode/NothingSampled", 0),
        ("hangs", "episode/TimeoutError", 2),
    ],
)
def test_an_agent_that_fails_is_one_invalid_rollout(wrong: str, cause: str, sampled: int):
    limits = Limits(episode_s=4.0 if wrong == "hangs" else 60.0)
    generator = make_generator(Caller(wrong), limits=limits, late="aborted")
    (group,), lag = watched(play(generator))
    assert [r.valid for r in group] == [True, False, True, True]
    assert generator.player.counters[f"invalid/environment/{cause}"] == 1
    assert sum(int(b.mask.sum()) for b in group[1].branches) == sampled
    assert lag < 0.1 and generator.player.service.sessions == ()
    for rollout in (group[0], group[2], group[3]):  # two prompts that share nothing are two branches
        assert [TOKENIZER.decode(b.prefix) for b in rollout.branches] == ["one ", "two "]
        assert [b.mask.tolist() for b in rollout.branches] == [[True] * 2] * 2
        assert rollout.tokens.tolist() == rollout.branches[-1].tokens.tolist()
        assert rollout.rewards == {"won": 1.0} and rollout.info["asked"] == 2


def test_repeated_runs_give_equal_rollouts_whatever_the_order_of_ending():
    def texts(seconds) -> list[list[str]]:
        groups, _ = watched(play(make_generator(Games(seconds=seconds), slots=Slots(concurrency=3)), prompts=3))
        return [[r.text for r in group] for group in groups]

    rng = np.random.default_rng(0)
    delays = {(f"p{i}", k): float(rng.uniform(0, 0.05)) for i in range(3) for k in range(4)}
    assert texts(lambda prompt, sample: 0.0) == texts(lambda prompt, sample: delays[prompt, sample])
