"""Chooses the backend of a kernel: the first that supports a call, or the one named, or an error that says why not."""

import importlib
from types import ModuleType
from typing import Any


def backend_module(op: str, backend: str) -> ModuleType:
    """The module of one backend of the kernel `op`; it has `refusal(call)`, the reason why not, or None."""
    return importlib.import_module(f"jaxrl_llm.kernels.{op}.{backend}")


def supports(op: str, backend: str, call: Any) -> bool:
    """True where the backend takes the call."""
    return backend_module(op, backend).refusal(call) is None


def choose(op: str, backends: tuple[str, ...], call: Any, backend: str | None) -> Any:
    """The module of `backend`, or for None of the first of `backends` that supports the call.

    Raises:
      ValueError: an unknown backend, or none that takes the call; the message has the reason of each.
    """
    if backend is not None and backend not in backends:
        raise ValueError(f"unknown {op} backend {backend!r}: use one of {backends}, or None to choose by the call")
    reasons = []
    for name in backends if backend is None else (backend,):
        module = backend_module(op, name)
        reason = module.refusal(call)
        if reason is None:
            return module
        reasons.append(f"{name}: {reason}")
    raise ValueError(f"no {op} backend takes this call ({'; '.join(reasons)}); got {call}")
