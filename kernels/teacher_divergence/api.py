"""Computes the divergence of a teacher's next-token distribution from the policy's in tiles of tokens, by XLA on any device.

The working memory is a tile's float32 logits of both models and its gradient, whatever T; the backward pass recomputes each tile.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.teacher_divergence.reference import of_log_probs
from jaxrl_llm.kernels.token_stats.definition import product
from jaxrl_llm.kernels.token_stats.fused import FLOOR, TOKEN_AXES, VOCABULARY_AXIS
from jaxrl_llm.kernels.token_stats.xla import BUDGETS

Pair = tuple[jax.Array, jax.Array]  # hidden states [T, D] and head [V, D] of one model, with its own D and V


def teacher_divergence(
    policy: Pair,
    teacher: Pair,
    targets: Int[Array, " T"],
    *,
    mixture: float,
    temperature: float = 1.0,
    tile: int | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, " T"]:
    """Computes the divergence of the teacher's softmax from the policy's over the whole vocabulary, as defined in `reference`.

    Differentiable in the policy's hidden states and head. The models' widths may differ; where the heads have different lengths,
    entries that one of them lacks are left out of both.

    Args:
      policy: final hidden states [T, D] and output embedding [V, D].
      teacher: those of the teacher, [T, E] and [V, E], which get no gradient.
      targets: -1 skips the row: exact zeros, zero gradients; other values do not matter.
      mixture: 0 is the forward KL divergence, 1 the reverse one; values between are the generalised Jensen-Shannon divergence.
      temperature: divisor of both models' logits, > 0.
      tile: tokens of a tile; None chooses automatically.
      mesh: splits tokens over the axes data, fsdp and context and the heads over tensor; None, or a mesh of one device, runs on one
        device.

    Raises:
      ValueError: shapes or values do not fit.
    """
    _check(policy, teacher, targets, mixture, temperature)
    mesh = None if mesh is not None and mesh.size == 1 else mesh
    entries = min(policy[1].shape[0], teacher[1].shape[0])
    heads = policy[1][:entries], jax.lax.stop_gradient(teacher[1][:entries])
    hiddens = policy[0], jax.lax.stop_gradient(teacher[0])
    over = {name: 1 if mesh is None else mesh.shape.get(name, 1) for name in (*TOKEN_AXES, VOCABULARY_AXIS)}
    shards, ways = math.prod(over[name] for name in TOKEN_AXES), over[VOCABULARY_AXIS]
    tokens = len(targets)
    hiddens = _padded(hiddens[0], -tokens % shards), _padded(hiddens[1], -tokens % shards)
    targets = _padded(targets, -tokens % shards, -1)
    heads = _padded(heads[0], -entries % ways), _padded(heads[1], -entries % ways)
    platform = dispatch.device().platform if mesh is None else mesh.devices.flat[0].platform
    local = -(-tokens // shards), -(-entries // ways)
    tile = max(min(tile or BUDGETS[platform].elements // local[1], local[0]), 1)
    compute = partial(
        _of_shard,
        mixture=mixture,
        temperature=temperature,
        tile=tile,
        entries=entries,
        over=None if ways == 1 else VOCABULARY_AXIS,
    )
    if mesh is not None:
        row = P(tuple(name for name in TOKEN_AXES if over[name] > 1) or None)
        rows, head = P(*row, None), P(VOCABULARY_AXIS if ways > 1 else None, None)
        specs = ((rows, rows), (head, head), row)
        compute = jax.shard_map(compute, mesh=mesh, in_specs=specs, out_specs=row, check_vma=False)
    return compute(hiddens, heads, targets)[:tokens]


def _check(policy: Pair, teacher: Pair, targets: jax.Array, mixture: float, temperature: float) -> None:
    for name, (hidden, head) in {"policy": policy, "teacher": teacher}.items():
        if hidden.shape != (len(targets), head.shape[1]) or 0 in (*hidden.shape, *head.shape):
            raise ValueError(
                f"the {name} needs hidden states [T, D] for T = {len(targets)} targets and a head [V, D] (got {hidden.shape} and {head.shape})"
            )
    if not 0 <= mixture <= 1:
        raise ValueError(f"mixture must be in [0, 1] (got {mixture})")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite (got {temperature})")


def _padded(x: jax.Array, more: int, fill: int = 0) -> jax.Array:
    """Appends `more` rows of `fill` to `x`."""
    return jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)), constant_values=fill) if more else x


def _of_shard(
    hiddens: tuple[jax.Array, jax.Array],
    heads: tuple[jax.Array, jax.Array],
    targets: jax.Array,
    *,
    mixture: float,
    temperature: float,
    tile: int,
    entries: int,
    over: str | None,
) -> jax.Array:
    """Returns the divergences of one shard's tokens, tile by tile."""
    own = heads[0].shape[0]
    first = 0 if over is None else jax.lax.axis_index(over) * own
    known = jnp.arange(own) + first < entries

    @jax.checkpoint
    def of_tile(rows: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, other, target = rows
        keep = target != -1
        q, p = (
            _log_softmax(product(jnp.where(keep[:, None], x, 0), head), known, temperature, over)
            for x, head in zip((hidden, other), heads, strict=True)
        )
        total = jnp.where(known, of_log_probs(jax.lax.stop_gradient(p), q, mixture), 0.0).sum(axis=1)
        return jnp.where(keep, total if over is None else jax.lax.psum(total, over), 0.0)

    count = targets.shape[0]
    whole = (*(_padded(x, -count % tile) for x in hiddens), _padded(targets, -count % tile, -1))
    tiles = jax.tree.map(lambda x: x.reshape(-1, tile, *x.shape[1:]), whole)
    return jax.lax.map(of_tile, tiles).reshape(-1)[:count]


def _log_softmax(z: jax.Array, known: jax.Array, temperature: float, over: str | None) -> jax.Array:
    """Returns the log-probs of a tile's own entries, float32 [b, V]; the other entries are on the shards of the axis `over`."""
    z = jnp.where(known, z, FLOOR)
    most = jax.lax.stop_gradient(z).max(axis=1)
    if over is not None:
        most = jax.lax.pmax(most, over)
    centred = (z - most[:, None]) / temperature
    total = jnp.exp(centred).sum(axis=1)
    if over is not None:
        total = jax.lax.psum(total, over)
    return jnp.where(known, centred - jnp.log(total)[:, None], 0.0)
