"""token_stats whose log-prob of a token has the same bits in every batch, and in a sampler that has the logits (`logprobs`).

On CPUs logits are computed in tiles of rows with the whole vocabulary, and the gradient is that of the backend `xla`; on Hopper GPUs
both are computed by the kernels of `ordered_gpu`.
"""

import sys
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.kernels.token_stats import fused, xla
from jaxrl_llm.kernels.token_stats.definition import Call
from jaxrl_llm.kernels.token_stats.fused import Inputs


def refusal(call: Call) -> str | None:
    """Returns the reason why this backend cannot take the call, or None."""
    if call.biased or call.soft_cap is not None or call.chunk is not None:
        return "it has no bias, soft_cap or chunk"
    if reason := arithmetic.refusal(call.platform):
        return reason
    return _gpu().refusal(call) if call.platform == "gpu" else None


def _gpu() -> ModuleType:
    from jaxrl_llm.kernels.token_stats import ordered_gpu

    return ordered_gpu


def compute(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    bias: Float[Array, " V"] | None,
    words: UInt32[Array, "2"],
    call: Call,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Float[Array, " T"]]:
    """Returns the statistics named by `call.outputs`, as defined in `reference`; `mesh` divides tokens alone.

    Raises:
      ValueError: `mesh` divides the vocabulary, whose sums would then be sums of parts.
    """
    if mesh is not None and mesh.shape.get(fused.VOCABULARY_AXIS, 1) > 1:
        raise ValueError(
            "token_stats in one order divides tokens alone over a mesh: set train.MeshConfig.tensor = 1 "
            f"(got {mesh.shape[fused.VOCABULARY_AXIS]})"
        )
    backend = _gpu() if call.platform == "gpu" else sys.modules[__name__]
    return fused.compute(backend, (hidden, head, targets), bias, words, call, mesh)


backward = xla.backward


def forward(inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], None]:
    """Returns the sums over the vocabulary of each token; there are no residuals for the backward pass."""
    head = arithmetic.widened(inputs.head, inputs.hidden.dtype)

    def of_tile(hidden: jax.Array, targets: jax.Array, first: jax.Array) -> dict[str, jax.Array]:
        raw = arithmetic.tile_product(hidden.astype(jnp.float32), head, turned=True)
        part = inputs._replace(hidden=hidden, targets=targets, first_token=inputs.first_token + first[0])
        sums = xla.tile_sums(raw, part, call)
        inverse = np.float32(1) / np.float32(call.temperature)
        log_total = _log_total(raw, sums["maximum"], inverse)
        if "logprob" in call.outputs:
            sums["logprob"] = _logprob(sums["target"], sums["maximum"], inverse, log_total)
        return sums | {"log_total": log_total}

    return arithmetic.over_tiles(of_tile, inputs.hidden, inputs.targets, jnp.arange(call.tokens)), None


# Both take the inverse of the temperature, since a division by a constant of the program is a product with its inverse, and one by an
# argument is not.
def _log_total(logits: jax.Array, maximum: jax.Array, inverse: Any) -> jax.Array:
    """Computes log sum_v exp((z_v - maximum) inverse) of each row."""
    centred = arithmetic.pin((logits - maximum[:, None]) * inverse)
    return arithmetic.log(arithmetic.totals(arithmetic.exp(centred)))


def _logprob(chosen: jax.Array, maximum: jax.Array, inverse: Any, log_total: jax.Array) -> jax.Array:
    return arithmetic.pin((chosen - maximum) * inverse) - log_total


class Read(NamedTuple):
    """A sampler's logits of its hidden states, or the specs by which a mesh divides them.

    Attributes:
      logits: the logits, float32 [S, V].
      shares: on GPUs, the kernel's sums over each share of the vocabulary.
    """

    logits: Any
    shares: Any


def read(hidden: Float[Array, "S D"], head: Float[Array, "V D"], temperature: Float[Array, " S"]) -> Read:
    """Returns h . w_v in the dtype of `hidden`, in the order of `forward`, and the sums that `logprobs` needs."""
    rows, found = _split(len(hidden))
    out: Read = arithmetic.by_rows(_read, (rows, arithmetic.WHOLE, rows), found)(hidden, head, temperature)
    return out


def _split(slots: int) -> tuple[PartitionSpec, Read]:
    """Returns how a mesh divides a sampler's arrays of `slots` slots, and their `Read`."""
    rows = arithmetic.split(slots)
    return rows, Read(rows, PartitionSpec(None, None, *rows))


def _read(hidden: jax.Array, head: jax.Array, temperature: jax.Array) -> Read:
    if arithmetic.on_gpu():
        shares, logits = _gpu().read(hidden, head, temperature, logits=True)
        return Read(logits, shares)
    return Read(
        arithmetic.matmul(hidden.astype(jnp.float32), arithmetic.widened(head, hidden.dtype), turned=True), None
    )


def logprobs(
    found: Read,
    hidden: Float[Array, "S D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, " S"],
    temperature: Float[Array, " S"],
) -> Float[Array, " S"]:
    """Returns the log-prob of one token per row under softmax(logits / temperature), with the same bits as `compute`."""
    rows, read = _split(len(hidden))
    given = (read, rows, arithmetic.WHOLE, rows, rows)
    out: jax.Array = arithmetic.by_rows(_logprobs, given, rows)(found, hidden, head, tokens, temperature)
    return out


def _logprobs(found: Read, hidden: jax.Array, head: jax.Array, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    if found.shares is not None:
        own: jax.Array = _gpu().logprobs(found.shares, hidden, head, tokens, temperature)[-1]
        return own
    maximum = found.logits.max(axis=1)
    chosen = jnp.take_along_axis(found.logits, tokens[:, None], axis=1)[:, 0]
    inverse = arithmetic.pin(1 / temperature)
    return _logprob(chosen, maximum, inverse, _log_total(found.logits, maximum, inverse[:, None]))
