"""Rows of sequences that are packed at random, and what the bitwise mode's attention gives each token of them; of tests/gpu_bitwise.py."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.attention.api import attention
from jaxrl_llm.kernels.decode_attention.api import decode_attention
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models.policy import Policy


def differing(one: Any, other: Any) -> int:
    """How many numbers differ in any bit."""
    kind = {2: np.uint16, 4: np.uint32}[np.dtype(one.dtype).itemsize]
    return int((np.asarray(one).view(kind) != np.asarray(other).view(kind)).sum())


def wide(x: Any) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def rows_of(rng: np.random.Generator, lengths: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions, segments, owner) [B, row] of sequences that are packed in a random order, with gaps; owner is -1 at padding."""
    rows: list[list[tuple[int, int]]] = [[]]
    at = 0
    for i in rng.permutation(len(lengths)):
        gap = int(rng.integers(0, 9))
        if at + gap + lengths[i] > row:
            rows.append([])
            at = gap = 0
        rows[-1].append((at + gap, int(i)))
        at += gap + int(lengths[i])
    positions, segments, owner = (np.full((len(rows), row), fill, np.int32) for fill in (0, 0, -1))
    for b, found in enumerate(rows):
        for number, (first, i) in enumerate(found, 1):
            cut = np.s_[b, first : first + lengths[i]]
            positions[cut], segments[cut], owner[cut] = np.arange(lengths[i]), number, i
    return positions, segments, owner


def learned(policy: Policy, params: Any, sequences: Sequence[np.ndarray], row: int) -> list[np.ndarray]:
    """The learner's log-prob of each token of the sequences but the first, from packed rows of so many tokens."""
    positions, segments, owner = rows_of(np.random.default_rng(0), np.array([len(s) - 1 for s in sequences]), row)
    table = np.stack([np.pad(s, (0, row + 1 - len(s))) for s in sequences])
    used = owner >= 0
    tokens, targets = np.where(used, table[owner, positions], 0), np.where(used, table[owner, positions + 1], -1)
    most = int(segments.max())

    @jax.jit
    def read(params: Any, tokens: Any, positions: Any, segments: Any, targets: Any) -> Any:
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=most)
        own = (hidden.reshape(-1, hidden.shape[-1]), policy.head(params), targets.reshape(-1))
        return token_stats(*own, outputs=("logprob",), backend="ordered" if policy.bitwise else None)["logprob"]

    found = np.asarray(read(params, tokens, positions, segments, targets))
    order = [np.flatnonzero(owner == i) for i in range(len(sequences))]  # a sequence lies in one row, in its order
    return [found[at] for at in order]


def spread(values: Sequence[np.ndarray], positions: np.ndarray, owner: np.ndarray) -> jax.Array:
    """Rows whose tokens have the values of their sequence; padding has large numbers."""
    table = np.stack([np.pad(x, ((0, 4096 - len(x)), (0, 0), (0, 0))) for x in values])
    return jnp.asarray(np.where((owner >= 0)[..., None, None], table[owner, positions], 1e3), jnp.bfloat16)


def attention_of(heads: int, kv_heads: int, width: int, window: int | None) -> dict[str, Any]:
    """Differing bits between two packings, and between packed rows and caches; and the error against float64."""
    rng = np.random.default_rng(3)
    lengths = np.concatenate([rng.integers(1, 700, 16), [1, 63, 64, 65, 128, 129, 2000]])
    parts = [[rng.normal(size=(n, h, width)).astype(np.float32) for n in lengths] for h in (heads, kv_heads, kv_heads)]
    found = []
    for row in (2048, 4096):
        positions, segments, owner = rows_of(rng, lengths, row)
        q, k, v = (spread(x, positions, owner) for x in parts)
        most = int(segments.max()) + (row == 4096)
        run = functools.partial(attention, window=window, max_segments=most, backend="ordered")
        out = jax.jit(
            lambda q, k, v, p, s, run=run: run(q, k, v, q_positions=p, k_positions=p, q_segments=s, k_segments=s)
        )(q, k, v, positions, segments)
        out = np.asarray(out)
        found.append(
            [
                np.stack([out[np.where((owner == i) & (positions == t))][0] for t in range(n)])
                for i, n in enumerate(lengths)
            ]
        )
    packings = sum(differing(*both) for both in zip(*found))
    # The last tokens of the sequences in caches, whose other entries are large numbers.
    ends = np.array([int(rng.integers(n)) for n in lengths], np.int32)
    cached = [np.full((2, len(lengths), 2048, kv_heads, width), 1e3, np.float32) for _ in range(2)]
    for i, end in enumerate(ends):
        for cache, part in zip(cached, parts[1:]):
            cache[1, i, : end + 1] = part[i][: end + 1]
    last = np.stack([parts[0][i][end] for i, end in enumerate(ends)])
    run = jax.jit(functools.partial(decode_attention, window=window, backend="ordered"))
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (last, *cached)]
    decoded = np.asarray(run(*arrays, jnp.int32(1), ends))
    errors = []
    for i, end in enumerate(ends):
        q, k, v = (wide(jnp.asarray(x[i], jnp.bfloat16)) for x in parts)
        first = 0 if window is None else max(end + 1 - window, 0)
        k, v = (np.repeat(x[first : end + 1], heads // kv_heads, axis=1) for x in (k, v))
        scores = np.einsum("hc,shc->hs", q[end], k) * width**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        want = np.einsum("hs,shc->hc", weights / weights.sum(axis=1, keepdims=True), v)
        errors.append(np.abs(decoded[i].astype(np.float64) - want).max())
    learned = np.stack([found[0][i][end] for i, end in enumerate(ends)])
    return {"packings": packings, "caches": differing(decoded, learned), "error": float(max(errors))}
