"""Starts commands as several processes of one run, on this machine, and loses some of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny_run

# A run of one stage that samples, small enough to be started many times.
SMALL = {
    "train.Run.stages": "[@rl/train.Stage()]",
    "STEPS": 14,
    "SAVE_EVERY": 5,
    "EVALUATE_EVERY": 7,
    "qwen3.Qwen3.layers": 1,
    "evaluate.Evaluation.samples": 0,
    "grpo.GRPO.kl_coef": 0.0,
    "train.Hosts.wait_s": 120,
    "train.Run.stop_limit_s": 60,
}

# Joins the others and lets its devices talk without end, as a run does.
TALKER = """
import os, sys, jax, numpy as np
from jax.experimental import multihost_utils
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
with joined(Hosts(lost_s=float(sys.argv[1]), wait_s=30), coordinator_arguments(os.environ, False)) as processes:
    print("together", processes.index, flush=True, file=sys.stderr)
    for number in range(10**9):
        multihost_utils.process_allgather(np.ones(3))
"""

# Sends large values without end, as a run does at each step.
SENDER = TALKER.replace("multihost_utils.process_allgather(np.ones(3))", "processes.broadcast(np.ones(2**19))")

# What the processes of a run ask of each other, once each.
ASKING = """
import os, pathlib, sys, time, numpy as np
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
own = pathlib.Path(sys.argv[1]) / os.environ["JAX_PROCESS_ID"]
own.mkdir()
with joined(Hosts(wait_s=2, lost_s=30), coordinator_arguments(os.environ, False)) as processes:
    i = processes.index
    said = processes.broadcast({"x": np.arange(3) + i})
    assert said["x"].tolist() == [0, 1, 2]
    assert [x["i"] for x in processes.gathered({"i": i})] == [0, 1]
    assert processes.summed({"kept": i + 1, "lost": 0}) == {"kept": 3}
    assert processes.part(range(5)) == [[0, 1], [2, 3, 4]][i]
    processes.share(own.parent)
    processes.same("the number", [1, "one"])
    try:
        processes.same("the number", i)
    except ValueError as error:
        print(error, file=sys.stderr)
    try:
        processes.share(own)
    except OSError as error:
        print(error, file=sys.stderr)
    print("out", i)
    if i == 1:
        processes.meet("a late supper")
    time.sleep(20)
"""

# Process 0 alone has groups that were sampled ahead, and all processes save and read a checkpoint, and the reference that it names.
SAVING = """
import os, pathlib, sys, jax, numpy as np
from jax.experimental import multihost_utils
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
from jaxrl_llm.distributed.serialization import Deferred
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints
with joined(Hosts(wait_s=60, lost_s=30), coordinator_arguments(os.environ, False)) as processes:
    feed = [Deferred(lambda: np.arange(300_000, dtype=np.int32))] if processes.main else {}
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    x = multihost_utils.host_local_array_to_global_array(np.ones(3, np.float32), mesh, jax.P())
    checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), Checkpointing(), deferred=True)
    for step in (1, 2):
        said = checkpoints.keep(0, {"w": x})
        checkpoints.save(step, {"state": {"x": x}}, {"feed": feed, "step": step, **said})
    checkpoints.wait()
    assert checkpoints.latest() == 2 and checkpoints.host(2)["step"] == 2
    named = checkpoints.host(2)["reference"]
    assert named["dtype"] == "float32"
    found = checkpoints.kept(0, named, lambda dtype: {"w": jax.ShapeDtypeStruct((3,), dtype, sharding=x.sharding)})
    assert np.asarray(found["w"].addressable_data(0)).tolist() == [1.0, 1.0, 1.0]
    (tokens,) = checkpoints.whole_host(2)["feed"]
    assert tokens.dtype == np.int32 and tokens.tolist() == list(range(300_000))
    checkpoints.close()
"""

# Large values; the coordination service is asked to carry none of them. At the end process 1 does not come to receive one.
SENDING = """
import os, sys, time, numpy as np
from jaxrl_llm.distributed import processes as module
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
class Service:
    def __getattr__(self, name):
        return getattr(real(), name)
    def key_value_set_bytes(self, key, value):
        assert len(value) <= module.SMALL + 1, len(value)
        real().key_value_set_bytes(key, value)
real, module.client = module.client, Service
with joined(Hosts(wait_s=10, lost_s=30), coordinator_arguments(os.environ, False)) as processes:
    i, size = processes.index, 2 * module.PART + 4004
    own = np.random.default_rng(i).integers(0, 2**32, size // 4, dtype=np.uint32)
    other = np.random.default_rng(1 - i).integers(0, 2**32, size // 4, dtype=np.uint32)
    assert (processes.broadcast(own) == (other if i else own)).all()
    text = "\u00e9" * 3000
    first, second = processes.gathered({"text": text, "x": own})
    assert first["text"] == second["text"] == text
    assert ((first if i else second)["x"] == other).all() and ((second if i else first)["x"] == own).all()
    first, second = processes.gathered(own if i else "small")
    assert first == "small" and (second == (own if i else other)).all()
    assert processes.broadcast(np.zeros(module.SMALL, np.uint8)).shape == (module.SMALL,)
    assert processes.broadcast({"after": i}) == {"after": 0}
    if i == 0:
        processes.broadcast(own)
    time.sleep(20)
"""


# Compiles a program of all devices and one of its own device after JAX's key of where programs run was made that of a TPU pod, which
# is one for all hosts: on CPUs each process has one of its own. Prints what it had to compile and what it found.
COMPILING = """
import collections, os, jax, numpy as np
import jax._src.cache_key as keys
keys._hash_accelerator_config = lambda total, devices: None
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
compilation_cache.keep()
said = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **more: said.update([name.rpartition("/")[2]]))
with joined(Hosts(wait_s=60, lost_s=60), coordinator_arguments(os.environ, False)) as processes:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    rows = jax.NamedSharding(mesh, jax.P("d"))
    x = jax.make_array_from_callback((8,), rows, lambda part: np.arange(8.0, dtype=np.float32)[part])
    said.clear()
    total = jax.jit(lambda x: (x * x).sum())(x)
    processes.meet("a program is written")
    assert float(total) == 140.0
    found = processes.gathered([said["compile_requests_use_cache"] - said["cache_hits"], said["cache_hits"]])
    print("misses and hits", found)
"""


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(index: int, count: int, devices: int, address: str) -> dict[str, str]:
    """Of one process among `count`; of one alone, JAX's variables are not set."""
    root = str(Path(__file__).parent.parent)
    found = tiny_run.environment(devices)
    found |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], root])}
    if count == 1:
        return found
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
    return found | place


def start(
    command: Sequence[str], count: int, devices: int, address: str = "", prefixes: Sequence[Sequence[str]] = ()
) -> list[subprocess.Popen[str]]:
    """The command as `count` processes with `devices` devices each; `prefixes` run each in a place of its own."""
    address = address or f"127.0.0.1:{port()}"
    prefixes = prefixes or [()] * count
    return [
        subprocess.Popen(
            [*prefixes[i], *command], cwd=tiny_run.ROOT, env=environment(i, count, devices, address), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]  # fmt: skip


def run(run_dir: Path, count: int, devices: int, **more: Any) -> list[subprocess.Popen[str]]:
    """The small run; None in `more` leaves a setting out."""
    settings = {name: value for name, value in {**SMALL, **more}.items() if value is not None}
    return start(tiny_run.command(run_dir, **settings), count, devices)


def talkers(lost_s: float, script: str = TALKER, **places: Any) -> list[subprocess.Popen[str]]:
    """Two processes that talk without end."""
    return start([sys.executable, "-c", script, str(lost_s)], 2, 1, **places)


def ended(processes: Sequence[subprocess.Popen[str]], limit: float = 240) -> list[tuple[int, str]]:
    """(exit status, standard output and error) of each; those that are not over within `limit` seconds are killed."""
    found = []
    deadline = time.monotonic() + limit
    for process in processes:
        try:
            out, error = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            found.append((process.returncode, out + error))
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            found.append((process.returncode, f"not over within {limit} s\n{out}{error}"))
    return found


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[str]], limit: float = 240) -> None:
    """Returns when the condition holds, or a process is over, or the time is."""
    deadline = time.monotonic() + limit
    while not condition() and time.monotonic() < deadline and all(p.poll() is None for p in processes):
        time.sleep(0.01)


def reached(run_dir: Path, step: int) -> bool:
    file = run_dir / "metrics.jsonl"
    return file.exists() and f'"step": {step},' in file.read_text()


def saved(run_dir: Path) -> int:
    """The last checkpoint's step."""
    return max(int(p.name) for p in (run_dir / "checkpoints").iterdir())


def together(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Returns when all talkers talk."""
    for process in processes:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("together"):
                break
    time.sleep(0.5)


def lose(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    os.kill(process.pid, number)
