"""Whole runs that lose what they stand on for good: all samplers, a reward service, a judge, the disk. Exit 75, and on by the same command."""

import asyncio
import json
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import tiny_run
from aiohttp import web
from chaos_folders import SLOW, SLOWLY, doing
from chaos_table import Row, Stopwatch, Trial
from fake_vllm import FakeVllm

from jaxrl_llm.distributed.preemption import STOPPED

QUICK = {"tries": 2, "backoff_s": 0.1, "limit_s": 5.0, "stop_after": 1}
RARELY: dict[str, object] = {**SLOW, "SAVE_EVERY": 100}  # what is saved is saved by the end


class Prop(Protocol):
    """What a run stands on.

    Attributes:
      gin_files: that follow the tiny run's.
      bindings: of the run.
      says: what the line that ends the run holds.
      kept: what is on disk when it has ended, in words.
    """

    gin_files: tuple[str, ...]
    bindings: Mapping[str, object]
    says: str
    kept: str

    def fall(self, process: subprocess.Popen[str], rng: random.Random) -> str:
        """Takes it away from a run; says how."""
        ...

    def rise(self) -> None:
        """Gives it back."""
        ...

    def close(self) -> None: ...


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


class Fleet:
    """Two servers that play vLLM; all fail at once: killed, unable to load, or unable to read."""

    gin_files = ("gin/samplers/vllm.gin",)
    says = "what was learned is not lost"
    kept = "everything learned saved"

    def __init__(self) -> None:
        self._back = Background()
        self.servers = [self._back.do(FakeVllm(step_s=0.01).start()) for _ in range(2)]
        self.bindings = RARELY | {
            "VLLM_SPAWN": False, "VLLM_URLS": tuple(server.url for server in self.servers), "VLLM_DTYPE": "'float32'",
            "rl/train.Stage.gap_stop": 100.0, "rl/train.Stage.gap_warn": 100.0,  # tokens are the toy's, not the policy's
        }  # fmt: skip
        quick = {"canary": "''", "wait_s": 1.5, "control_s": 1.0, "update_s": 3.0, "request_s": 5.0, "tries": 20}
        self.bindings |= {f"vllm.VllmSampler.{name}": value for name, value in quick.items()}

    def fall(self, process: subprocess.Popen[str], rng: random.Random) -> str:
        how = rng.choice(("killed", "commit_error", "stage_error"))
        for server in self.servers:
            if how == "killed":
                self._back.do(server.kill())
            else:
                setattr(server, how, "out of memory")
        return how

    def rise(self) -> None:
        for server in self.servers:
            server.commit_error = server.stage_error = ""
            if server.runner is None:
                self._back.do(server.start())

    def close(self) -> None:
        for server in self.servers:
            self._back.do(server.kill())
        self._back.close()


class Served:
    """A service that scores texts, of a reward or of a judge."""

    says = "calls failed; last:"
    kept = "everything learned saved"

    def __init__(self, gin_file: str, scope: str, path: str, answer: Callable[[Any], Any]) -> None:
        self._back, self._answer, self._path, self._port = Background(), answer, path, 0
        self._runner: web.AppRunner | None = None
        self._back.do(self._start())
        self.gin_files = (gin_file,)
        fields = QUICK | {"urls": (f"http://127.0.0.1:{self._port}",)}
        self.bindings = RARELY | {f"{scope}/service.Service.{name}": value for name, value in fields.items()}
        self.bindings["evaluate.Evaluation.reward"] = "%REWARD"

    async def _start(self) -> None:
        async def answer(request: web.Request) -> web.Response:
            await asyncio.sleep(0.02)
            return web.json_response(self._answer(await request.json()))

        app = web.Application()
        app.router.add_post(self._path, answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    def fall(self, process: subprocess.Popen[str], rng: random.Random) -> str:
        assert self._runner is not None
        self._back.do(self._runner.cleanup())
        self._runner = None
        return "gone"

    def rise(self) -> None:
        if self._runner is None:
            self._back.do(self._start())

    def close(self) -> None:
        if self._runner is not None:
            self._back.do(self._runner.cleanup())
        self._back.close()


def share(text: str) -> float:
    return sum(c in "abcde" for c in text) / max(len(text), 1)


def reward_service() -> Served:
    return Served(
        "gin/rewards/classifier.gin", "classifier", "/score",
        lambda body: {"scores": [share(str(text)) for text in body["texts"]]},
    )  # fmt: skip


def judge() -> Served:
    def rated(body: Any) -> Any:
        text = body["messages"][-1]["content"].rpartition("[Response]\n")[2]
        answer = f"RATING: {1 + round(9 * share(text))}\nEXPLANATION: its letters"
        return {"choices": [{"message": {"content": answer}}]}

    return Served("gin/rewards/judge.gin", "judge", "/v1/chat/completions", rated)


class Disk:
    """A disk that fills: no file of the run grows beyond some size any more."""

    gin_files = ()
    bindings: Mapping[str, object] = {**SLOW, "SAVE_EVERY": 1}
    says = "free s"  # of what is full: "free space", "free some space"
    kept = "the checkpoints from before whole"

    def fall(self, process: subprocess.Popen[str], rng: random.Random) -> str:
        most = rng.randrange(0, 8_000)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return f"full at {most} bytes"

    def rise(self) -> None:
        pass

    def close(self) -> None:
        pass


def command(prop: Prop, run_dir: Path) -> list[str]:
    return [*tiny_run.command(run_dir, **prop.bindings), *(f"--gin_file={file}" for file in prop.gin_files)]


@contextmanager
def started(prop: Prop, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(prop, run_dir), cwd=tiny_run.ROOT, env=tiny_run.environment() | SLOWLY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Metrics, without the times of publications."""
    return [{n: v for n, v in row.items() if not n.startswith("publish/")} for row in tiny_run.rows(run_dir)]


def last_saved(run_dir: Path) -> int:
    return max((int(p.name) for p in (run_dir / "checkpoints").glob("*") if p.name.isdigit()), default=0)


def outage(make: Callable[[], Prop]) -> Callable[[Trial], Row]:
    def fault(trial: Trial) -> Row:
        """It falls at a random moment: 75 and one line; everything learned is saved; the same command ends with the undisturbed metrics."""
        rng, row, hows = random.Random(trial.seed), Row(tried=0, outcome=""), list[str]()
        prop = make()
        try:
            whole = trial.folder / "whole"
            ended(prop, whole)
            for number in range(trial.times):
                run_dir = trial.folder / f"run{number}"
                hows.append(fallen(prop, run_dir, rng))
                prop.rise()
                watch = Stopwatch()
                ended(prop, run_dir)
                row.recovered_s.append(watch.seconds)
                assert rows(run_dir) == rows(whole), f"{hows[-1]}: other metrics than the undisturbed run's"
                row.tried, row.into, row.out = row.tried + 1, row.into + len(rows(whole)), row.out + len(rows(run_dir))
        finally:
            prop.close()
        counted = ", ".join(f"{how} {hows.count(how)}" for how in sorted(set(hows))) if len(set(hows)) < 4 else ""
        row.outcome = f"{counted or f'{len(hows)} times'}: exit 75 with one line, {prop.kept}, the undisturbed metrics bit for bit"
        return row

    return fault


def ended(prop: Prop, run_dir: Path) -> None:
    """Runs the command to its end."""
    with started(prop, run_dir) as process:
        said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-1500:]
    assert last_saved(run_dir) == 5, said[-500:]


def torn(run_dir: Path) -> list[str]:
    """The files of a run folder that hold a torn line, or torn JSON."""

    def whole(file: Path) -> bool:
        *lines, rest = file.read_bytes().split(b"\n") if file.suffix == ".jsonl" else (file.read_bytes(), b"")
        try:
            return not rest and all(isinstance(json.loads(line), dict) for line in lines)
        except ValueError:
            return False

    return [file.name for file in sorted(run_dir.glob("*.json*")) if not whole(file)]


def fallen(prop: Prop, run_dir: Path, rng: random.Random) -> str:
    """Takes away what a run stands on after it has learned something, and looks at how it ends; says how it was taken."""
    wanted, delay = rng.randint(2, 4), rng.uniform(0, 0.4)
    with started(prop, run_dir) as process:
        deadline = time.monotonic() + 120
        while doing(run_dir, process)[1] < wanted and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay)
        how = prop.fall(process, rng)
        said, error = process.communicate(timeout=300)
    assert process.returncode == STOPPED, f"{how}: exit {process.returncode}: {said[-300:]} {error[-1500:]}"
    lines = [line for line in said.splitlines() if line.startswith("stopped")]
    assert len(lines) == 1 and prop.says in lines[0] and lines[0].endswith("the same command goes on"), said[-1500:]
    assert not torn(run_dir), f"{how}: torn: {torn(run_dir)}"
    written = max((row["step"] for row in tiny_run.rows(run_dir)), default=0)
    assert isinstance(prop, Disk) or last_saved(run_dir) >= written, f"{how}: step {written} is learned and not saved"
    return how
