"""Several processes as one run: the same metrics as one process, clear ends, and restarts by the same command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import several_hosts
import tiny_run

from jaxrl_llm.distributed import rendezvous, serialization
from jaxrl_llm.distributed.preemption import STOPPED
from jaxrl_llm.experience import Group, Prompt, Rollout, Scores

pytestmark = pytest.mark.slow


def test_runs_of_one_and_of_two_processes_preempted_and_killed_give_the_metrics_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: two devices in one process and in two add in one order."""
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    ((status, said),) = several_hosts.ended(several_hosts.run(whole, 1, 2))
    assert status == 0, said

    one = several_hosts.run(run_dir, 1, 2)
    several_hosts.wait_for(lambda: several_hosts.reached(run_dir, 1), one)
    one[0].send_signal(signal.SIGINT)
    ((status, said),) = several_hosts.ended(one)
    assert status == STOPPED and "stopped after step" in said, said

    begun = several_hosts.saved(run_dir)
    monkeypatch.setenv("REWARD_S", "0.02")  # a step is long enough for a signal to come within it
    two = several_hosts.run(run_dir, 2, 1)
    monkeypatch.delenv("REWARD_S")
    several_hosts.wait_for(lambda: several_hosts.reached(run_dir, begun + 1), two)
    two[1].send_signal(signal.SIGTERM)
    first, second = several_hosts.ended(two)
    assert (first[0], second[0]) == (STOPPED, STOPPED), first[1] + second[1]
    assert "SIGTERM: saves and ends" in second[1] and "stopped after step" in first[1]
    assert "stage rl" in first[1] and "stage rl" not in second[1], "process 0 alone prints"
    stopped = several_hosts.saved(run_dir)
    assert several_hosts.reached(run_dir, stopped) and not several_hosts.reached(run_dir, stopped + 1)

    two = several_hosts.run(run_dir, 2, 1, **{"train.Hosts.lost_s": 6})
    several_hosts.wait_for(lambda: several_hosts.reached(run_dir, stopped + 1), two)
    several_hosts.lose(two[1])
    (status, said), _ = several_hosts.ended(two)
    assert status == rendezvous.LOST and "process 1 (" in said and "no sign of life for 6 s" in said, said
    assert not several_hosts.reached(run_dir, 14)

    ((status, said),) = several_hosts.ended(several_hosts.run(run_dir, 1, 2))
    assert status == 0, said
    assert tiny_run.rows(run_dir) == tiny_run.rows(whole)


def test_four_processes_learn_from_demonstrations_as_one_does(tmp_path: Path) -> None:
    """Each encodes a quarter of the rows; to 1e-6, since four processes add in another order than four devices of one."""
    more = {"train.Run.stages": "[@sft/train.Stage()]", "SFT_STEPS": 2, "sft/train.Stage.evaluations": "[]"}
    more |= {"evaluate.Evaluation.samples": None, "grpo.GRPO.kl_coef": None}  # which the run does not build
    ((status, said),) = several_hosts.ended(several_hosts.run(tmp_path / "one", 1, 4, **more))
    assert status == 0, said
    for status, said in several_hosts.ended(several_hosts.run(tmp_path / "four", 4, 1, **more)):
        assert status == 0, said
    ones, fours = tiny_run.rows(tmp_path / "one"), tiny_run.rows(tmp_path / "four")
    assert [row.keys() for row in ones] == [row.keys() for row in fours] and len(ones) == 3
    for one, four in zip(ones, fours, strict=True):
        assert one == pytest.approx(four, rel=1e-6, abs=1e-6)
    (_, said), *_ = several_hosts.ended(several_hosts.run(tmp_path / "four", 2, 2, **more))
    assert "holds a finished run" in said, "its last evaluation is not made again"


@pytest.mark.parametrize("script", [several_hosts.TALKER, several_hosts.SENDER], ids=["talks", "sends large values"])
def test_a_process_that_stops_ends_the_other_with_its_name(script: str) -> None:
    processes = several_hosts.talkers(3, script)
    several_hosts.together(processes)
    begin = time.monotonic()
    several_hosts.lose(processes[1], signal.SIGSTOP)
    status, said = several_hosts.ended(processes[:1])[0]
    assert status == rendezvous.LOST and "process 1 (" in said and "no sign of life for 3 s" in said, said
    assert time.monotonic() - begin < 15
    several_hosts.lose(processes[1])
    several_hosts.ended(processes[1:])


def test_the_loss_of_process_0_ends_the_others_at_once() -> None:
    processes = several_hosts.talkers(30)
    several_hosts.together(processes)
    begin = time.monotonic()
    several_hosts.lose(processes[0])
    several_hosts.ended(processes[:1])
    status, said = several_hosts.ended(processes[1:])[0]
    assert status == rendezvous.LOST and "process 0 (" in said and "or its network is gone" in said, said
    assert time.monotonic() - begin < 15


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.123.0.1 and 10.123.0.2, each of which takes this machine's name for its own address."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command `ip`")
    names = (f"jaxrl{os.getpid()}a", f"jaxrl{os.getpid()}b")
    host = os.uname().nodename
    try:
        for i, name in enumerate(names, 1):
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"10.123.0.{i} {host}\n127.0.0.1 localhost\n")
        _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for i, name in enumerate(names, 1):
            _ip("link", "set", name, "netns", name)
            for command in (
                ("addr", "add", f"10.123.0.{i}/24", "dev", name),
                ("link", "set", name, "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", name, *command)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def test_two_addresses_that_are_cut_off_from_each_other_both_end(namespaces: tuple[str, str]) -> None:
    places = {"address": "10.123.0.1:2222", "prefixes": [("ip", "netns", "exec", name) for name in namespaces]}
    processes = several_hosts.talkers(3, **places)
    several_hosts.together(processes)
    begin = time.monotonic()
    _ip("-n", namespaces[1], "link", "set", namespaces[1], "down")
    (first, first_said), (second, second_said) = several_hosts.ended(processes)
    assert (first, second) == (rendezvous.LOST, rendezvous.LOST), first_said + second_said
    assert "process 1 (" in first_said and "no sign of life" in first_said, first_said
    assert "process 0 (" in second_said and "for 3 s (train.Hosts.lost_s)" in second_said, second_said
    assert time.monotonic() - begin < 15


def test_processes_exchange_values_and_the_error_of_one_ends_the_other_with_what_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", several_hosts.ASKING, str(tmp_path)]
    (first, first_said), (second, second_said) = several_hosts.ended(several_hosts.start(command, 2, 1))
    assert (
        second == 1 and "process 0 (" in second_said and "did not come to 'a late supper' within 2 s" in second_said
    ), second_said
    for said in (first_said, second_said):
        assert "process 1 (" in said and "set RUN_DIR to a folder that all hosts share" in said, said
        assert ") has not the number of process 0 (" in said, said
    assert "out 0" in first_said and "out 1" not in second_said, "process 0 alone prints"
    assert first == rendezvous.LOST and "ended: Absent: process 0 (" in first_said, first_said


def test_large_values_travel_between_devices_and_one_that_is_not_received_is_an_error_in_time() -> None:
    begin = time.monotonic()
    command = [sys.executable, "-c", several_hosts.SENDING]
    (first, first_said), (second, second_said) = several_hosts.ended(several_hosts.start(command, 2, 1))
    assert first == 1 and "process 1 (" in first_said, first_said
    assert "did not come to 'an exchange between devices' within 10 s" in first_said, first_said
    assert second == rendezvous.LOST and "ended: Absent: process 1 (" in second_said, second_said
    assert time.monotonic() - begin < 100


def test_what_process_0_sampled_ahead_is_in_a_checkpoint_of_all(tmp_path: Path) -> None:
    for status, said in several_hosts.ended(
        several_hosts.start([sys.executable, "-c", several_hosts.SAVING, str(tmp_path)], 2, 1)
    ):
        assert status == 0, said


def test_experience_travels_whole() -> None:
    prompt = Prompt(id="a", text="x", tokens=np.arange(3, dtype=np.int32), extra={"k": [1, 2.5, None, {"z": "ü"}]})
    rollout = Rollout(
        prompt=prompt, tokens=np.arange(4, dtype=np.int32), sampler_logprobs=np.float32([0.1, -2, 0, 1e-30]),
        mask=np.array([True, False, True, True]), versions=np.full(4, 7, np.int32), finish="stop", spans={"t": np.zeros(4, bool)},
    )  # fmt: skip
    scores = Scores(parts={"b": np.array([1 / 3, np.nan])}, valid={"b": np.array([True, False])}, weights={"b": 0.5})
    group = Group(rollouts=[rollout, rollout], scores=scores)
    data = serialization.packed([group, {"n": np.float64(1 / 3)}, np.zeros((0, 2))])
    back, number, empty = serialization.unpacked(data)
    assert number == {"n": 1 / 3} and empty.shape == (0, 2)
    assert back.rollouts[0] is back.rollouts[1] and back.rollouts[0].prompt.extra == prompt.extra
    for name in ("tokens", "sampler_logprobs", "mask", "versions"):
        ours, theirs = getattr(back.rollouts[0], name), getattr(rollout, name)
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    np.testing.assert_array_equal(back.scores.parts["b"], scores.parts["b"])
    assert back.scores.weights == {"b": 0.5} and back.rollouts[0].spans["t"].shape == (4,)
    with pytest.raises(TypeError, match="does not travel"):
        serialization.packed(object())


def test_the_place_of_a_process_comes_from_the_environment() -> None:
    where = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    found = rendezvous.coordinator_arguments(where, False)
    assert found is not None and (found["coordinator_address"], found["num_processes"], found["process_id"]) == (
        "a:1",
        2,
        1,
    )
    assert (
        rendezvous.coordinator_arguments({}, False) is None
        and rendezvous.coordinator_arguments({**where, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, True) is None
    )
    assert rendezvous.coordinator_arguments({}, True) == {"local_device_ids": None}
    with pytest.raises(ValueError, match="without JAX_PROCESS_ID"):
        rendezvous.coordinator_arguments({k: v for k, v in where.items() if k != "JAX_PROCESS_ID"}, False)
    with pytest.raises(ValueError, match="JAX_PROCESS_ID in 0"):
        rendezvous.coordinator_arguments({**where, "JAX_PROCESS_ID": "2"}, False)
