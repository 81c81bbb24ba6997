"""The statistics of the next-token distribution and their Jacobians in NumPy float64, one token at a time."""

import numpy as np


def logits(hidden, head, bias=None, soft_cap=None, temperature=1.0):
    """(z [T, V], dz/draw [T, V]) of float64 copies of the inputs."""
    raw = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    slope = np.ones_like(raw)
    if soft_cap is not None:
        slope = 1 / np.cosh(raw / soft_cap) ** 2
        raw = soft_cap * np.tanh(raw / soft_cap)
    if bias is not None:
        raw = raw + np.asarray(bias, np.float64)
    return raw / temperature, slope / temperature


def of_token(z, target, noise, outputs):
    """({name: value}, {name: d value / d z [V]}) of one token's logits."""
    finite = np.isfinite(z)
    shifted = np.where(finite, z - z[finite].max(), 0.0)
    weight = np.where(finite, np.exp(shifted), 0.0)
    logp = shifted - np.log(weight.sum())
    p = weight / weight.sum()
    dp = np.diag(p) - np.outer(p, p)  # [v, w] = d p_v / d z_w
    dlogp = np.eye(len(z)) - p[None, :]
    values, slopes = {}, {}

    def mean_logp(name, weights):
        values[name], slopes[name] = float(weights @ logp), weights @ dlogp

    for name in outputs:
        if name == "logprob":
            mean_logp(name, np.eye(len(z))[target])
        elif name == "entropy":
            values[name], slopes[name] = -float(p @ logp), -(logp @ dp + p @ dlogp)
        elif name == "sum_p2":
            values[name], slopes[name] = float(p @ p), 2 * p @ dp
        elif name == "uniform_logprob":
            mean_logp(name, finite / finite.sum())
        elif name == "noise_logprob":
            u = np.where(finite, noise, 0.0)
            u[target] = 0.0
            mean_logp(name, u / max(u.sum(), 1e-300))
    return values, slopes


def statistics(hidden, head, targets, *, outputs, noise, cotangents, bias=None, soft_cap=None, temperature=1.0):
    """({name: [T]}, gradients of sum_name cotangents[name] . output[name] in hidden, head and bias)."""
    z, slope = logits(hidden, head, bias, soft_cap, temperature)
    values = {name: np.zeros(len(targets)) for name in outputs}
    dz = np.zeros_like(z)
    for t, target in enumerate(targets):
        if target == -1:
            continue
        value, slopes = of_token(z[t], target, noise[t], outputs)
        for name in outputs:
            values[name][t] = value[name]
            dz[t] += cotangents[name][t] * slopes[name]
    draw = dz * slope
    h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    h = np.where((np.asarray(targets) == -1)[:, None], 0.0, h)
    return values, (draw @ w, draw.T @ h, dz.sum(axis=0) / temperature)
