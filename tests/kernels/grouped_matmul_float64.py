"""grouped_matmul and expert_mlp, and their gradients, by loops in float64 NumPy: what the tests of every backend compare with."""

from typing import Any

import numpy as np

# Rows of 8 experts. Sizes around the edges of tiles are in the last one.
SIZES = {
    "equal": [16] * 8,
    "many empty": [0, 40, 0, 0, 0, 0, 77, 0],
    "first and last empty": [0, 20, 30, 1, 2, 3, 40, 0],
    "all in one": [0, 0, 0, 128, 0, 0, 0, 0],
    "one each": [1] * 8,
    "fewer than the rows": [3, 0, 20, 5, 0, 9, 1, 7],
    "none at all": [0] * 8,
    "edges of tiles": [63, 64, 65, 127, 128, 129, 1, 0],
}


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def grouped(x: Any, w: Any, sizes: Any, dy: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dw of rows sorted by expert; rows past the sizes' sum are 0."""
    x, w, dy = wide(x), wide(w), wide(dy)
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    begin = 0
    for expert, size in enumerate(np.asarray(sizes)):
        mine = slice(begin, begin + size)
        y[mine], dx[mine] = x[mine] @ w[expert], dy[mine] @ w[expert].T
        dw[expert] = x[mine].T @ dy[mine]
        begin += size
    return y, dx, dw


def mlp(x: Any, gate_up: Any, down: Any, experts: Any, weights: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """y, and the gradients of x, gate_up, down and weights, one token and expert at a time."""
    x, gate_up, down, weights, dy = map(wide, (x, gate_up, down, weights, dy))
    y, dx, dgate_up, ddown, dweights = (np.zeros(a.shape) for a in (x, x, gate_up, down, weights))
    for t, row in enumerate(np.asarray(experts)):
        for j, e in enumerate(row):
            if not 0 <= e < len(down):
                continue
            g, u = x[t] @ gate_up[e, :, 0], x[t] @ gate_up[e, :, 1]
            share = 1 / (1 + np.exp(-g))
            h = g * share * u
            out = h @ down[e]
            y[t] += weights[t, j] * out
            dweights[t, j] = dy[t] @ out
            dout = weights[t, j] * dy[t]
            ddown[e] += np.outer(h, dout)
            dh = down[e] @ dout
            dg, du = dh * u * share * (1 + g * (1 - share)), dh * g * share
            dgate_up[e, :, 0] += np.outer(x[t], dg)
            dgate_up[e, :, 1] += np.outer(x[t], du)
            dx[t] += gate_up[e, :, 0] @ dg + gate_up[e, :, 1] @ du
    return y, dx, dgate_up, ddown, dweights
