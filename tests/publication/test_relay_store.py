"""Objects of a store that relays read: once each, in order, and only what has changed."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from bucket import Bucket, pointed_at
from relay_site import beside, changed, contents, ended, relay, same, written

from jaxrl_llm.publication.object_store import BLOCK_BYTES, BLOCKS
from jaxrl_llm.publication.relays import blocks
from jaxrl_llm.publication.relays.version import Announcement


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    found = Bucket()
    pointed_at(found, monkeypatch)
    yield found
    found.close()


def sent_of(bucket: Bucket) -> dict[str, int]:
    """The bytes that a store has sent of each object but the list of blocks, by the last part of its name."""
    return {key.rpartition("/")[2]: n for key, n in bucket.sent.items() if "_BLOCKS" not in key}


def fetched_whole(folder: Path, said: Announcement, objects: Mapping[str, bytes]) -> None:
    """Has a relay fetch an announced version, and compares what it holds."""

    async def run() -> None:
        async with beside(relay(folder)) as one:
            found = await ended(one, said)
            assert found["state"] == "whole", found
            same(found["path"], objects)

    asyncio.run(run())


def test_objects_of_a_store_that_have_not_changed_are_not_read_unless_they_are_damaged(bucket, tmp_path):
    """Of six objects the third has changed, and the fifth is damaged where the version before lies."""
    objects = contents({str(i): BLOCK_BYTES // 2 for i in range(6)}, 27)
    said = written("s3://bucket/run", 27, objects)

    async def run() -> None:
        async with beside(relay(tmp_path)) as one:
            assert (await ended(one, said))["state"] == "whole"
            (tmp_path / "relay" / said.id / "weights/4").write_bytes(changed(objects, "weights/4", 9)["weights/4"])
            after = changed(objects, "weights/2", 100)
            announced = written("s3://bucket/run", 28, after)
            bucket.sent.clear()
            found = await ended(one, announced)
            assert (found["state"], found["kept"]) == ("whole", 4 * (BLOCK_BYTES // 2)), found
            same(found["path"], after)

    asyncio.run(run())
    assert sent_of(bucket) == {"2": BLOCK_BYTES // 2, "4": BLOCK_BYTES // 2}


def test_objects_of_a_store_are_read_once_each_and_as_far_ahead_as_memory_goes(bucket, tmp_path, monkeypatch):
    most, read_ahead = [], blocks.Source._read_ahead

    def looked_at(source: blocks.Source, key: str) -> None:
        read_ahead(source, key)
        most.append(sum(len(objects[one]) for one in source._reading))

    monkeypatch.setattr(blocks, "_AHEAD_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(blocks.Source, "_read_ahead", looked_at)
    objects = contents({str(i): BLOCK_BYTES // 2 for i in range(12)}, 7)
    said = written("s3://bucket/run", 7, objects)
    bucket.sent.clear()
    fetched_whole(tmp_path, said, objects)
    assert sent_of(bucket) == {str(i): BLOCK_BYTES // 2 for i in range(12)}
    assert max(most[:1]) == 2 * BLOCK_BYTES and max(most) <= 4 * BLOCK_BYTES, "of eight that are asked for at once"


def test_objects_of_a_store_are_read_in_order_and_eight_at_a_time(bucket, tmp_path, monkeypatch):
    """Were all thirty read at once, the first would arrive with the last, and the next relay would wait for it."""
    begun, under_way, most, read = [], set[str](), [0], blocks.Source.object

    async def looked_at(source: blocks.Source, key: str) -> bytes:
        begun.append(key)
        under_way.add(key)
        most.append(len(under_way))
        await asyncio.sleep(0.01)
        content = await read(source, key)
        under_way.remove(key)
        return content

    monkeypatch.setattr(blocks.Source, "object", looked_at)
    objects = contents({f"{i:02d}": 1000 for i in range(30)}, 31)
    said = written("s3://bucket/run", 31, objects)
    fetched_whole(tmp_path, said, objects)
    assert begun == [BLOCKS, *objects] and max(most) == 8
