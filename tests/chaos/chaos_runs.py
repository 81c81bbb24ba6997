"""Learners and reward processes that are killed, and a micro-batch that does not fit."""

import asyncio
import os
import random
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import tiny_run
import too_large
from chaos_table import Row, Stopwatch, Trial

from jaxrl_llm.algorithms.batch import Advantages, Sequences
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.rewards.services.pool import Pool
from jaxrl_llm.rewards.wrap import judge_together


def learner_killed(trial: Trial) -> Row:
    """A whole run, killed at a random moment of its time and begun again by the same command until it ends: the same metrics."""
    rng, row, watch = random.Random(trial.seed), Row(tried=0, outcome=""), Stopwatch()
    whole = trial.folder / "whole"
    done = tiny_run.launch(whole)
    assert done.returncode == 0, done.stderr
    seconds, moments = watch.seconds, []
    for number in range(trial.times):
        run = trial.folder / f"killed{number}"
        process = subprocess.Popen(
            tiny_run.command(run),
            cwd=tiny_run.ROOT,
            env=tiny_run.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        moment = rng.uniform(0.3, 1.0) * seconds
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        moments.append(f"{moment:.1f} s")
        watch = Stopwatch()
        done = tiny_run.launch(run)
        assert done.returncode == 0, done.stderr
        row.recovered_s.append(watch.seconds)
        assert tiny_run.rows(run) == tiny_run.rows(whole), f"seed {trial.seed}, killed after {moment:.2f} s"
        row.tried += 1
        row.into += len(tiny_run.rows(whole))
        row.out += len(tiny_run.rows(run))
    row.outcome = (
        f"killed after {', '.join(moments)} of {seconds:.0f} s; the metrics of the undisturbed run, bit for bit"
    )
    return row


def children() -> list[int]:
    """Processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def reward_worker_killed(trial: Trial) -> Row:
    """Calls of a killed process are invalid and counted, the others keep their values, and the next batch is whole."""
    rng, row = random.Random(trial.seed), Row(tried=0, outcome="", recovered_s=[])
    before = set(children())
    pool = Pool(workers=2, limit_s=20.0)
    invalid = 0

    async def batch(kill: bool) -> int:
        asked = [(i, 0.01) for i in range(24)]
        judging = asyncio.create_task(
            judge_together("r", [pool.call("slow_words", "letters_of", *each) for each in asked])
        )
        if kill:
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            workers = sorted(set(children()) - before)
            if workers:
                os.kill(rng.choice(workers), signal.SIGKILL)
                row.tried += 1
        scores = await judging
        value, valid = np.asarray(scores.parts["r"]), np.asarray(scores.valid["r"], bool)
        np.testing.assert_array_equal(value[valid], np.arange(24)[valid])
        row.into += 24
        row.out += len(valid)
        return int(np.sum(~valid))

    try:
        asyncio.run(batch(False))
        for _ in range(trial.times):
            invalid += asyncio.run(batch(True))
            watch = Stopwatch()
            assert asyncio.run(batch(False)) == 0
            row.recovered_s.append(watch.seconds)
    finally:
        pool.close()
    assert invalid <= row.tried
    row.outcome = f"{invalid} calls counted as invalid, the others right; a new process for the next call"
    return row


def out_of_memory(trial: Trial) -> Row:
    """XLA's RESOURCE_EXHAUSTED in an update becomes one error that names the bindings to lower."""
    for _ in range(trial.times):
        run, batch = too_large.stage()
        try:
            asyncio.run(run.update(Mock(spec=TrainState), batch, Mock(spec=Sequences), Mock(spec=Advantages), 1))
            raise AssertionError("it fits")
        except MemoryError as error:
            assert all(
                name in str(error) for name in ("ROWS", "ROW_TOKENS", "remat", "now 16 rows of 2048 positions")
            ), error
    return Row(tried=trial.times, outcome="one error: lower ROWS, ROW_TOKENS; remat = 'full'; fsdp; offload")
