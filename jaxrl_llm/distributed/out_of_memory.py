"""Turns a device's out-of-memory error into advice on the bindings that take less memory."""

import functools
from collections.abc import Callable
from typing import Any

_MARK = "RESOURCE_EXHAUSTED"
_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")


def ran_out(error: BaseException) -> bool:
    """Returns whether the error is XLA's out-of-memory error."""
    return type(error).__name__ in _ERRORS and _MARK in str(error)


def advice(error: BaseException, doing: str, rows: int | None = None, row_tokens: int | None = None) -> str:
    """Returns the message that says which bindings to lower, the cheapest first."""
    line = next((part for part in str(error).splitlines() if _MARK in part), "")[:300]
    now = "" if rows is None else f" (now {rows} rows of {row_tokens} positions)"
    return (
        f"a device ran out of memory while {doing} [{line.strip()}]. Lower ROWS, then ROW_TOKENS, which are a micro-batch{now}; have the "
        "backward pass recompute more by sources.PolicySource.remat = 'full'; spread over more devices by train.MeshConfig.fsdp; "
        "keep moments on the host by train.Optimizer.offload = True. An embedded sampler takes less with a smaller "
        "embedded.EmbeddedSampler.slots, a vLLM server on the same GPU with a smaller VLLM_MEMORY. --dry_run predicts what a device "
        "needs; the same command goes on from the last checkpoint"
    )


def explained(doing: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a method of a StageTrainer: an out-of-memory error becomes a MemoryError that says what to do.

    Its arguments may have been donated by then, so the step is not tried again: the run ends, and a restart resumes from its last checkpoint.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(stage: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return method(stage, *arguments, **named)
            except Exception as error:
                if not ran_out(error):
                    raise
                packing = stage.config.packing
                raise MemoryError(advice(error, doing, packing.rows, packing.row_tokens)) from error

        return run

    return wrap
