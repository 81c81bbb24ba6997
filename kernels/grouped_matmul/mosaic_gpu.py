"""grouped_matmul on Hopper by Pallas Mosaic GPU kernels."""

from jaxrl_llm.kernels.grouped_matmul.definition import Call


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    return f"it runs on NVIDIA Hopper GPUs (got {call.platform})"
