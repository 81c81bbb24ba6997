"""Published versions in object storage, gs:// and s3://, through tensorstore's own drivers (no jax, no Google or AWS library).

Google's credentials are the application's default ones. AWS's come from its usual chain; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
names the server of a store that speaks S3, AWS_REGION its region.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import tensorstore as ts

from jaxrl_llm.publication.manifest import WEIGHTS

SCHEMES = ("gs://", "s3://")
MARKER = f"{WEIGHTS}/_CHECKPOINT_METADATA"  # written last: a version with it is whole
TREE = f"{WEIGHTS}/_METADATA"  # the list of its tensors
# A request that fails is tried again for about half a minute, not for the quarter of an hour that is tensorstore's default.
_RETRIES = {"max_retries": 7, "initial_delay": "0.25s", "max_delay": "8s"}
_WINDOW_BYTES = 1 << 30  # of objects that are being written
_WRITTEN = f"{WEIGHTS}/_WRITTEN/"  # an object of each process that has written its shards
_POLL_S, _LONGEST_POLL_S = 0.05, 1.0  # between looks for them
RETRIES: Mapping[str, Any] = {"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES}


def is_stored(place: str) -> bool:
    """Returns whether a place is an address of object storage, and no folder."""
    return place.startswith(SCHEMES)


def spec(address: str) -> Any:
    """Returns what tensorstore opens a folder by: the address itself, or more where S3 is spoken by another server than Amazon's."""
    address = f"{address.rstrip('/')}/"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not address.startswith("s3://") or not endpoint:
        return address
    bucket, _, path = address.removeprefix("s3://").partition("/")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": region}


class Store:
    """A folder of versions in object storage; each call raises OSError that names it where it fails."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._context = ts.Context(dict(RETRIES))

    def write(self, name: str, objects: Mapping[str, Callable[[], bytes]], process: int) -> None:
        """Writes what one process has of the version `name`, and then that it has; contents are made as memory has room for them."""
        to = self._open(name)
        try:
            _write(to, objects)
            to.write(f"{_WRITTEN}{process}", b"written").result()
        except Exception as error:
            raise self._failed("write", name, error) from error

    def complete(self, name: str, processes: int, limit_s: float) -> None:
        """Writes the marker of a version once every process has written its part.

        Raises:
          OSError: some have not within `limit_s`, in seconds; the message names them.
        """
        to, until, wait_s = self._open(name), time.monotonic() + limit_s, _POLL_S
        absent = list(range(processes))
        try:
            while absent := [i for i in absent if to.read(f"{_WRITTEN}{i}").result().state != "value"]:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"processes {absent} have not written their shards {limit_s:g} s after process 0: look at their output"
                    )
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_POLL_S)
            to.write(MARKER, b"{}").result()
        except Exception as error:
            raise self._failed("write", name, error) from error

    def versions(self) -> list[str]:
        """Returns the names of the versions there, whole or not, in order."""
        try:
            keys = self._open("").list().result()
        except Exception as error:
            raise self._failed("list", "", error) from error
        return sorted({key.decode().partition("/")[0] for key in keys if b"/" in key})

    def remove(self, name: str) -> None:
        """Removes a version, its marker first, so that no reader takes the rest for whole."""
        try:
            self._open(name).write(MARKER, None).result()
            self._open(name).delete_range(ts.KvStore.KeyRange()).result()
        except Exception as error:
            raise self._failed("remove", name, error) from error

    def _open(self, name: str) -> ts.KvStore:
        return ts.KvStore.open(spec(f"{self.address}/{name}" if name else self.address), context=self._context).result()

    def _failed(self, what: str, name: str, error: Exception) -> OSError:
        line = str(error).strip().partition("\n")[0][:300]
        return OSError(
            f"could not {what} {self.address}/{name} ({line}): check the bucket, and the credentials of this host"
        )


def _write(to: ts.KvStore, objects: Mapping[str, Callable[[], bytes]]) -> None:
    """Writes objects, some at the same time: as many as `_WINDOW_BYTES` of memory hold, at least one."""
    under_way: deque[tuple[int, Any]] = deque()
    for key, make in objects.items():
        content = make()
        while under_way and len(content) + sum(nbytes for nbytes, _ in under_way) > _WINDOW_BYTES:
            under_way.popleft()[1].result()
        under_way.append((len(content), to.write(key, content)))
    for _, written in under_way:
        written.result()
