"""Published versions in object storage, gs:// and s3://, through tensorstore's own drivers (no jax, no Google or AWS library).

Google's credentials are the application's default ones. AWS's come from its usual chain; AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL
names the server of a store that speaks S3, AWS_REGION its region.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from jaxrl_llm.publication.manifest import WEIGHTS

SCHEMES = ("gs://", "s3://")
MARKER = f"{WEIGHTS}/_CHECKPOINT_METADATA"  # written last: a version with it is whole
# A request that fails is tried again for about half a minute, not for the quarter of an hour that is tensorstore's default.
_RETRIES = {"max_retries": 7, "initial_delay": "0.25s", "max_delay": "8s"}
_WINDOW_BYTES = 1 << 30  # of files that are being copied
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

    def upload(self, folder: Path, name: str) -> None:
        """Copies a version that is whole on disk to `name`; it is whole there, or its marker is missing."""
        files = [str(f.relative_to(folder)) for f in sorted(folder.rglob("*")) if f.is_file()]
        if MARKER not in files:
            raise OSError(f"{folder} is no whole version: {MARKER} is missing")
        to = self._open(name)
        try:
            to.delete_range(ts.KvStore.KeyRange()).result()
            for wave in ([f for f in files if f != MARKER], [MARKER]):
                _write(to, folder, wave)
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


def _write(to: ts.KvStore, folder: Path, files: Sequence[str]) -> None:
    """Copies files, some at the same time: as many as `_WINDOW_BYTES` of memory hold, at least one."""
    under_way: deque[tuple[int, Any]] = deque()
    for file in files:
        size = (folder / file).stat().st_size
        while under_way and size + sum(nbytes for nbytes, _ in under_way) > _WINDOW_BYTES:
            under_way.popleft()[1].result()
        under_way.append((size, to.write(file, (folder / file).read_bytes())))
    for _, written in under_way:
        written.result()
