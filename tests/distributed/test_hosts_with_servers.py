"""Two processes whose rollouts come from a server that process 0 asks: a signal while it samples, and the same run on one."""

import asyncio
import importlib.util
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import several_hosts
import tiny_run

from jaxrl_llm.distributed.preemption import STOPPED

pytestmark = pytest.mark.slow


def _fake() -> Any:
    """The stand-in of the samplers' tests."""
    spec = importlib.util.spec_from_file_location("fake_vllm", Path(__file__).parents[1] / "samplers" / "fake_vllm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeVllm()


@pytest.fixture
def server() -> Iterator[Any]:
    """A running stand-in of a server."""
    loop = asyncio.new_event_loop()
    fake = loop.run_until_complete(_fake().start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    asyncio.run_coroutine_threadsafe(fake.kill(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_two_processes_stop_while_process_0_samples_and_one_goes_on(server: Any, tmp_path: Path, ahead: int) -> None:
    run_dir = tmp_path / "run"
    more = {
        "VLLM_SPAWN": False, "VLLM_URLS": (server.url,), "VLLM_DTYPE": "'float32'", "vllm.VllmSampler.canary": "''",
        "STEPS": 4, "SAVE_EVERY": 2, "MAX_STALENESS": ahead, "train.Run.stages": "[@rl/train.Stage()]", "rl/train.Stage.evaluations": "[]",
        "rl/train.Stage.gap_stop": 100.0, "rl/train.Stage.gap_warn": 100.0,
    }  # fmt: skip
    command = [
        *tiny_run.command(run_dir, **{**several_hosts.SMALL, **more}),
        "--gin_file=gin/samplers/vllm.gin",
    ]
    command.remove("--gin=evaluate.Evaluation.samples=0")
    two = several_hosts.start(command, 2, 1)
    several_hosts.wait_for(lambda: several_hosts.reached(run_dir, 1), two)
    server.step_s = 4.0
    asked = len(server.bodies)
    several_hosts.wait_for(lambda: len(server.bodies) > asked, two)
    begin = time.monotonic()
    two[1].send_signal(signal.SIGTERM)
    (first, first_said), (second, second_said) = several_hosts.ended(two)
    assert (first, second) == (STOPPED, STOPPED), first_said + second_said
    assert time.monotonic() - begin < 30, "a step takes 48 s"
    server.step_s = 0.0
    stopped = several_hosts.saved(run_dir)
    assert several_hosts.reached(run_dir, stopped) and stopped < 4
    ((status, said),) = several_hosts.ended(several_hosts.start(command, 1, 2))
    assert status == 0, said
    rows = tiny_run.rows(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["data/epoch"] == 4 * 4 / 64, "a prompt was lost or repeated"
    served = [x for x in server.calls if x.startswith("commit")][-1]
    assert served in {"commit 3", f"commit {3 - ahead}"}, (
        "sampled ahead, the last version may be on its way when the run ends"
    )
