"""A whole run by its command with servers that play SGLang: rollouts of the versions that it publishes, an evaluation, a second start."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run

from jaxrl_llm.samplers.servers.local_server import free_port

FAKE = tiny_run.ROOT / "tests" / "samplers" / "fake_sglang.py"


@contextlib.contextmanager
def serving(count: int) -> Iterator[list[str]]:
    """Yields addresses of servers in processes of their own."""
    ports = [free_port() for _ in range(count)]
    environment = {**os.environ, "PYTHONPATH": str(tiny_run.ROOT)}
    processes = [subprocess.Popen([sys.executable, str(FAKE), "--port", str(p)], env=environment) for p in ports]
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_samples_from_servers_that_read_its_folders(tmp_path: Path, staleness: int) -> None:
    with serving(2) as urls:
        bindings = {
            **tiny_run.RL_ALONE, "SGLANG_SPAWN": False, "SGLANG_URLS": tuple(urls), "MAX_STALENESS": staleness, "STEPS": 4,
            "sglang.SglangSampler.canary": "''",  # tokens are the toy's, not the policy's
            "rl/train.Stage.gap_stop": 100.0, "rl/train.Stage.gap_warn": 100.0,
        }  # fmt: skip
        gin = tmp_path / "tiny_sglang.gin"
        gin.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/samplers/sglang.gin'\n")
        done = tiny_run.launch(tmp_path / "run", str(gin), **bindings)
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if row["step"]]
        assert [row["step"] for row in steps] == [1, 2, 3, 4]
        assert all(row["sampler/generated_tokens"] > 0 and row["sampler/servers"] == 2 for row in steps)
        assert all(row["sampler/retries"] == row["sampler/set_aside"] == 0 for row in steps)
        assert all(row["publish/total_s"] > 0 for row in steps[1:]) and "eval/heldout/greedy" in rows[-1]
        if staleness:
            assert max(row["staleness/mean"] for row in steps) > 0
        published = [
            json.loads(p.read_text())["version"] for p in (tmp_path / "run").glob("publication/*/manifest.json")
        ]
        assert 1 <= len(published) <= 2 and max(published) >= 3, "the two newest are kept"
        again = tiny_run.launch(tmp_path / "run", str(gin), **{**bindings, "STEPS": 5})
        assert again.returncode == 0, again.stderr[-3000:]
        assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5
