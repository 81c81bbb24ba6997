"""Local servers as child processes, which are started on free ports of loopback, waited for and stopped.

A server needs only the model's config.json and tokenizer, since its first weights come from the learner. On Linux it ends with the
process that started it, however that ends.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

import aiohttp

from jaxrl_llm import components, serving
from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.samplers.servers.answers import ServerFault, Unreached

_log = logging.getLogger(__name__)
HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[3]
# From a source tree vLLM needs its plugin on the path; where the package is installed, their Python has it.
_SOURCE = [str(_ROOT)] if (_ROOT / "pyproject.toml").is_file() else []
_STOP_S = 15.0
_MPS_READY_S = 10.0
_MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_LAST_LINES = 12
_STARTS = 3  # most starts where another process takes a port that a server had chosen for its own parts
_PORT_TAKEN = ("eaddrinuse", "address already in use")
# A process in between: at the end of the parent (PR_SET_PDEATHSIG) or at SIGTERM it asks the server to end, and kills its group where
# that takes too long, so that servers of a killed run free their memory even if their own shutdown hangs.
_BOUND = f"""
import ctypes, os, signal, subprocess, sys, time
bind = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)
bind()
limit = []
def end(number, frame):
    if not limit:
        limit.append(time.monotonic() + {_STOP_S})
        child.terminate()
child = subprocess.Popen(sys.argv[1:], preexec_fn=bind)
signal.signal(signal.SIGTERM, end)
while child.poll() is None:
    time.sleep(0.05)
    if limit and time.monotonic() > limit[0]:
        os.killpg(0, signal.SIGKILL)
sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""
_VERSION = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(version(name)); break
    except PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, kw_only=True)
class LocalServers(ABC):
    """Servers that this process starts and stops.

    Attributes:
      count: number of servers.
      python: the Python that has the servers; None is this process's own.
      python_path: folders at the beginning of the servers' PYTHONPATH, such as one that holds them and PyTorch.
      devices: CUDA_VISIBLE_DEVICES of each server, such as ("0", "1"); empty leaves it unchanged.
      tensor_parallel: devices of one server.
      memory_share: share of a GPU's memory that a server takes, weights and cache together; None on a CPU.
      arguments: further arguments of the command line.
      environment: further environment variables. The servers inherit this process's own except those that hold secrets.
      mps: compute beside the learner on the same GPUs, by CUDA's multi-process service, which is started with the run and ends with it; else the
        processes of a GPU take turns. A service that runs already, as CUDA_MPS_PIPE_DIRECTORY says, is taken as it is.
      ready_s: most seconds until a server answers.
    """

    kind: ClassVar[str]  # as messages name it
    name: ClassVar[str]  # the class, as gin names it
    packages: ClassVar[tuple[str, ...]]  # distributions, one of which a server's Python has
    macro: ClassVar[str]  # how the names of its gin macros begin
    chosen: ClassVar[frozenset[str]]  # options that are chosen here
    probes: ClassVar[tuple[str, ...]]  # routes that answer 200 once the server is ready

    count: int = 1
    python: str | None = None
    python_path: Sequence[str] = ()
    devices: Sequence[str | int] = ()
    tensor_parallel: int = 1
    memory_share: float | None = None
    arguments: Sequence[str | int | float] = ()
    environment: Mapping[str, str | int | float] = field(default_factory=dict)
    mps: bool = False
    ready_s: float = 600.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.tensor_parallel < 1:
            raise ValueError(
                f"LocalServers.count and tensor_parallel must be >= 1 (got {self.count} and {self.tensor_parallel})"
            )
        components.listed(self, "('1',)", "devices")
        components.listed(self, "('FOLDER',)", "python_path")
        components.listed(self, "('--enforce-eager',)", "arguments")
        if {str(argument).partition("=")[0] for argument in self.arguments} & self.chosen:
            raise ValueError(
                f"LocalServers.arguments must leave out {' and '.join(sorted(self.chosen))}, which are chosen here (got {list(self.arguments)}): "
                f"start a server of another address yourself, with {self.macro}_SPAWN = False and its address in {self.macro}_URLS"
            )
        if self.devices and len(self.devices) != self.count:
            raise ValueError(
                f"LocalServers.devices must name the devices of each of {self.count} servers, or of none (got {list(self.devices)})"
            )
        if any(len(str(one).split(",")) < self.tensor_parallel for one in self.devices):
            raise ValueError(
                f"LocalServers.devices must name {self.tensor_parallel} GPUs for each server, as tensor_parallel says, such as ('2,3',) for 2 "
                f"(got {list(self.devices)})"
            )
        if self.memory_share is not None and not 0 < self.memory_share < 1:
            raise ValueError(f"LocalServers.memory_share must be in (0, 1) (got {self.memory_share})")

    @abstractmethod
    def command(self, server: "LocalServer") -> list[str]:
        """Returns the command line of a server; it may write files beside the server's log."""

    def own_environment(self, key: str) -> dict[str, str]:
        """Returns environment variables that servers of this kind need; `key` is the server's API key."""
        return {}

    @property
    def executable(self) -> str:
        return self.python or sys.executable

    def environment_of(self, number: int, key: str = "") -> dict[str, str]:
        """Returns the environment variables of server `number`.

        Beside a GPU a server's PyTorch has one thread: with one for each core of the host, those of several servers wait for one another
        wherever they compute on the CPU (https://github.com/vllm-project/vllm/pull/49919). OMP_NUM_THREADS of this process, or in
        `environment`, counts instead.
        """
        given = [str(Path(folder).expanduser().absolute()) for folder in self.python_path]
        path = [*given, *_SOURCE, *filter(None, [os.environ.get("PYTHONPATH", "")])]
        found = {
            **({"OMP_NUM_THREADS": "1"} if self.devices or xla_flags.gpus() else {}),
            **serving.without_secrets(),
            "PYTHONPATH": os.pathsep.join(path),
            **self.own_environment(key),
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.devices:
            found["CUDA_VISIBLE_DEVICES"] = str(self.devices[number])
        return found | {name: str(value) for name, value in self.environment.items()}

    def release(self) -> tuple[int, int]:
        """Returns the version of the servers that their Python has, (major, minor).

        Raises:
          FileNotFoundError: that Python does not exist, or does not have them.
        """
        try:
            asked = subprocess.run(
                [self.executable, "-c", _VERSION, *self.packages], env=self.environment_of(0), capture_output=True, text=True,
                timeout=60, cwd="/",
            )  # fmt: skip
        except OSError as error:
            raise FileNotFoundError(f"LocalServers.python={self.executable!r} cannot be started: {error}") from error
        if not asked.stdout.strip():
            raise FileNotFoundError(
                f"{self.executable} has no {self.kind} ({asked.stderr.strip()[-200:] or 'no such distribution'}): install it there, or set "
                f"{self.name}.python or python_path"
            )
        major, minor = asked.stdout.split(".")[:2]
        return int(major), int(minor)


def share_gpus(servers: LocalServers) -> None:
    """Starts CUDA's multi-process service (MPS) for this process and those that it starts; called before JAX takes a GPU.

    Args:
      servers: the settings that ask for it, which messages name.

    Raises:
      FileNotFoundError: NVIDIA's driver has no such service here.
      RuntimeError: it does not start; the message holds the end of its log.
    """
    if os.environ.get(_MPS_PIPE):
        return
    service = shutil.which("nvidia-cuda-mps-control")
    if service is None or sys.platform != "linux":
        raise FileNotFoundError(
            f"{servers.name}.mps needs nvidia-cuda-mps-control, which comes with NVIDIA's driver: add its folder to PATH, or set {servers.macro}_MPS = False"
        )
    folder = Path(tempfile.mkdtemp(prefix="jaxrl_llm_mps_"))  # short: a socket's name has at most 107 bytes
    own = {_MPS_PIPE: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    everywhere = {
        k: v for k, v in serving.without_secrets().items() if k != "CUDA_VISIBLE_DEVICES"
    }  # clients choose their GPUs
    with (folder / "output.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOUND, service, "-f"], env=everywhere | own, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.wait)  # called first
    atexit.register(process.terminate)
    limit = time.monotonic() + _MPS_READY_S
    while not (folder / "control").exists():
        if process.poll() is not None or time.monotonic() > limit:
            said = "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.log")))
            raise RuntimeError(
                f"CUDA's multi-process service did not start ({service}), set {servers.macro}_MPS = False: {said}"
            )
        time.sleep(0.05)
    os.environ.update(own)


@dataclass(eq=False, kw_only=True)
class LocalServer:
    """One child process that serves a model on loopback.

    Attributes:
      config: settings by which it is started.
      number: its number among the servers.
      model: folder with config.json and tokenizer.
      log: file of its output.
      arguments: arguments of its command line for the model.
      port: port to listen on at each start; 0 chooses a free one, anew at each start until the server has answered once.
      key: its API key.
    """

    config: LocalServers
    number: int
    model: Path
    log: Path
    arguments: Sequence[str]
    port: int = 0
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    def __post_init__(self) -> None:
        self._choosing = not self.port
        self.port = self.port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0  # bytes of the log before this start

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Starts the process; `ready` waits for it."""
        if self._process is not None:  # processes of an earlier start hold memory, and `stop` would not find them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = self.config.environment_of(self.number, self.key)
        with self.log.open("ab") as out:
            self._begins = out.tell()
            self._process = self._spawn(environment, out)

    def _spawn(self, environment: Mapping[str, str], out: IO[bytes]) -> "subprocess.Popen[bytes]":
        bound = [sys.executable, "-c", _BOUND] if sys.platform == "linux" else []
        return subprocess.Popen(
            [*bound, *self.command], env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            cwd=self.model, start_new_session=True,
        )  # fmt: skip

    async def ready(self) -> None:
        """Returns when the server answers; starts it anew where its port was in use.

        Raises:
          ServerFault: the server ended, or did not answer within the limit; the message holds the end of its log.
        """
        limit, starts = time.monotonic() + self.config.ready_s, 1
        timeout, key = aiohttp.ClientTimeout(total=2.0), {"Authorization": f"Bearer {self.key}"}
        async with aiohttp.ClientSession(timeout=timeout, headers=key) as session:
            while True:
                if self.ended and starts < _STARTS and self._met_a_port_in_use():
                    starts += 1
                    self.port = free_port() if self._choosing else self.port
                    _log.warning("%s met a port in use: started anew, %d of %d", self.log, starts, _STARTS)
                    self.start()
                if self.ended:
                    raise ServerFault(
                        f"the {self.config.kind} server {self.url} ended before it was ready: {self._last_lines()}"
                    )
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                    if all([await self._answers(session, route) for route in self.config.probes]):
                        self._choosing = False
                        return
                if time.monotonic() > limit:
                    raise ServerFault(
                        f"the {self.config.kind} server {self.url} was not ready within {self.config.ready_s:g} s: raise "
                        f"{self.config.name}.ready_s, or look: {self._last_lines()}"
                    )
                await asyncio.sleep(0.2)

    async def _answers(self, session: aiohttp.ClientSession, route: str) -> bool:
        async with session.get(self.url + route) as answer:
            return answer.status == 200

    @property
    def command(self) -> list[str]:
        return self.config.command(self)

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def revive(self) -> None:
        """Restarts the process where it ended, on the same port; raises Unreached where that fails."""
        if self.ended:
            self.start()
            try:
                await self.ready()
            except ServerFault as fault:
                raise Unreached(str(fault)) from fault

    async def stop(self) -> None:
        """Ends the process and its children, by a request, and by force where that takes too long."""
        process = self._process
        if process is None:
            return
        process.terminate()  # not the whole group: a server ends its own parts, and waits forever for one that is gone
        limit = time.monotonic() + _STOP_S
        while process.poll() is None and time.monotonic() < limit:
            await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def _met_a_port_in_use(self) -> bool:
        said = self.log.read_bytes()[self._begins :].decode(errors="replace").lower()
        return any(text in said for text in _PORT_TAKEN)

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return f"{self.log} ends with:\n" + "\n".join(lines[-_LAST_LINES:])


async def all_ready(servers: Sequence[LocalServer]) -> None:
    """Waits until all servers are ready, concurrently; raises the error of the first that failed."""
    try:
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(server.ready())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


_chosen: set[int] = set()  # ports that `free_port` has returned


def free_port() -> int:
    """Returns a port of loopback on which nothing listens, a different one at each call, since a server may share it with another."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _chosen:
            _chosen.add(port)
            return port
