"""token_stats in tiles of tokens and vocabulary by XLA alone, on any device.

The working memory is a tile of float32 logits, its gradient in the dtype of `hidden` and the products of one tile, whatever T and V;
BUDGETS bounds it. Small calls are one tile, whose products are kept for the backward pass.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.kernels.token_stats import fused
from jaxrl_llm.kernels.token_stats.definition import Call, logits, noise, product
from jaxrl_llm.kernels.token_stats.fused import FLOOR, Inputs, Tree


class Budget(NamedTuple):
    """Sizes that bound the working memory.

    Attributes:
      tokens: most tokens of a tile.
      elements: most logits of a tile, 4 bytes each.
      kept: most logits of a call that is one tile, in which nothing is computed twice.
    """

    tokens: int
    elements: int
    kept: int


# Accelerators: 128 MiB of logits keep the products large. CPU: tiles of 4 MiB stay in the cache, which halves the time of a forward and
# backward pass of 2048 x 192 x 4000 on two cores compared with one tile.
ACCELERATOR = Budget(tokens=8192, elements=2**25, kept=2**25)
BUDGETS = {"cpu": Budget(tokens=1024, elements=2**20, kept=2**21), "gpu": ACCELERATOR, "tpu": ACCELERATOR}


def refusal(call: Call) -> str | None:
    """Returns None, since every call is supported."""
    return None


def compute(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    bias: Float[Array, " V"] | None,
    words: UInt32[Array, "2"],
    call: Call,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Float[Array, " T"]]:
    """Returns the statistics named by `call.outputs`, as defined in `reference`."""
    return fused.compute(sys.modules[__name__], (hidden, head, targets), bias, words, call, mesh)


def one_tile(call: Call) -> bool:
    """Returns True where the logits of the call are kept in memory."""
    return call.chunk is None and call.tokens * call.vocabulary <= BUDGETS[call.platform].kept


def tile_sizes(call: Call) -> tuple[int, int]:
    """Returns the tokens and vocabulary entries of a tile, in even shares, so that no tile is nearly empty."""
    budget = BUDGETS[call.platform]
    blocks = -(-call.tokens // budget.tokens)
    tokens = -(-call.tokens // blocks)
    if call.chunk is not None:
        return tokens, min(call.chunk, call.vocabulary)
    chunks = -(-call.vocabulary * tokens // budget.elements)
    entries = -(-call.vocabulary // (chunks * 256)) * 256
    return tokens, min(entries, call.vocabulary)


def forward(inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Returns the sums over the shard's vocabulary of each token, and the products of a call of one tile."""
    if one_tile(call):
        raw = product(inputs.hidden, inputs.head)
        return tile_sums(raw, inputs, call), raw
    size = tile_sizes(call)[0]

    def of_block(block: Inputs) -> dict[str, jax.Array]:
        def add(start: Any, entries: int, sums: Tree) -> dict[str, jax.Array]:
            part = _entries(block, start, entries)
            return fused.merge(sums, tile_sums(product(part.hidden, part.head), part, call), call)

        return _over_vocabulary(add, _no_sums(size, call), call)

    blocks = _blocks(inputs, size)
    sums = jax.lax.map(lambda i: of_block(_block(blocks, inputs, i, size)), jnp.arange(len(blocks[0])))
    return {name: x.reshape(-1)[: call.tokens] for name, x in sums.items()}, None


def backward(
    inputs: Inputs, rows: Tree, saved: jax.Array | None, call: Call, dhead: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the gradients of hidden (float32), head (written into `dhead`) and bias (float32)."""
    if saved is not None:
        dhidden, dw, dbias = _gradients(saved, inputs, rows, call)
        return dhidden, fused.put(dhead, dw, 0, call), dbias
    size, width = tile_sizes(call)[0], call.width
    blocks = _blocks(inputs, size)
    row_blocks = {name: _split(x, size) for name, x in rows.items()}
    count = len(blocks[0])

    def add(start: Any, entries: int, carry: Any) -> Any:
        dhidden, dhead, dbias = carry

        def add_block(i: Any, sums: Any) -> Any:
            part = _entries(_block(blocks, inputs, i, size), start, entries)
            own_rows = {name: x[i] for name, x in row_blocks.items()}
            dx, dw, db = _gradients(product(part.hidden, part.head), part, own_rows, call)
            return sums[0].at[i].add(dx), sums[1] + dw, None if db is None else sums[2] + db

        zero_bias = None if dbias is None else jnp.zeros(entries, jnp.float32)
        zeros = (dhidden, jnp.zeros((entries, width), jnp.float32), zero_bias)
        dhidden, dw, db = jax.lax.fori_loop(0, count, add_block, zeros) if count > 1 else add_block(0, zeros)
        dhead = fused.put(dhead, dw, start, call)
        dbias = None if dbias is None else jax.lax.dynamic_update_slice(dbias, db, (start,))
        return dhidden, dhead, dbias

    zeros = (
        jnp.zeros((count, size, width), jnp.float32),
        dhead,
        None if inputs.bias is None else jnp.zeros(call.vocabulary, jnp.float32),
    )
    dhidden, dhead, dbias = _over_vocabulary(add, zeros, call)
    return dhidden.reshape(-1, width)[: call.tokens], dhead, dbias


def _over_vocabulary(add: Any, carry: Any, call: Call) -> Any:
    """Calls `add(start, entries, carry)` for each tile of the vocabulary; the ragged last one has its own size."""
    entries = tile_sizes(call)[1]
    full, rest = divmod(call.vocabulary, entries)
    carry = jax.lax.fori_loop(0, full, lambda i, c: add(i * entries, entries, c), carry)
    return add(jnp.int32(full * entries), rest, carry) if rest else carry


def _split(x: jax.Array, size: int, fill: Any = 0) -> jax.Array:
    """Reshapes [T, ...] to [blocks, size, ...], padded with `fill`."""
    more = -x.shape[0] % size
    if more:
        x = jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(-1, size, *x.shape[1:])


def _blocks(inputs: Inputs, size: int) -> tuple[jax.Array, jax.Array]:
    return _split(inputs.hidden, size), _split(inputs.targets, size, -1)


def _block(blocks: tuple[jax.Array, jax.Array], inputs: Inputs, i: Any, size: int) -> Inputs:
    return inputs._replace(hidden=blocks[0][i], targets=blocks[1][i], first_token=inputs.first_token + i * size)


def _entries(inputs: Inputs, start: Any, entries: int) -> Inputs:
    """Returns the inputs with the `entries` vocabulary entries from `start` on."""

    def cut(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, entries)

    return inputs._replace(
        head=jax.lax.dynamic_slice_in_dim(inputs.head, start, entries),
        bias=cut(inputs.bias),
        finite=cut(inputs.finite),
        first_entry=inputs.first_entry + start,
    )


def _noise(inputs: Inputs) -> jax.Array:
    """Returns the noise of a tile before its normalisation: 0 at the target and at entries outside the softmax."""
    tokens = jnp.arange(inputs.hidden.shape[0]) + inputs.first_token
    entries = jnp.arange(inputs.head.shape[0]) + inputs.first_entry
    used = entries != inputs.targets[:, None]
    used = used if inputs.finite is None else used & inputs.finite
    return jnp.where(used, noise(inputs.words, tokens, entries), 0.0)


def _no_sums(tokens: int, call: Call) -> dict[str, jax.Array]:
    """Returns the sums over no entries."""
    names = ["total", "target"] if "logprob" in call.outputs else ["total"]
    of = {"entropy": ["first"], "sum_p2": ["square"], "uniform_logprob": ["logit_sum"]}
    of["noise_logprob"] = ["noise_sum", "noise_total"]
    names += [name for output in call.outputs for name in of.get(output, [])]
    return {name: jnp.zeros(tokens) for name in names} | {"maximum": jnp.full(tokens, FLOOR)}


def tile_sums(raw: jax.Array, inputs: Inputs, call: Call) -> dict[str, jax.Array]:
    """Returns the sums over the entries of one tile."""
    z = logits(raw, inputs.bias, call)
    maximum = z.max(axis=1)
    centred = (z - maximum[:, None]) / call.temperature
    e = jnp.exp(centred)
    sums = {"maximum": maximum, "total": e.sum(axis=1)}
    if "logprob" in call.outputs:
        index = inputs.targets - inputs.first_entry
        here = (index >= 0) & (index < z.shape[1])
        at_target = jnp.take_along_axis(z, jnp.where(here, index, 0)[:, None], axis=1)[:, 0]
        sums["target"] = jnp.where(here, at_target, 0.0)
    if "entropy" in call.outputs:
        sums["first"] = (e * centred).sum(axis=1)
    if "sum_p2" in call.outputs:
        sums["square"] = (e * e).sum(axis=1)
    if "uniform_logprob" in call.outputs:
        sums["logit_sum"] = (z if inputs.finite is None else jnp.where(inputs.finite, z, 0.0)).sum(axis=1)
    if "noise_logprob" in call.outputs:
        u = _noise(inputs)
        sums |= {"noise_sum": (u * z).sum(axis=1), "noise_total": u.sum(axis=1)}
    return sums


def _gradients(raw: jax.Array, inputs: Inputs, rows: Tree, call: Call) -> tuple[Any, Any, Any]:
    """Returns float32 gradients of hidden, head and bias from one tile."""
    z = logits(raw, inputs.bias, call)
    logp = (z - rows["maximum"][:, None]) / call.temperature - rows["log_total"][:, None]
    p = jnp.exp(logp)
    weight = rows["constant"][:, None]
    if "slope" in rows:
        weight = weight + rows["slope"][:, None] * logp
    if "square" in rows:
        weight = weight + rows["square"][:, None] * p
    dz = p * weight
    if "target" in rows:
        index = inputs.targets - inputs.first_entry
        dz = dz + jnp.where(jnp.arange(z.shape[1]) == index[:, None], rows["target"][:, None], 0.0)
    if "uniform" in rows:
        uniform = rows["uniform"][:, None]
        dz = dz + (uniform if inputs.finite is None else jnp.where(inputs.finite, uniform, 0.0))
    if "noise" in rows:
        dz = dz + rows["noise"][:, None] * _noise(inputs)
    dbias = None if inputs.bias is None else dz.sum(axis=0)
    if call.soft_cap is not None:
        dz = dz * (1 - jnp.tanh(raw / call.soft_cap) ** 2)
    dz = dz.astype(inputs.hidden.dtype)
    head = inputs.head.astype(inputs.hidden.dtype)
    dhidden = jax.lax.dot_general(dz, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    dhead = jax.lax.dot_general(dz, inputs.hidden, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dhidden, dhead, dbias
