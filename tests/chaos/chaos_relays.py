"""Relays of a chain that die, hang, lie or hold damaged weights: every other host has what the learner wrote."""

import asyncio
import random
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from chaos_table import Row, Stopwatch, Trial
from relay_site import Process, address, contents, ended, free_port, written

from jaxrl_llm.publication.object_store import BLOCK_BYTES, MARKER
from jaxrl_llm.publication.relays.version import Announcement

HOSTS = (2, 3, 4, 5)
OBJECTS = {str(i): BLOCK_BYTES + 1000 * i for i in range(6)}
KINDS = ("killed", "hung", "lied")


def same(folder: str | Path, objects: dict[str, bytes]) -> None:
    assert (Path(folder) / MARKER).exists()
    for key, content in objects.items():
        assert (Path(folder) / key).read_bytes() == content, f"{folder}/{key} is not what was written"


def before(chain: list[Process], relay: Process) -> tuple[str, ...]:
    """The relays that one may ask, the nearest first."""
    return tuple(one.url for one in reversed(chain[: chain.index(relay)]))


def damage(relay: Process, said: Announcement, objects: dict[str, bytes], rng: random.Random) -> None:
    """One bit of each object that a relay holds."""
    for key, content in objects.items():
        wrong = bytearray(content)
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        (relay.folder / said.id / key).write_bytes(wrong)


async def passed_on(
    chain: list[Process], said: Announcement, objects: dict[str, bytes], kind: str, rng: random.Random
) -> tuple[Process, Counter[str]]:
    """A version goes through the chain while one relay is struck; returns that one, and whom the others by-passed for what."""
    struck = rng.choice(chain)
    others = [one for one in chain if one is not struck]
    if kind == "lied":
        assert (await ended(struck.url, replace(said, before=before(chain, struck))))["state"] == "whole"
        damage(struck, said, objects, rng)
    waits = [asyncio.create_task(ended(one.url, replace(said, before=before(chain, one)))) for one in others]
    if kind != "lied":
        await asyncio.sleep(rng.uniform(0, 0.3))
        struck.child.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
    causes: Counter[str] = Counter()
    for one, found in zip(others, await asyncio.gather(*waits), strict=True):
        assert found["state"] == "whole", found
        assert set(found["bypassed"]) <= {struck.url}, found["bypassed"]
        causes.update(found["bypassed"].values())
        await asyncio.to_thread(same, one.folder / said.id, objects)
    return struck, causes


async def mended(
    chain: list[Process], struck: Process, said: Announcement, objects: dict[str, bytes], kind: str
) -> None:
    """The struck relay goes on or begins again, and has the next announcement's version whole."""
    if kind == "killed":
        chain[chain.index(struck)] = await asyncio.to_thread(struck.again)
        struck = next(one for one in chain if one.url == struck.url)
    elif kind == "hung":
        struck.child.send_signal(signal.SIGCONT)
    found = await ended(struck.url, replace(said, before=before(chain, struck)))
    assert found["state"] == "whole", found
    await asyncio.to_thread(same, struck.folder / said.id, objects)


def broken_chain(trial: Trial) -> Row:
    """A version a time goes through a chain of four, of which one is killed, stopped or made to lie."""
    rng, port, row, causes = random.Random(trial.seed), free_port(), Row(tried=0, outcome=""), Counter[str]()
    chain = [Process(trial.folder / f"host{i}", i, port) for i in HOSTS]
    kinds: Counter[str] = Counter()
    try:
        for one in chain:
            one.ready()
        for version in range(trial.times):
            objects, kind = contents(OBJECTS, rng.randrange(1 << 30)), KINDS[version % len(KINDS)]
            said = written(address(trial.folder / "learner"), 2 * version + 1, objects)
            struck, found = asyncio.run(passed_on(chain, said, objects, kind, rng))
            causes.update(found)
            kinds[kind] += 1
            row.tried, row.into, row.out = row.tried + 1, row.into + len(chain) - 1, row.out + len(chain) - 1
            watch = Stopwatch()
            # A relay believes the version that it has: one that lied is told of the same weights under the next number.
            again = said if kind != "lied" else written(address(trial.folder / "learner"), 2 * version + 2, objects)
            asyncio.run(mended(chain, struck, again, objects, kind))
            row.recovered_s.append(watch.seconds)
            shutil.rmtree(trial.folder / "learner")
    finally:
        for one in chain:
            one.end()
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    row.outcome = f"{told}: every other host has the version, byte for byte; by-passed {causes.total()} times"
    return row


async def after_damage(
    chain: list[Process],
    said: tuple[Announcement, Announcement],
    versions: tuple[dict[str, bytes], dict[str, bytes]],
    rng: random.Random,
) -> float:
    """Two versions go through the chain, a relay's copy of the first is damaged in between; returns the seconds of the second."""
    struck, last = rng.choice(chain), chain[-1]
    assert (await ended(last.url, replace(said[0], before=before(chain, last))))["state"] == "whole"
    await asyncio.to_thread(damage, struck, said[0], versions[0], rng)
    watch = Stopwatch()
    for one, found in zip(
        chain,
        await asyncio.gather(*(ended(one.url, replace(said[1], before=before(chain, one))) for one in chain)),
        strict=True,
    ):
        assert found["state"] == "whole" and not found["bypassed"], found
        assert found["kept"] > 0, "most blocks are those of the version before"
        await asyncio.to_thread(same, one.folder / said[1].id, versions[1])
    return watch.seconds


def damaged_before(trial: Trial) -> Row:
    """A version goes through a chain of four after one of them has had a bit of each object of the version before flipped."""
    rng, port, row = random.Random(trial.seed), free_port(), Row(tried=0, outcome="")
    chain = [Process(trial.folder / f"host{i}", i, port) for i in HOSTS]
    learner = address(trial.folder / "learner")
    try:
        for one in chain:
            one.ready()
        for version in range(trial.times):
            first = contents(OBJECTS, rng.randrange(1 << 30))
            second = first | contents({"0": OBJECTS["0"]}, rng.randrange(1 << 30))
            said = written(learner, 2 * version + 1, first), written(learner, 2 * version + 2, second)
            row.recovered_s.append(asyncio.run(after_damage(chain, said, (first, second), rng)))
            row.tried, row.into, row.out = row.tried + 1, row.into + len(chain), row.out + len(chain)
            shutil.rmtree(trial.folder / "learner")
    finally:
        for one in chain:
            one.end()
    row.outcome = "every host has the next version, byte for byte: it fetches what is damaged, and by-passes none"
    return row
