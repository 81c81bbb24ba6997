"""Stores published versions in object storage, gs:// and s3://, through tensorstore's own drivers (no jax, no Google or AWS library).

Google's credentials are the application's default ones. AWS's come from its usual chain; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
names the server of a store that speaks S3, AWS_REGION its region.
"""

import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from jaxrl_llm.publication.manifest import WEIGHTS

SCHEMES = ("gs://", "s3://")
MARKER = f"{WEIGHTS}/_CHECKPOINT_METADATA"  # written last: a version with it is complete
TREE = f"{WEIGHTS}/_METADATA"  # the list of the version's tensors
# {"objects": {key: [bytes, digests of its blocks]}}, for relays that pass the version on.
BLOCKS = f"{WEIGHTS}/_BLOCKS"
BLOCK_BYTES = 1 << 22  # bytes of an object that relays pass on at a time; its last block is shorter
# A failed request is retried for about half a minute, instead of the quarter of an hour that is tensorstore's default.
_RETRIES = {"max_retries": 7, "initial_delay": "0.25s", "max_delay": "8s"}
_WINDOW_BYTES = 1 << 30  # most bytes of objects that are being written
# Each process writes such an object when its shards are written, with the list of their blocks.
_WRITTEN = f"{WEIGHTS}/_WRITTEN/"
_UNLISTED = b"written"
_DIGESTING = 4  # threads that compute digests
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0  # seconds between two requests for them
RETRIES: Mapping[str, Any] = {"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES}


def is_stored(place: str) -> bool:
    """Returns whether a place is an address of object storage instead of a folder."""
    return place.startswith(SCHEMES)


def spec(address: str) -> Any:
    """Returns what tensorstore opens a folder by: the address itself, or a dict where the S3 server is not Amazon's."""
    address = f"{address.rstrip('/')}/"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not address.startswith("s3://") or not endpoint:
        return address
    bucket, _, path = address.removeprefix("s3://").partition("/")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": region}


class Store:
    """A folder of versions in object storage; each call that fails raises an OSError with its address."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._context = ts.Context(dict(RETRIES))

    def write(
        self, name: str, objects: Mapping[str, Callable[[], bytes]], process: int, *, listed: bool = False
    ) -> None:
        """Writes one process's objects of the version `name`, and then the mark that it has; contents are made as memory has room for them.

        With `listed`, the mark holds the digests of their blocks, for relays.
        """
        to = self._open(name)
        try:
            if not listed:
                _write(to, objects)
                to.write(f"{_WRITTEN}{process}", _UNLISTED).result()
                return
            entries: dict[str, tuple[int, str]] = {}
            with ThreadPoolExecutor(_DIGESTING) as threads:

                def note(key: str, content: bytes) -> Future[None]:
                    return threads.submit(lambda: entries.update({key: (len(content), digests(content))}))

                _write(to, objects, note)
            to.write(f"{_WRITTEN}{process}", json.dumps(entries).encode()).result()
        except Exception as error:
            raise self._failed("write", name, error) from error

    def complete(self, name: str, processes: int, limit_s: float) -> str:
        """Writes the marker of a version once every process has written its part, and before it the list of all blocks where processes
        list theirs.

        Returns:
          The SHA-256 of that list; empty where there is no list.

        Raises:
          OSError: some processes have not done so within `limit_s` seconds; the message names them.
        """
        to, until, wait_s = self._open(name), time.monotonic() + limit_s, _POLL_S
        absent, said, text = list(range(processes)), [], b""
        try:
            while True:
                found = {i: to.read(f"{_WRITTEN}{i}").result() for i in absent}
                said += [one.value for one in found.values() if one.state == "value"]
                if not (absent := [i for i, one in found.items() if one.state != "value"]):
                    break
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"processes {absent} have not written their shards {limit_s:g} s after process 0: look at their output"
                    )
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_POLL_S)
            if lists := [json.loads(one) for one in said if one != _UNLISTED]:
                objects = dict(sorted(entry for one in lists for entry in one.items()))
                to.write(BLOCKS, text := json.dumps({"objects": objects}).encode()).result()
            to.write(MARKER, b"{}").result()
        except Exception as error:
            raise self._failed("write", name, error) from error
        return hashlib.sha256(text).hexdigest() if text else ""

    def versions(self) -> list[str]:
        """Returns the names of the versions there, complete or not, in order."""
        try:
            keys = self._open("").list().result()
        except Exception as error:
            raise self._failed("list", "", error) from error
        return sorted({key.decode().partition("/")[0] for key in keys if b"/" in key})

    def remove(self, name: str) -> None:
        """Removes a version, its marker first, so that no reader takes the rest for a complete one."""
        try:
            self._open(name).write(MARKER, None).result()
            self._open(name).delete_range(ts.KvStore.KeyRange()).result()
            if (folder := folder_of(self.address)) is not None:  # its empty folders
                shutil.rmtree(folder / name, ignore_errors=True)
        except Exception as error:
            raise self._failed("remove", name, error) from error

    def _open(self, name: str) -> ts.KvStore:
        return ts.KvStore.open(spec(f"{self.address}/{name}" if name else self.address), context=self._context).result()

    def _failed(self, what: str, name: str, error: Exception) -> OSError:
        line = str(error).strip().partition("\n")[0][:300]
        return OSError(
            f"could not {what} {self.address}/{name} ({line}): check the bucket, and the credentials of this host"
        )


def digest(block: bytes | memoryview) -> str:
    """Returns the digest of a block: the first half of its SHA-256, 32 hexadecimal digits."""
    return hashlib.sha256(block).hexdigest()[:32]


def digests(content: bytes) -> str:
    """Returns the digests of an object's blocks, concatenated."""
    view = memoryview(content)
    return "".join(digest(view[first : first + BLOCK_BYTES]) for first in range(0, len(content), BLOCK_BYTES))


def folder_of(address: str) -> Path | None:
    """Returns the folder of a "file://" address; None for another address."""
    return Path(unquote(address.removeprefix("file://"))) if address.startswith("file://") else None


def _write(
    to: ts.KvStore,
    objects: Mapping[str, Callable[[], bytes]],
    note: Callable[[str, bytes], Future[None]] | None = None,
) -> None:
    """Writes objects concurrently, as many as `_WINDOW_BYTES` of memory hold, at least one; `note` gets each content."""
    under_way: deque[tuple[int, list[Any]]] = deque()
    for key, make in objects.items():
        content = make()
        while under_way and len(content) + sum(nbytes for nbytes, _ in under_way) > _WINDOW_BYTES:
            for part in under_way.popleft()[1]:
                part.result()
        parts: list[Any] = [] if note is None else [note(key, content)]
        under_way.append((len(content), [to.write(key, content), *parts]))
    for _, parts in under_way:
        for part in parts:
            part.result()
