"""Attention over packed rows and its gradients in NumPy float64, one query at a time."""

import numpy as np


def sees(q_position, k_position, q_segment, k_segment, window):
    same = q_segment == k_segment and q_segment != 0
    return same and k_position <= q_position and (window is None or q_position - k_position < window)


def attention(q, k, v, positions, segments, g, *, window=None, scale=None):
    """(out [B, T, H, C], (dq, dk, dv)) of sum(g * out); `positions` and `segments` are (of queries, of keys)."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    rows, queries, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    share = heads // k.shape[2]
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(rows):
        for t in range(queries):
            of_query = positions[0][b, t], segments[0][b, t]
            keys = [
                s
                for s in range(k.shape[1])
                if sees(of_query[0], positions[1][b, s], of_query[1], segments[1][b, s], window)
            ]
            if not keys:
                continue
            for h in range(heads):
                own = h // share
                score = scale * k[b, keys, own] @ q[b, t, h]
                p = np.exp(score - score.max())
                p /= p.sum()
                out[b, t, h] = p @ v[b, keys, own]
                dp = v[b, keys, own] @ g[b, t, h]
                ds = scale * p * (dp - p @ dp)
                dq[b, t, h] = ds @ k[b, keys, own]
                dk[b, keys, own] += np.outer(ds, q[b, t, h])
                dv[b, keys, own] += np.outer(p, g[b, t, h])
    return out, (dq, dk, dv)
