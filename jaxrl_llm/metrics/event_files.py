"""TensorBoard event files on disk: opens new ones, and removes events written after a given step.

The purge_step of tensorboardX's SummaryWriter does not suffice: TensorBoard's EventAccumulator then hides scalars but still shows
texts, such as rollouts, and SummaryWriter writes in a thread of its own, so that a kill loses events from before a checkpoint.
"""

import importlib
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def tensorboardx(module: str) -> Any:
    """Imports a module of tensorboardX without PyTorch, which its unused writer of models would take seconds to load."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python treats such a module as missing
    try:
        return importlib.import_module(f"tensorboardX.{module}")
    finally:
        if hidden:
            del sys.modules["torch"]


def event_files(folder: Path) -> list[Path]:
    """Returns the event files of a folder, oldest first."""
    return sorted(folder.glob("*.tfevents.*"))


def new_event_file(folder: Path) -> Any:
    """Opens a tensorboardX EventsWriter on a new file, whose name ends in nanoseconds.

    With seconds alone in the name, a second writer could overwrite the first one's file. TensorBoard reads files in the order
    of their names, which is the order of their times.
    """
    return tensorboardx("event_file_writer").EventsWriter(
        str(folder / "events"), filename_suffix=f".{time.time_ns():020d}"
    )


def records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (whole record, payload) of a TFRecord file, up to an incomplete record at its end.

    A record is the payload's length (uint64), a checksum of 4 bytes, the payload, and another checksum of 4 bytes.
    """
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        end = start + 12 + length + 4
        if end > len(data):
            return
        yield data[start:end], data[start + 12 : end - 4]
        start = end


def cut_events(path: Path, step: int) -> None:
    """Removes a file's events after `step` by one atomic replacement.

    A file without any summary left is deleted; an incomplete record at the end is dropped.
    """
    from google.protobuf.message import DecodeError

    event_of, kept, shows = tensorboardx("proto.event_pb2").Event.FromString, [], False
    try:
        for record, payload in records(path.read_bytes()):
            event = event_of(payload)
            if event.step <= step or event.HasField("file_version"):
                kept.append(record)
                shows |= event.HasField("summary")
    except DecodeError:
        pass  # the writing was interrupted here, and nothing after it can be read
    if not shows:
        path.unlink()
        return
    new = path.with_name(path.name.replace("tfevents", "cut"))  # TensorBoard does not read a file of this name
    new.write_bytes(b"".join(kept))
    new.replace(path)
