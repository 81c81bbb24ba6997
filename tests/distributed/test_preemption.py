"""Signals, as a process sees them that waits for a sampler, or that computes beyond its limit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, hashlib, os, signal
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.distributed.preemption import Preemption, Stopping

async def waiting(preemption, signals):
    given_up = []
    async def work():
        try:
            for number in signals:
                os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up.append(True)
            raise
    try:
        await preemption.unless(work())
    except Stopping:
        print("given up", given_up, preemption.reached(1), flush=True)

before = signal.getsignal(signal.SIGINT)
preemption = Preemption(60, Processes())
preemption.listen()
assert asyncio.run(preemption.unless(asyncio.sleep(0, "done"))) == "done" and not preemption.reached(1)
asyncio.run(waiting(preemption, [signal.SIGTERM, signal.SIGINT]))
preemption.close()
assert signal.getsignal(signal.SIGINT) is before and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

preemption = Preemption(60, Processes())
preemption.listen()
try:
    asyncio.run(waiting(preemption, [signal.SIGINT, signal.SIGINT]))
except KeyboardInterrupt:
    print("at once", flush=True)
preemption.close()

preemption = Preemption(0.5, Processes())
preemption.listen()
os.kill(os.getpid(), signal.SIGTERM)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # keeps the main thread in C, where no handler of Python's runs
"""


def test_a_signal_gives_up_what_is_waited_for_and_ends_a_computation_at_its_limit() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["given up [True] True", "at once"], done.stdout + done.stderr
    assert done.returncode == 128 + signal.SIGTERM
    assert "SIGTERM came 0.5 s ago (train.Run.stop_limit_s)" in done.stderr and "last checkpoint" in done.stderr
