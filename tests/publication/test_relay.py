"""Weights that sampler hosts pass on to each other: whatever a relay does, the next one has what the learner wrote, or says that it has not."""

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from relay_site import (
    QUICK,
    TOKEN,
    Process,
    address,
    beside,
    changed,
    contents,
    ended,
    free_port,
    relay,
    same,
    serving,
    status,
    written,
)

from jaxrl_llm.publication.object_store import BLOCK_BYTES, BLOCKS
from jaxrl_llm.publication.relays import blocks
from jaxrl_llm.publication.relays.server import Relay
from jaxrl_llm.publication.relays.version import Announcement, Patience, RelayedVersion

SIZES = {"a/c/0/0": 2 * BLOCK_BYTES + 3, "a/zarr.json": 200, "b/c/0": BLOCK_BYTES, "empty": 0}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Two relays in processes of their own, at the same port of two addresses."""
    port, folder = free_port(), tmp_path_factory.mktemp("relays")
    found = [Process(folder / str(i), i, port) for i in (2, 3)]
    try:
        yield [one.ready() for one in found]
    finally:
        for one in found:
            one.end()


def test_a_chain_reads_the_source_once_and_each_relay_tells_the_one_before_it(two, tmp_path):
    """The last of three alone is told; the bytes that each gets are those of all objects and of their list."""
    objects = contents(SIZES, 1)
    said = written(address(tmp_path / "of the learner"), 1, objects)
    every = sum(map(len, objects.values())) + (tmp_path / "of the learner/v00000001" / BLOCKS).stat().st_size
    first, second = two

    async def run() -> None:
        async with beside(relay(tmp_path)) as last:
            found = await ended(last, replace(said, before=(second.url, first.url)))
            assert (found["state"], found["bytes"], found["bypassed"]) == ("whole", {second.url: every}, {})
            same(found["path"], objects)
        assert (await status(second.url, said.id))["bytes"] == {first.url: every}
        assert (await status(first.url, said.id))["bytes"] == {"source": every}
        same(first.folder / said.id, objects)

    asyncio.run(run())
    assert not (tmp_path / "relay" / said.id).exists(), "a relay that ends leaves nothing"


def test_a_relay_that_hangs_is_by_passed_for_the_one_before_it(two, tmp_path):
    objects, (first, second) = contents(SIZES, 2), two
    said = written(address(tmp_path / "l"), 2, objects)

    async def run() -> None:
        for one in two:
            assert (await ended(one.url, said))["state"] == "whole"
        second.child.send_signal(signal.SIGSTOP)
        try:
            async with beside(relay(tmp_path)) as last:
                begin = time.monotonic()
                found = await ended(last, replace(said, before=(second.url, first.url)))
                assert time.monotonic() - begin < 2 * QUICK.silent_s, "all requests found it silent at the same time"
                assert found["bypassed"] == {second.url: "it hangs, or is slow"}
                assert found["bytes"].keys() == {first.url}
                same(found["path"], objects)
        finally:
            second.child.send_signal(signal.SIGCONT)

    asyncio.run(run())


def test_wrong_bytes_of_a_relay_are_never_kept(two, tmp_path, caplog):
    objects, (first, second) = contents(SIZES, 3), two
    said = written(address(tmp_path / "l"), 3, objects)

    async def run() -> None:
        assert (await ended(second.url, said))["state"] == "whole"
        damaged = second.folder / said.id / "weights/a/c/0/0"
        content = bytearray(damaged.read_bytes())
        content[BLOCK_BYTES + 5] ^= 1
        damaged.write_bytes(content)
        async with beside(relay(tmp_path)) as last:
            found = await ended(last, replace(said, before=(second.url, first.url)))
            assert found["state"] == "whole" and found["bypassed"] == {second.url: "it sent wrong bytes"}
            same(found["path"], objects)

    asyncio.run(run())
    assert sum("is by-passed" in line for line in caplog.messages) == 1, (
        "it is said once, though several blocks are asked for"
    )


def test_a_relay_that_is_killed_in_the_middle_is_by_passed(tmp_path, monkeypatch):
    """It is killed when the relay that asks it writes the second of its 16 blocks."""
    objects = contents({str(i): 2 * BLOCK_BYTES for i in range(8)}, 4)
    said = written(address(tmp_path / "l"), 4, objects)
    doomed, written_blocks, write = (
        Process(tmp_path / "doomed", 4, free_port()).ready(),
        itertools.count(1),
        blocks.Block.write,
    )

    def killing(block: blocks.Block, folder: Path, content: bytes) -> None:
        if next(written_blocks) == 2:
            doomed.end()
        write(block, folder, content)

    async def run() -> None:
        assert (await ended(doomed.url, said))["state"] == "whole"
        monkeypatch.setattr(blocks.Block, "write", killing)
        async with beside(relay(tmp_path)) as last:
            found = await ended(last, replace(said, before=(doomed.url,)))
            assert found["state"] == "whole" and "it is not reached" in found["bypassed"][doomed.url]
            assert found["bytes"].keys() == {doomed.url, "source"}, "it was killed in the middle"
            same(found["path"], objects)

    try:
        asyncio.run(run())
    finally:
        doomed.end()


def test_a_slow_relay_and_one_that_never_has_a_block_are_by_passed(tmp_path):
    objects = contents(SIZES, 5)
    said = written(address(tmp_path / "l"), 5, objects)

    async def drips(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(100):
            await answer.write(b"x")
            await asyncio.sleep(0.05)
        return answer

    async def later(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response(status=202)

    async def run() -> None:
        slow, never = web.Application(), web.Application()
        slow.router.add_get("/{id}/{name}", drips)
        never.router.add_get("/{id}/{name}", later)
        patience = Patience(silent_s=2.0, least_rate=1e8, block_s=0.5)
        async with serving(slow) as one, serving(never) as other, beside(relay(tmp_path, patience=patience)) as last:
            found = await ended(last, replace(said, before=(one, other)))
            assert found["bypassed"] == {one: "it hangs, or is slow", other: "it has not had a block for 0.5 s"}
            assert found["state"] == "whole" and found["bytes"].keys() == {"source"}
            same(found["path"], objects)

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["a bit", "a file", "the list"])
def test_a_version_whose_source_is_damaged_is_refused_and_never_whole(tmp_path, wrong):
    """Once the learner has written it again, the same announcement begins anew."""
    objects = contents(SIZES, 6)
    said = written(address(tmp_path / "l"), 6, objects)
    place = tmp_path / "l/v00000006" / (BLOCKS if wrong == "the list" else "weights/b/c/0")
    was = place.read_bytes()
    place.unlink() if wrong == "a file" else place.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))

    async def run() -> None:
        async with beside(relay(tmp_path)) as last:
            found = await ended(last, said)
            assert found["state"] == "failed" and "version 6 is not relayed" in found["error"], found
            assert not list((tmp_path / "relay").rglob("_CHECKPOINT_METADATA"))
            place.write_bytes(was)
            found = await ended(last, said)
            assert found["state"] == "whole"
            same(found["path"], objects)

    asyncio.run(run())


def listed(tmp_path: Path, version: int) -> int:
    """The bytes of the list of a version's blocks."""
    return (tmp_path / f"l/v{version:08d}" / BLOCKS).stat().st_size


def test_of_the_next_version_only_changed_blocks_pass_through_the_chain(two, tmp_path):
    """A block of the first object and the one after it change: a relay that has the version before gets these, a new one gets all."""
    objects, (first, second) = contents(SIZES, 21), two
    after = changed(changed(objects, "weights/a/c/0/0", BLOCK_BYTES + 7), "weights/a/zarr.json", 0)
    said = written(address(tmp_path / "l"), 21, objects), written(address(tmp_path / "l"), 22, after)
    few, kept = BLOCK_BYTES + 200 + listed(tmp_path, 22), BLOCK_BYTES + 3 + BLOCK_BYTES

    async def run() -> None:
        async with beside(relay(tmp_path)) as last, beside(Relay(folder=tmp_path / "new", token=TOKEN)) as new:
            for announced, content in zip(said, (objects, after), strict=True):
                found = await ended(last, replace(announced, before=(second.url, first.url)))
                assert found["state"] == "whole"
                for folder in (first.folder / announced.id, second.folder / announced.id, found["path"]):
                    same(folder, content)
            assert (found["bytes"], found["kept"]) == ({second.url: few}, kept)
            for one, sender in ((second, first.url), (first, "source")):
                there = await status(one.url, said[1].id)
                assert (there["bytes"], there["kept"], there["bypassed"]) == ({sender: few}, kept, {})
            fresh = await ended(new, replace(said[1], before=(second.url, first.url)))
            assert (fresh["bytes"], fresh["kept"]) == ({second.url: few + kept}, 0)
            same(fresh["path"], after)
            same(tmp_path / "relay" / said[0].id, objects)

    asyncio.run(run())


def test_a_changed_block_is_fetched_before_unchanged_ones_before_it_are_copied(tmp_path, monkeypatch):
    """Of thirteen objects the last has changed, and no other is copied until it is asked for."""
    objects = contents({chr(ord("a") + i): 100 for i in range(13)}, 29)
    said = written(address(tmp_path / "l"), 29, objects)
    after = changed(objects, "weights/m", 5)
    asked, block, keeps = asyncio.Event(), blocks.Source.block, RelayedVersion._keeps

    async def noted(source: blocks.Source, one: blocks.Block) -> bytes:
        asked.set()
        return await block(source, one)

    async def late(version: RelayedVersion, one: blocks.Block) -> bool:
        if version.earlier is not None and one in version.earlier.blocks:
            await asyncio.wait_for(asked.wait(), 10)
        return await keeps(version, one)

    async def run() -> None:
        async with beside(relay(tmp_path)) as one:
            assert (await ended(one, said))["state"] == "whole"
            asked.clear()
            monkeypatch.setattr(blocks.Source, "block", noted)
            monkeypatch.setattr(RelayedVersion, "_keeps", late)
            found = await ended(one, written(address(tmp_path / "l"), 30, after))
            assert (found["state"], found["kept"]) == ("whole", 1200), found
            same(found["path"], after)

    asyncio.run(run())


@pytest.mark.parametrize("wrong", ["a bit", "a short file", "no file"])
def test_a_block_that_is_damaged_in_the_version_before_is_fetched(tmp_path, caplog, wrong):
    """Of three blocks and four bytes the damage takes the second block, or the last, or the object with both."""
    objects, key = contents(SIZES, 23), "weights/a/c/0/0"
    said = [written(address(tmp_path / "l"), version, objects) for version in (23, 24)]
    lost = {"a bit": BLOCK_BYTES, "a short file": 3, "no file": 2 * BLOCK_BYTES + 3}[wrong]

    async def run() -> None:
        async with beside(relay(tmp_path)) as one:
            assert (await ended(one, said[0]))["state"] == "whole"
            damaged = tmp_path / "relay" / said[0].id / key
            if wrong == "a bit":
                damaged.write_bytes(changed(objects, key, BLOCK_BYTES)[key])
            else:
                damaged.unlink() if wrong == "no file" else damaged.write_bytes(objects[key][:-1])
            found = await ended(one, said[1])
            assert found["state"] == "whole" and found["bytes"] == {"source": lost + listed(tmp_path, 24)}
            assert found["kept"] == sum(SIZES.values()) - lost
            same(found["path"], objects)

    asyncio.run(run())
    assert sum("of the version before is damaged or gone" in line for line in caplog.messages) == 1


def test_an_object_that_has_not_changed_is_the_file_of_the_version_before_until_a_block_of_it_is_fetched(tmp_path):
    """Of three versions the second changes one object; then a bit of another is lost, which the third has in a file of its own."""
    objects, key, other = contents(SIZES, 27), "weights/a/c/0/0", "weights/b/c/0"
    after = changed(objects, other, 0)
    said = [written(address(tmp_path / "l"), n, content) for n, content in ((27, objects), (28, after), (29, after))]

    async def run() -> None:
        async with beside(relay(tmp_path)) as one:
            files = [tmp_path / "relay" / announced.id for announced in said]
            for announced in said[:2]:
                assert (await ended(one, announced))["state"] == "whole"
            assert (files[0] / key).samefile(files[1] / key) and not (files[0] / other).samefile(files[1] / other)
            same(files[0], objects)
            damaged = changed(after, key, BLOCK_BYTES)[key]
            (files[1] / key).write_bytes(damaged)
            assert (await ended(one, said[2]))["state"] == "whole"
            same(files[2], after)
            assert (files[1] / key).read_bytes() == damaged and not (files[1] / key).samefile(files[2] / key)
            assert (files[1] / other).samefile(files[2] / other)
            assert not list((tmp_path / "relay").rglob("*.apart"))

    asyncio.run(run())


def test_a_relay_that_keeps_one_version_fetches_the_next_whole(tmp_path, caplog):
    objects = contents(SIZES, 25)
    said = [written(address(tmp_path / "l"), version, objects) for version in (25, 26)]

    async def run() -> None:
        async with beside(relay(tmp_path, keep=1)) as one:
            for announced in said:
                found = await ended(one, announced)
                assert (found["state"], found["kept"]) == ("whole", 0)
                same(found["path"], objects)

    asyncio.run(run())
    assert not caplog.messages


def test_old_versions_go_and_the_learners_own_folder_is_neither_copied_nor_removed(tmp_path):
    def version(number: int) -> Announcement:
        return written(address(tmp_path / "mine"), number, contents({"a": 100 + number}, number))

    async def run() -> None:
        async with beside(relay(tmp_path)) as one:
            said = [version(number) for number in (1, 2, 3)]
            for announced in said:
                assert (await ended(one, announced))["state"] == "whole"
            assert {place.name for place in (tmp_path / "relay").iterdir()} == {said[1].id, said[2].id}
        async with beside(relay(tmp_path, own=tmp_path / "mine")) as one:
            found = [await ended(one, announced) for announced in said]
            assert found[2]["path"] == str(tmp_path / "mine/v00000003") and not list((tmp_path / "relay").iterdir())
            async with beside(Relay(folder=tmp_path / "other", token=TOKEN)) as last:
                got = await ended(last, replace(said[2], before=(one,)))
                assert got["bytes"].keys() == {one}
        assert (tmp_path / "mine/v00000001/weights/a").exists()

    asyncio.run(run())


def test_nothing_is_answered_without_the_token(tmp_path):
    said = written(address(tmp_path / "l"), 8, contents(SIZES, 8))

    async def run() -> None:
        async with beside(relay(tmp_path)) as url, aiohttp.ClientSession() as session:
            assert (await ended(url, said))["state"] == "whole"
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                for path in (said.id, f"{said.id}/0", f"{said.id}/blocks"):
                    async with session.get(f"{url}/{path}", headers=headers) as answer:
                        assert answer.status == 401
                async with session.post(f"{url}/announce", json=said.content(), headers=headers) as answer:
                    assert answer.status == 401

    asyncio.run(run())
    with pytest.raises(ValueError, match="the token has 5 characters, at least 16"):
        Relay(folder=tmp_path, token="short")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "/etc"}, "a source is an address with"),
        ({"source": "http://elsewhere/x"}, "a source is an address with"),
        ({"blocks": "0"}, "64 hexadecimal digits"),
        ({"before": ["ftp://x"]}, "addresses like http"),
        ({"before": None}, "has version, source, blocks and before"),
        ({"version": "x"}, "has version, source, blocks and before"),
    ],
)
def test_an_announcement_that_is_none_is_refused(change, said):
    good = Announcement(version=1, source="s3://b/v", blocks="0" * 64).content()
    assert Announcement.of(good).content() == good
    with pytest.raises(ValueError, match=said):
        Announcement.of(good | change)


@pytest.mark.parametrize("key", ["../x", "/etc/x", "weights/../../x"])
def test_a_list_of_blocks_names_no_place_outside_its_version(key):
    with pytest.raises(ValueError, match="no place in a version"):
        blocks.blocks_of(json.dumps({"objects": {key: [1, "0" * 32]}}).encode())
    with pytest.raises(ValueError, match="digits for the 9 bytes"):
        blocks.blocks_of(json.dumps({"objects": {"x": [9, "0" * 33]}}).encode())
