"""Diagnostics of a step's rollouts, computed on the host: rewards, lengths, and the log-prob gap between sampler and learner."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.correction import GAP_SIZES
from jaxrl_llm.learner.batch import Batch, stretches
from jaxrl_llm.metrics import flops

_log = logging.getLogger(__name__)


def of_rollouts(batch: Batch) -> dict[str, float]:
    """Returns a step's rewards by part, lengths, truncation and packing; greedy and invalid rollouts are left out of the rewards and lengths."""
    kept = [(g, np.flatnonzero(g.valid() & [r.role == "sample" for r in g.rollouts])) for g in batch.groups]
    totals = [g.total()[rows] for g, rows in kept]
    answers = [g.rollouts[i] for g, rows in kept for i in rows.tolist()]
    names = sorted({n for g in batch.groups for n in g.scores.parts})
    allocated = sum(rows.segments.size for rows in batch.rows)
    tokens = sum(int(np.sum(rows.segments > 0)) for rows in batch.rows)
    values = {
        "batch/sequences": float(len(batch.rollouts)),
        "batch/microbatches": float(len(batch.rows)),
        "batch/fill": tokens / max(allocated, 1),
        "batch/tokens": float(tokens),
        "batch/response_tokens": float(sum(int(r.mask.sum()) for r in batch.rollouts)),
    }
    if not answers or not any(not n.startswith("log/") for n in names):
        return values
    lengths = np.array([len(r.tokens) for r in answers])
    values |= {
        "reward/mean": float(np.mean(np.concatenate(totals))),
        "reward/std": float(np.std(np.concatenate(totals))),
        "reward/group_std": float(np.mean([np.std(t) for t in totals if len(t)])),
        "response/length": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([r.finish == "length" for r in answers])),
        "groups/no_signal": float(np.mean([len(t) == 0 or np.ptp(t) == 0 for t in totals])),
    }
    for name in names:  # a part with weight 0 may be invalid where the total is valid
        scores = [
            (g.scores.parts[name][rows], g.scores.valid[name][rows]) for g, rows in kept if name in g.scores.parts
        ]
        had = np.concatenate([part[np.asarray(valid, bool)] for part, valid in scores])
        if len(had):
            values[f"reward/{name}"] = float(had.mean())
    return values


def gap(batch: Batch, stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compares the learner's log-prob with the sampler's over the tokens that the policy sampled: mean |difference|, p99, max and k3 (nats).

    It also counts the tokens compared, those of which any bit differs, and those whose difference is above each of GAP_SIZES.
    """
    mask = _drawn(batch)
    if not mask.any():
        return {}
    ours, theirs = stats["old_logprobs"][mask], batch.fields["sampler_logprobs"][mask]
    bits = [x.astype(np.float32).view(np.int32) for x in (ours, theirs)]
    d = (ours - theirs).astype(np.float64)
    size = np.abs(d)
    k3 = np.expm1(np.clip(d, -20, 20)) - d  # KL(sampler || learner), Schulman's unbiased estimator
    return {
        "gap/mean": float(size.mean()),
        "gap/p99": float(np.quantile(size, 0.99)),
        "gap/max": float(size.max()),
        "gap/k3": float(k3.mean()),
        "gap/compared": float(len(d)),
        "gap/differing": float((bits[0] != bits[1]).sum()),
        **{name: float((size > edge).sum()) for name, edge in GAP_SIZES.items()},
        "entropy/mean": float(stats["entropy"][mask].mean()),
        "logprob/mean": float(stats["old_logprobs"][mask].mean()),
    }


def staleness(batch: Batch, stats: Mapping[str, np.ndarray], version: int) -> dict[str, float]:
    """Returns the staleness of the sampled tokens, in policy versions behind `version`, and the mean log-prob gap by staleness.

    The gap needs the learner's log-probs and is left out without them.
    """
    mask = _drawn(batch)
    if not mask.any():
        return {}
    stale = version - batch.tokenwise([r.versions for r in batch.rollouts], np.int32)[mask]
    values = {"staleness/mean": float(stale.mean()), "staleness/max": float(stale.max())}
    if "old_logprobs" not in stats:
        return values
    size = np.abs(stats["old_logprobs"] - batch.fields["sampler_logprobs"])[mask]
    return values | {f"gap/lag{n}": float(size[stale == n].mean()) for n in np.unique(stale).tolist()}


def drift(batch: Batch, stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns KL(policy || reference) over the tokens that the policy sampled (k3 estimator, nats); empty without a reference."""
    mask = _drawn(batch)
    if "ref_logprobs" not in stats or not mask.any():
        return {}
    d = (stats["ref_logprobs"] - stats["old_logprobs"])[mask].astype(np.float64)
    return {"drift/kl": float((np.expm1(np.clip(d, -20, 20)) - d).mean())}


def inside(batch: Batch, stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns entropy and log-prob of the sampled tokens under the logits of a state inside the model (nats)."""
    mask = _drawn(batch)
    if not mask.any():
        return {}
    return {
        "inside/entropy": float(stats["entropy"][mask].mean()),
        "inside/logprob": float(stats["old_logprobs"][mask].mean()),
    }


def by_source(batch: Batch, stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns mean entropy by the prompts' source, where the batch has several sources (nats)."""
    mask, source = _drawn(batch), batch.fields["source"]
    there = {name: mask & (source == i)[:, None] for i, name in enumerate(batch.sources)}
    if len(there) < 2:
        return {}
    return {f"entropy/{name}": float(stats["entropy"][m].mean()) for name, m in there.items() if m.any()}


def _drawn(batch: Batch) -> np.ndarray:
    """Returns bool [S, T]: True for tokens that the policy sampled; greedy answers and a dataset's are left out."""
    own = batch.per_sequence([r.role == "sample" for r in batch.rollouts], bool, False)
    return batch.fields["mask"] & own[:, None]


def check_gradients(skipped: int, most: int, metrics: Mapping[str, float]) -> None:
    """Raises FloatingPointError where more than `most` updates in a row had a gradient that was not finite."""
    if skipped > most:
        raise FloatingPointError(
            f"{skipped} updates in a row had a gradient that is not finite (loss {metrics['loss/total']}): lower "
            "Optimizer.learning_rate, or look at the last rollouts; the checkpoints from before are whole"
        )


def check_gap(metrics: Mapping[str, float], *, warn: float, stop: float) -> None:
    """Warns where sampler and learner disagree by more than `warn` nats a token on average.

    Raises:
      FloatingPointError: they disagree by more than `stop`.
    """
    if (size := metrics.get("gap/mean", 0.0)) > stop:
        raise FloatingPointError(
            f"learner and sampler disagree by {size:.3g} nats a token on average, more than Stage.gap_stop={stop}: "
            "is the sampler's model, dtype or temperature another one?"
        )
    known = [int(name.removeprefix("gap/lag")) for name in metrics if name.startswith("gap/lag")]
    stale = min(known, default=0)
    # Part of the gap of stale tokens, or of tokens after such, is what the policy has learned since.
    learned = f", on tokens of {stale} versions before, part of which was learned since" if stale else ""
    after = "" if stale or len(known) < 2 else "; where weights changed in mid-response, part of it was learned since"
    if (size := metrics.get(f"gap/lag{stale}", size)) > warn:
        _log.warning(
            "learner and sampler disagree by %.3g nats a token on average%s (Stage.gap_warn=%g)%s",
            size, learned, warn, after,
        )  # fmt: skip


def speed(
    batch: Batch,
    architecture: Any,
    epochs: int,
    seconds: Mapping[str, float],
    devices: Sequence[Any],
    layers: int | None = None,
) -> dict[str, float]:
    """Returns the tokens a second of the step without its evaluation, and the update's model FLOP/s, with MFU where the device's peak is known.

    Args:
      batch: the step's sequences.
      architecture: sizes of the policy.
      epochs: passes over the batch.
      seconds: {"step": whole step, "update": its updates, "evaluate": its evaluation}.
      devices: those of the learner's mesh.
      layers: number of first layers that the updates ran; None for all.
    """
    working = max(seconds["step"] - seconds.get("evaluate", 0.0), 1e-9)
    lengths = [stretch.positions for g in batch.groups for r in g.rollouts for stretch in stretches(r)]
    model_flops = epochs * flops.update(architecture, lengths, layers=layers)
    values = {
        "speed/tokens_per_s": sum(lengths) / working,
        "speed/update_tflops": model_flops / max(seconds["update"], 1e-9) / 1e12,
    }
    if (peak := flops.peak(devices[0].device_kind)) is not None:
        values["speed/mfu"] = flops.mfu(model_flops, seconds["update"], len(devices), peak)
    return values
