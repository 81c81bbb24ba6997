"""token_stats from running sums over the vocabulary, with its gradient by hand: the shared part of the tiled backends.

With the statistics of `reference`, cotangents g of logprob (l), entropy (H), sum_p2 (S), uniform (U) and noise (N):

    dz_v = p_v (a + b log p_v + c p_v) + g_l [v = y] + g_U [v in F] / |F| + g_N n_v
    a = -g_l - g_U - g_N - g_H H - 2 g_S S,   b = -g_H,   c = 2 g_S

so the forward pass keeps a few numbers per token and the backward pass recomputes each tile of logits. A backend has `forward(inputs, call) ->
(sums, saved)` and `backward(inputs, rows, saved, call, dhead) -> (dhidden, dhead, dbias)`, which writes the head's gradient into
`dhead` by `put`; both see one shard, and where there are many tokens one share of them at a time, so that the float32 sum of the hidden
states' gradient is bounded (SHARE). Over a mesh, only the tokens' maximum and sums are exchanged between the vocabulary's shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_llm.distributed import scatter
from jaxrl_llm.kernels.token_stats.definition import Call

TOKEN_AXES = ("data", "fsdp", "expert", "context")
VOCABULARY_AXIS = "tensor"
# Also splits the head's stored width, so that its gradient is scattered over this axis.
WIDTH_AXIS = "fsdp"
# A sum that a mesh scatters has a multiple of this many entries; otherwise TPU's compiler makes a sum that every device holds whole.
ENTRIES = 2048
OUTPUTS = ("logprob", "entropy", "sum_p2", "uniform_logprob")  # outputs of kernels, which have no noise
# Replaces -inf where a difference or a product with 0 must not become NaN.
FLOOR = -1e30

Tree = Mapping[str, jax.Array]


class Share(NamedTuple):
    """Bounds of the tokens that a backend processes at once.

    Attributes:
      tokens: most tokens; with more, a buffer of logits would hold few entries of the vocabulary.
      elements: most elements of the hidden states, whose gradient is summed in float32.
      unit: number of tokens of which shares are multiples where there are several.
    """

    tokens: int
    elements: int
    unit: int


# 16384 tokens are one share up to a width of 3584. Each share but the first rounds the head's gradient once more.
SHARE = Share(tokens=16384, elements=16384 * 3584, unit=256)


class Inputs(NamedTuple):
    """One shard's part of a call.

    Attributes:
      hidden: [T, D]; a backend sees zeros in skipped rows.
      head: [V, D].
      bias: float32 [V], not below FLOOR, or None.
      finite: bool [V], False where the bias is -inf, or None for all True.
      targets: int32 [T] global token ids, -1 for skipped rows.
      words: uint32 [2], the noise's key.
      first_token: global index of row 0.
      first_entry: global index of entry 0.
    """

    hidden: jax.Array
    head: jax.Array
    bias: jax.Array | None
    finite: jax.Array | None
    targets: jax.Array
    words: jax.Array
    first_token: jax.Array
    first_entry: jax.Array


def compute(
    backend: Any,
    arrays: tuple[Float[Array, "T D"], Float[Array, "V D"], Int[Array, " T"]],
    bias: Float[Array, " V"] | None,
    words: UInt32[Array, "2"],
    call: Call,
    mesh: Mesh | None,
) -> dict[str, Float[Array, " T"]]:
    """Returns the statistics of hidden, head and targets (`arrays`) by the backend's tiles, over a mesh where there is one."""
    hidden, head, targets = arrays
    if mesh is not None:
        tokens, entries = _ways(mesh, TOKEN_AXES), _ways(mesh, (VOCABULARY_AXIS,))
        more_tokens, more_entries = -hidden.shape[0] % tokens, -head.shape[0] % entries
        if more_tokens:
            hidden = jnp.pad(hidden, ((0, more_tokens), (0, 0)))
            targets = jnp.pad(targets, (0, more_tokens), constant_values=-1)
        if more_entries:
            bias = jnp.zeros(head.shape[0]) if bias is None else bias
            bias = jnp.pad(bias, (0, more_entries), constant_values=-jnp.inf)
            head = jnp.pad(head, ((0, more_entries), (0, 0)))
        call = replace(call, tokens=hidden.shape[0] // tokens, vocabulary=head.shape[0] // entries)
    out = _stats(backend, call, mesh, hidden, head, bias, targets, words)
    return {name: out[name][: arrays[0].shape[0]] for name in call.outputs}


def _ways(mesh: Mesh, axes: tuple[str, ...]) -> int:
    ways = 1
    for axis in axes:
        ways *= mesh.shape.get(axis, 1)
    return ways


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _stats(
    backend: Any, call: Call, mesh: Mesh | None, hidden: Any, head: Any, bias: Any, targets: Any, words: Any
) -> dict[str, jax.Array]:
    return _stats_forward(backend, call, mesh, hidden, head, bias, targets, words)[0]


def _stats_forward(
    backend: Any, call: Call, mesh: Mesh | None, hidden: Any, head: Any, bias: Any, targets: Any, words: Any
) -> tuple[Any, Any]:
    arrays = (hidden, head, bias, targets, words)
    tokens, entries = _axes(mesh)
    local = partial(_local_forward, backend, call, tokens, entries)
    if mesh is not None:
        row, tile = P(tokens), P(tokens, entries)
        local = jax.shard_map(
            local, mesh=mesh, in_specs=_input_specs(mesh), out_specs=(row, row, tile), check_vma=False
        )
    whole = _exchanged(head, hidden, mesh)
    out, stats, saved = local(hidden, whole, *arrays[2:])
    return out, (arrays, whole, stats, saved)


def _exchanged(head: jax.Array, hidden: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns the head for its products: in their dtype, which may be half as wide, and on TPU gathered over WIDTH_AXIS."""
    if mesh is None:
        return head
    entries, split = _axes(mesh)[1], WIDTH_AXIS if _scattered(head, mesh) else None
    if head.dtype != hidden.dtype:
        # Cast before it is gathered.
        head = jax.lax.with_sharding_constraint(head.astype(hidden.dtype), NamedSharding(mesh, P(entries, split)))
    if split is None or not scatter.by_hand(mesh):
        return head
    gather = partial(scatter.gathered_rows, mesh=mesh, axis=WIDTH_AXIS)
    lies, whole = P(entries, WIDTH_AXIS), P(entries, None)
    return jax.shard_map(gather, mesh=mesh, in_specs=lies, out_specs=whole, check_vma=False)(head)


def _scattered(head: jax.Array, mesh: Mesh | None) -> bool:
    """Returns whether the head's width is split over WIDTH_AXIS."""
    ways = 1 if mesh is None else mesh.shape.get(WIDTH_AXIS, 1)
    return ways > 1 and head.shape[1] % ways == 0


def _stats_backward(backend: Any, call: Call, mesh: Mesh | None, residual: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, whole, stats, saved = residual
    head = arrays[1]
    tokens, entries = _axes(mesh)
    scattered = _scattered(head, mesh)
    local = partial(_local_backward, backend, call, (tokens, entries, mesh if scattered else None))
    if mesh is not None:
        row, tile = P(tokens), P(tokens, entries)
        local = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(_input_specs(mesh), row, tile, row),
            out_specs=(P(tokens, None), P(entries, WIDTH_AXIS if scattered else None), P(entries)),
            check_vma=False,
        )
    dhidden, dhead, dbias = local((arrays[0], whole, *arrays[2:]), stats, saved, cotangents)
    return dhidden, dhead.astype(head.dtype), dbias, None, None


_stats.defvjp(_stats_forward, _stats_backward)


def _axes(mesh: Mesh | None) -> tuple[tuple[str, ...] | None, str | None]:
    """Returns the mesh axes that split tokens and vocabulary, None where no axis does."""
    if mesh is None:
        return None, None
    tokens = tuple(axis for axis in TOKEN_AXES if mesh.shape.get(axis, 1) > 1)
    return tokens or None, VOCABULARY_AXIS if mesh.shape.get(VOCABULARY_AXIS, 1) > 1 else None


def _input_specs(mesh: Mesh) -> tuple[P, ...]:
    tokens, entries = _axes(mesh)
    return P(tokens, None), P(entries, None), P(entries), P(tokens), P()


def _inputs(arrays: tuple[Any, ...], tokens: Any, entries: Any) -> Inputs:
    hidden, head, bias, targets, words = arrays
    zero = jnp.int32(0)
    return Inputs(
        hidden=hidden,
        head=head,
        bias=None if bias is None else jnp.maximum(bias.astype(jnp.float32), FLOOR),
        finite=None if bias is None else jnp.isfinite(bias),
        targets=targets.astype(jnp.int32),
        words=words,
        first_token=zero if tokens is None else jax.lax.axis_index(tokens) * hidden.shape[0],
        first_entry=zero if entries is None else jax.lax.axis_index(entries) * head.shape[0],
    )


def _local_forward(backend: Any, call: Call, tokens: Any, entries: Any, *arrays: Any) -> tuple[Any, Any, Any]:
    """Returns one shard's outputs, the statistics that the backward pass needs, and the backend's residuals."""
    inputs = _inputs(arrays, tokens, entries)
    vocabulary, local_entries = arrays[1].shape[0], arrays[1].shape[0]
    sums, saved = _sums(backend, inputs, call)
    count = jnp.float32(local_entries) if inputs.finite is None else inputs.finite.sum(dtype=jnp.float32)
    if entries is not None:
        sums = rescale(sums, jax.lax.pmax(sums["maximum"], entries), call)
        vocabulary = local_entries * jax.lax.axis_size(entries)
        summed = {name: x for name, x in sums.items() if name != "maximum"}
        summed, count = jax.lax.psum((summed, count), entries)
        sums = {**summed, "maximum": sums["maximum"]}
    out = _outputs(sums, count, call)
    keep = inputs.targets != -1
    known = (inputs.targets >= 0) & (inputs.targets < vocabulary)
    if "logprob" in out:
        out["logprob"] = jnp.where(known, out["logprob"], jnp.nan)
    stats = {
        "maximum": sums["maximum"],
        "log_total": _log_total(sums),
        "known": known,
        "count": jnp.broadcast_to(count, keep.shape),
    }
    stats |= {name: out[name] for name in ("entropy", "sum_p2") if name in out}
    stats |= {name: sums[name] for name in ("noise_total",) if name in sums}
    return {name: jnp.where(keep, out[name], 0.0) for name in call.outputs}, stats, saved


def _shares(call: Call) -> tuple[int, int]:
    """Returns (number, tokens) of the even shares of a call; where they do not divide it, the last one overlaps the one before."""
    most = max(min(SHARE.tokens, SHARE.elements // call.width) // SHARE.unit, 1) * SHARE.unit
    number = -(-call.tokens // most)
    return number, call.tokens if number == 1 else -(-call.tokens // (number * SHARE.unit)) * SHARE.unit


def _share(inputs: Inputs, first: Any, call: Call) -> tuple[Inputs, Call]:
    """Returns the call of the share from `first` on; skipped rows of the hidden states are set to 0."""
    parts, size = _shares(call)
    hidden, targets = (jax.lax.dynamic_slice_in_dim(x, first, size) for x in (inputs.hidden, inputs.targets))
    hidden = jnp.where((targets != -1)[:, None], hidden, 0)
    part = inputs._replace(hidden=hidden, targets=targets, first_token=inputs.first_token + first)
    return part, replace(call, tokens=size, parts=parts)


def _sums(backend: Any, inputs: Inputs, call: Call) -> tuple[dict[str, jax.Array], Any]:
    """Returns the backend's sums of each token, and its residuals for a call of one share."""
    parts, size = _shares(call)
    if parts == 1:
        return backend.forward(*_share(inputs, 0, call))
    starts = jnp.minimum(jnp.arange(parts) * size, call.tokens - size)
    sums = jax.lax.map(lambda first: backend.forward(*_share(inputs, first, call))[0], starts)
    last = call.tokens - (parts - 1) * size
    return {name: jnp.concatenate([x[:-1].reshape(-1), x[-1, -last:]]) for name, x in sums.items()}, None


def _local_backward(
    backend: Any, call: Call, axes: tuple[Any, Any, Mesh | None], arrays: Any, stats: Tree, saved: Any, cotangents: Tree
) -> tuple[Any, Any, Any]:
    """Returns the gradients of hidden, head and bias of one shard, summed over the shards that share them.

    Args:
      axes: the axes that split the tokens, the axis that splits the entries, and the mesh where the head's gradient is scattered.
    """
    tokens, entries, mesh = axes
    inputs = _inputs(arrays, tokens, entries)
    hidden, head, bias = arrays[:3]
    rows = _rows(inputs, stats, cotangents, call)

    parts, size = _shares(call)
    call = replace(call, turned=mesh is not None and scatter.by_hand(mesh))

    def add(i: Any, gradients: Any) -> Any:
        dhidden, dhead, dbias = gradients
        first = jnp.minimum(i * size, call.tokens - size)
        own = {name: jax.lax.dynamic_slice_in_dim(x, first, size) for name, x in rows.items()}
        if parts > 1:
            done = jnp.arange(size) < i * size - first
            own |= {name: jnp.where(done, 0.0, x) for name, x in own.items() if name not in ("maximum", "log_total")}
        part, part_call = _share(inputs, first, call)
        dx, dhead, db = backend.backward(part, own, saved, part_call, dhead)
        if entries is not None:
            dx = jax.lax.psum(dx, entries)
        if parts > 1:
            dx = dx + jax.lax.dynamic_slice_in_dim(dhidden, first, size)
        dhidden = jax.lax.dynamic_update_slice(dhidden, dx.astype(dhidden.dtype), (first, 0))
        return dhidden, dhead, None if dbias is None else dbias + db

    gradients = (
        jnp.zeros_like(hidden),
        _buffer(head, call, head.dtype if tokens is None and parts == 1 else jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    dhidden, dhead, dbias = jax.lax.fori_loop(0, parts, add, gradients) if parts > 1 else add(0, gradients)
    if tokens is not None:
        if mesh is not None:
            dhead = scatter.scattered(dhead, mesh, WIDTH_AXIS, 0 if call.turned else 1)
        others = tuple(axis for axis in tokens if mesh is None or axis != WIDTH_AXIS)
        dhead = jax.lax.psum(dhead, others) if others else dhead
        dhead = dhead.T[: head.shape[0]] if call.turned else dhead
        dbias = jax.lax.psum(dbias, tokens)
    return dhidden, dhead, None if bias is None else dbias.astype(bias.dtype)


def _buffer(head: jax.Array, call: Call, dtype: Any) -> jax.Array:
    """Returns the buffer of the head's gradient: zeros, or on TPU uninitialised memory where one share of tokens writes every entry."""
    shape = (head.shape[1], head.shape[0] + -head.shape[0] % ENTRIES) if call.turned else head.shape
    return jax.lax.empty(shape, dtype) if call.platform == "tpu" and call.parts == 1 else jnp.zeros(shape, dtype)


def _outputs(sums: Tree, count: jax.Array, call: Call) -> dict[str, jax.Array]:
    """Returns the statistics from the sums over the whole vocabulary; differences are taken from the maximum for accuracy."""
    maximum, total = sums["maximum"], sums["total"]
    log_total = _log_total(sums)
    out = {}
    if "logprob" in call.outputs:
        logprob = (
            (sums["target"] - maximum) / call.temperature - log_total if "logprob" not in sums else sums["logprob"]
        )
        out["logprob"] = jnp.where(logprob < FLOOR * 1e-10, -jnp.inf, logprob)
    if "entropy" in call.outputs:
        out["entropy"] = log_total - sums["first"] / total
    if "sum_p2" in call.outputs:
        out["sum_p2"] = sums["square"] / total**2
    if "uniform_logprob" in call.outputs:
        out["uniform_logprob"] = (sums["logit_sum"] / count - maximum) / call.temperature - log_total
    if "noise_logprob" in call.outputs:
        drawn = sums["noise_total"] > 0
        mean = sums["noise_sum"] / jnp.maximum(sums["noise_total"], 1e-30)
        out["noise_logprob"] = jnp.where(drawn, (mean - maximum) / call.temperature - log_total, 0.0)
    return out


def _log_total(sums: Tree) -> jax.Array:
    """Returns the logarithm of the sum of exponentials, computed here unless it is one of a backend's sums."""
    return sums["log_total"] if "log_total" in sums else jnp.log(sums["total"])


def _rows(inputs: Inputs, stats: Tree, cotangents: Tree, call: Call) -> dict[str, jax.Array]:
    """Returns the numbers [T] of the module's equation, a = constant, b = slope, c = square; all 0 where a row is skipped."""
    keep = inputs.targets != -1
    g = {name: jnp.where(keep, cotangents[name], 0.0) / call.temperature for name in call.outputs}
    rows = {"maximum": stats["maximum"], "log_total": stats["log_total"], "constant": jnp.zeros_like(stats["maximum"])}
    if "logprob" in g:
        rows["target"] = jnp.where(stats["known"], g["logprob"], 0.0)
        rows["constant"] -= rows["target"]
    if "entropy" in g:
        rows["slope"] = -g["entropy"]
        rows["constant"] -= g["entropy"] * stats["entropy"]
    if "sum_p2" in g:
        rows["square"] = 2 * g["sum_p2"]
        rows["constant"] -= 2 * g["sum_p2"] * stats["sum_p2"]
    if "uniform_logprob" in g:
        rows["uniform"] = g["uniform_logprob"] / stats["count"]
        rows["constant"] -= g["uniform_logprob"]
    if "noise_logprob" in g:
        drawn = stats["noise_total"] > 0
        rows["noise"] = jnp.where(drawn, g["noise_logprob"] / jnp.maximum(stats["noise_total"], 1e-30), 0.0)
        rows["constant"] -= jnp.where(drawn, g["noise_logprob"], 0.0)
    return rows


def rescale(sums: Tree, maximum: Float[Array, " T"], call: Call) -> dict[str, jax.Array]:
    """Rescales sums that are relative to their own maximum to a larger maximum."""
    shift = (sums["maximum"] - maximum) / call.temperature
    scale = jnp.exp(shift)
    out = {**sums, "maximum": maximum, "total": sums["total"] * scale}
    if "first" in sums:
        out["first"] = (sums["first"] + shift * sums["total"]) * scale
    if "square" in sums:
        out["square"] = sums["square"] * scale**2
    return out


def merge(a: Tree, b: Tree, call: Call) -> dict[str, jax.Array]:
    """Merges the sums over the entries of `a` and of `b`, for those sums that both have."""
    maximum = jnp.maximum(a["maximum"], b["maximum"])
    a, b = rescale(a, maximum, call), rescale(b, maximum, call)
    return {name: maximum if name == "maximum" else a[name] + b[name] for name in a if name in b}


def refusal(call: Call) -> str | None:
    """Returns the reason why no accelerator kernel takes the call, whatever its shapes, or None."""
    if call.dtype != "bfloat16":
        return f"it takes bfloat16 (got {call.dtype})"
    if call.biased or call.soft_cap is not None or call.chunk is not None:
        return "it has no bias, soft_cap or chunk"
    if not set(call.outputs) <= set(OUTPUTS):
        return f"its outputs are {OUTPUTS} (got {call.outputs})"
    return None


def target_logits(inputs: Inputs, entries: int) -> Float[Array, " T"]:
    """Returns h . w of each token's target among the shard's first `entries`, in float32; 0 where the target is not among them."""
    index = inputs.targets - inputs.first_entry
    here = (index >= 0) & (index < entries)
    rows = inputs.head[jnp.where(here, index, 0)].astype(inputs.hidden.dtype)
    products = inputs.hidden.astype(jnp.float32) * rows.astype(jnp.float32)
    return jnp.where(here, products.sum(axis=1), 0.0)


def logit_sums(hidden: Float[Array, "T D"], head: Float[Array, "V D"]) -> Float[Array, " T"]:
    """Returns each token's sum of h . w over the head's entries, by one product with the entries' sum."""
    total = head.sum(axis=0, dtype=jnp.float32)
    return jnp.matmul(hidden.astype(jnp.float32), total, precision=jax.lax.Precision.HIGHEST)


def put(dhead: jax.Array, part: jax.Array, first: Any, call: Call) -> jax.Array:
    """Writes the gradient `part` of the entries from `first` on into `dhead`, added to that of other shares of tokens."""
    part, axis = (part.T, 1) if call.turned else (part, 0)
    if call.parts > 1:
        part = part + jax.lax.dynamic_slice_in_dim(dhead, first, part.shape[axis], axis)
    dhead = jax.lax.dynamic_update_slice_in_dim(dhead, part.astype(dhead.dtype), first, axis)
    return with_layout_constraint(dhead, Layout((0, 1))) if call.turned else dhead


def over_buffers(add: Callable[..., Any], carry: Any, entries: int, unit: int, most: int) -> Any:
    """Calls `add(first, number, carry)` over even shares of the entries, in whole units, of at most `most` entries if a unit is smaller."""
    units = -(-entries // unit)
    size = -(-units // -(-units // max(most // unit, 1))) * unit
    full, rest = divmod(entries, size)
    if full:  # tracing a share larger than all entries would fail
        carry = jax.lax.fori_loop(0, full, lambda i, c: add(i * size, size, c), carry)
    return add(jnp.int32(full * size), rest, carry) if rest else carry
