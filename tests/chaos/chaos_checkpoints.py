"""Checkpoints and published weights under flipped bits, full disks, deleted folders and learners that are killed while they save."""

import asyncio
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chaos_table import Row, Stopwatch, Trial
from sampler_cases import SIZES

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_format
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import BadVersion, read_version
from jaxrl_llm.samplers.servers.publisher import Publisher
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints

SAVER = Path(__file__).with_name("saving.py")


def tree(step: int) -> dict[str, Any]:
    """What a learner might hold after `step` steps."""
    rng = np.random.default_rng(step)
    return {
        "state": {"w": jax.numpy.asarray(rng.normal(size=(64, 48)).astype(np.float32)), "step": jax.numpy.int32(step)}
    }


def host(step: int) -> dict[str, Any]:
    return {"stage": 0, "step": step, "best": step / 7, "feed": {"position": 32 * step}}


def latest(folder: Path) -> int | None:
    """The step of the last whole checkpoint, after comparing all it holds with what was saved; ValueError for a damaged one."""
    checkpoints = Checkpoints(folder, Checkpointing())
    try:
        step = checkpoints.latest()
        if step is None:
            return None
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree(step))
        found, said = checkpoints.restore(step, abstract), checkpoints.host(step)
        jax.tree.map(np.testing.assert_array_equal, found, tree(step))
        assert said == host(step)
        return step
    finally:
        checkpoints.close()


def save(folder: Path, *steps: int) -> None:
    checkpoints = Checkpoints(folder, Checkpointing())
    try:
        for step in steps:
            checkpoints.save(step, tree(step), host(step))
            checkpoints.wait()
    finally:
        checkpoints.close()


def flipped_bits(trial: Trial) -> Row:
    """One bit of one file at a time, the files of each kind in turn."""
    rng, said = random.Random(trial.seed), Counter[str]()
    save(trial.folder, 1, 2)
    root = trial.folder / "checkpoints" / "2"
    files = [f for f in sorted(root.rglob("*")) if f.is_file()]
    row = Row(tried=trial.times, outcome="", into=trial.times)
    for number in range(trial.times):
        file = files[number % len(files)]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            said["harmless" if latest(trial.folder) == 2 else "passed over"] += 1
        except ValueError as error:
            assert "go on from step 1" in str(error), error
            said["refused, and told which folder to move away"] += 1
        row.out += 1
        file.write_bytes(content)
    watch = Stopwatch()
    shutil.move(root, trial.folder / "damaged")
    assert latest(trial.folder) == 1
    row.recovered_s.append(watch.seconds)
    row.outcome = (
        f"{len(files)} kinds of files: " + ", ".join(f"{n} {kind}" for kind, n in said.items()) + "; never wrong values"
    )
    return row


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `most` bytes: writes fail in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def disk_full(trial: Trial) -> Row:
    """A save fails with what to do, leaves no checkpoint that looks whole, and the next one works."""
    rng, row = (
        random.Random(trial.seed),
        Row(tried=trial.times, outcome="a clear error, the last whole checkpoint kept"),
    )
    save(trial.folder, 1)
    for number in range(trial.times):
        good, bad = 1 + 2 * number, 2 + 2 * number
        with full_disk(rng.randrange(0, 8_000)):
            try:
                save(trial.folder, bad)
                raise AssertionError("a disk without room took a checkpoint")
            except OSError as error:
                assert "could not be written" in str(error) and "RUN_DIR" in str(error), error
        assert latest(trial.folder) == good
        watch = Stopwatch()
        save(trial.folder, good + 2)
        assert latest(trial.folder) == good + 2
        row.recovered_s.append(watch.seconds)
    return row


def killed_while_saving(trial: Trial) -> Row:
    """A process that saves one step after another, killed at random times, begun again by the same command."""
    rng, row, done = random.Random(trial.seed), Row(tried=0, outcome=""), 0
    folder, errors, torn = trial.folder / "run", trial.folder / "errors.txt", 0
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for _ in range(trial.times):
        watch = Stopwatch()
        process = subprocess.Popen(
            [sys.executable, str(SAVER), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors.open("ab"),
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("from "), errors.read_text()
        assert int(first.split()[1]) == done, "it goes on from the last whole checkpoint"
        row.recovered_s.append(watch.seconds)
        lines = [process.stdout.readline() for _ in range(rng.randrange(1, 6))]  # "saving 1", "saved 1", "saving 2" ...
        moment = rng.uniform(0.0, 0.2)
        time.sleep(moment)
        process.kill()
        printed = "".join(lines) + process.stdout.read()
        process.wait()
        saving, saved = printed.count("saving"), printed.count("saved")
        found = latest(folder) or 0
        assert found <= done + saving, "nothing is there that was not begun"
        row.tried, row.into, row.out = row.tried + 1, row.into + saved, row.out + min(found - done, saved)
        torn += saving > found - done
        done = found
    row.outcome = (
        f"{done} checkpoints whole, none lost that was said to be saved; {torn} saves cut off, none taken for whole"
    )
    return row


@cache
def policy() -> tuple[Policy, dict[str, Any]]:
    one = Policy(SIZES, Partitioner.create(MeshConfig(), jax.devices()[:1]), "float32")
    return one, one.init(jax.random.key(0))


def folder_deleted(trial: Trial) -> Row:
    """The folder of published weights vanishes at a random moment: an error that names it, never weights that are not the version's."""
    rng, said, row = random.Random(trial.seed), Counter[str](), Row(tried=trial.times, outcome="")
    model, first = policy()
    folder = trial.folder / "publication"
    publisher = Publisher(
        policy=model,
        folder=folder,
        dtype="float32",
        keep=2,
        canary=np.zeros(0, np.int32),
    )

    def params(version: int) -> dict[str, Any]:
        return jax.tree.map(lambda x: x + version, first)

    def check(version: int) -> None:
        want = {name: np.asarray(x) for name, x in hf_format.export(params(version)).items()}
        targets = {n: Target(shape=x.shape, box=whole_box(x.shape)) for n, x in want.items()}
        staged = read_version(publisher.place(version), version, targets)
        for name, x in want.items():
            np.testing.assert_array_equal(staged.parts[name], x)

    async def publish(version: int, moment: int) -> None:
        if moment == 0:
            shutil.rmtree(folder, ignore_errors=True)
        publisher.start(params(version), version)
        if moment == 1:
            await asyncio.sleep(rng.uniform(0, 0.02))
            shutil.rmtree(folder, ignore_errors=True)
        await publisher.finish(version)
        if moment == 2:
            shutil.rmtree(folder, ignore_errors=True)
        check(version)
        await publisher.prune()

    for number in range(trial.times):
        broken, whole = 2 * number, 2 * number + 1
        try:
            asyncio.run(publish(broken, rng.randrange(3)))
            said["whole all the same"] += 1
        except BadVersion:
            said["refused by the sampler"] += 1
        except OSError as error:
            assert str(folder) in str(error) and "VllmSampler.publication" in str(error), error
            said["refused by the learner"] += 1
        watch = Stopwatch()
        asyncio.run(publish(whole, 3))
        row.recovered_s.append(watch.seconds)
    publisher.close(remove=True)
    row.outcome = ", ".join(f"{n} {kind}" for kind, n in said.items()) + "; the next version whole each time"
    return row
