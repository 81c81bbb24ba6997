"""Chooses the backend of a kernel: the first that supports a call, or the named one; otherwise raises with the reasons.

Only this file determines the kernels' device: the process's own, or an absent one for which programs are compiled (`target`). The
device is part of the key of jit's cache of traces.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax

_TARGET = jax.make_user_context(default_value=None)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A backend that was chosen while a program was traced.

    Attributes:
      op: the kernel.
      backend: the backend that takes the call.
      call: the static description of the call.
      refused: {backend: its reason} of the backends tried before it.
    """

    op: str
    backend: str
    call: Any
    refused: dict[str, str]


class _Record:
    """The choices that are made while it is open; it is hashed by identity, so that jit traces anew under each."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []


_RECORD = jax.make_user_context(default_value=None)

# The backend of kernels whose result for a row has the same bits in every program.
ORDERED = "ordered"


class _Order(NamedTuple):
    """Whether sums have one order, and how a mesh divides their rows; None on one device."""

    on: bool
    spread: Any


_ORDERED = jax.make_user_context(default_value=_Order(False, None))


def device() -> Any:
    """Returns the device for which kernels are chosen; it has `platform`, `device_kind` and, on GPUs, `compute_capability`."""
    found = _TARGET.value
    return jax.local_devices()[0] if found is None else found


def foreign() -> bool:
    """Returns True where kernels are chosen for a device other than the process's own."""
    return _TARGET.value is not None


@contextmanager
def target(device: Any) -> Iterator[None]:
    """Chooses kernels for `device`, which the process need not have; it must be hashable."""
    with _TARGET(device):
        yield


@contextmanager
def recording() -> Iterator[list[Choice]]:
    """Yields a list to which every choice is added that is made while the context is open, each distinct call once.

    Programs are traced anew meanwhile, even where jit has them cached.
    """
    record = _Record()
    with _RECORD(record):
        yield record.choices


def ordered() -> bool:
    """Returns True where traced programs have one order of sums for each row, whatever other rows are computed with it (kernels/ordered)."""
    return bool(_ORDERED.value.on)


def spread() -> Any:
    """Returns the Partitioner (distributed/mesh.py) of the devices that divide the rows of traced programs; None for one device."""
    return _ORDERED.value.spread


@contextmanager
def ordering(on: bool, spread: Any = None) -> Iterator[None]:
    """Traces with one order of sums where `on`, and without otherwise; `spread` is the Partitioner of the rows, which must be hashable."""
    divided = on and spread is not None and spread.mesh.size > 1
    with _ORDERED(_Order(on, spread if divided else None)):
        yield


def capability() -> tuple[int, int] | None:
    """Returns the compute capability of the device where it is an NVIDIA GPU, or None."""
    major, _, minor = str(getattr(device(), "compute_capability", None) or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def backend_module(op: str, backend: str) -> ModuleType:
    """Returns the module of one backend of the kernel `op`.

    The module has `refusal(call)`, which returns a reason or None; one for a single platform has RUNS_ON, (platform, its chips in
    words), and is asked on that platform alone.
    """
    return importlib.import_module(f"jaxrl_llm.kernels.{op}.{backend}")


def refusal(op: str, backend: str, call: Any) -> str | None:
    """Returns the reason why a backend cannot take the call, or None."""
    module = backend_module(op, backend)
    platform, chips = getattr(module, "RUNS_ON", (call.platform, ""))
    if call.platform != platform:
        return f"it runs on {chips} (got {call.platform})"
    reason: str | None = module.refusal(call)
    return reason


def supports(op: str, backend: str, call: Any) -> bool:
    """Returns True where the backend takes the call."""
    return refusal(op, backend, call) is None


def choose(op: str, backends: tuple[str, ...], call: Any, backend: str | None) -> Any:
    """Returns the module of `backend`, or for None the first of `backends` that supports the call.

    Raises:
      ValueError: the backend is unknown, or none takes the call; the message has the reason of each.
    """
    if backend is not None and backend not in backends:
        raise ValueError(f"unknown {op} backend {backend!r}: use one of {backends}, or None to choose by the call")
    if backend is None and ordered():
        if ORDERED not in backends:
            raise ValueError(f"the bitwise mode has no {op}: set BITWISE = False")
        backend = ORDERED
    refused: dict[str, str] = {}
    for name in backends if backend is None else (backend,):
        reason = refusal(op, name, call)
        if reason is None:
            record, choice = _RECORD.value, Choice(op=op, backend=name, call=call, refused=refused)
            if record is not None and choice not in record.choices:
                record.choices.append(choice)
            return backend_module(op, name)
        refused[name] = reason
    raise ValueError(f"no {op} backend takes this call ({'; '.join(map(': '.join, refused.items()))}); got {call}")
