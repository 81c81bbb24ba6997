"""The canary: tests that a server computes what the learner computes, within a derived limit of rounding (NumPy only).

After each update the learner and the server score one fixed text. At position t the learner names its most likely next token, of
probability p(t); the server returns its probability q(t) of that token, 0 where it is not among its `LISTED` most likely ones. The test
compares

    ratio = sum over t of |p(t) - q(t)|  /  sum over t of p(t)

and passes where ratio <= limit. The ratio is the mean of |importance weight - 1| over the learner's most likely tokens, weighted by
their probabilities, so it measures what learning depends on. The text's own tokens have no part in it: the log-prob of an improbable
one is a difference of large logits, whose rounding error grows with every update that makes the policy sharper.

The limit is the largest ratio that rounding explains. Let u be the unit roundoff of the coarser of the two computations (2^-8 in
bfloat16), L the number of layers and S(t) the standard deviation of the logits over the vocabulary at position t. The residual stream
is rounded at each of its 2 L additions, by 0.4 u of its size (the rms of a rounding), which adds up to 0.4 u sqrt(2 L); the roundings
inside the blocks add twice that, and the two computations differ by sqrt(2) times the error of one: 1.2 u sqrt(2 L + 4) of the size of
the hidden state, with 4 for embedding, final norm and head. Logits are linear in it, so log-odds are wrong by a noise of standard
deviation s(t) = 1.2 u sqrt(2 L + 4) S(t), and

    limit = sum over t of |p(t) - p'(t)|  /  sum over t of p(t)  +  1e-4,    p'(t): p(t) with its log-odds lowered, or raised, by 4 s(t)

(whichever changes it more), as if every position were wrong by four standard deviations in the same step; 1e-4 is for sums in float32
that are taken in another order. A sharper policy widens S and saturates positions at the same rate, so the limit stays about the same.

A server that quantizes to fp8 (e4m3, v = 2^-4) rounds both factors of each product of its layers: 0.4 v of each, 0.57 v of the product,
0.8 v of what a block of two products adds to the stream, whose errors and sizes both add up in squares: 0.8 v of the hidden state, and
twice that after later blocks. The noise is therefore 2 v S(t), in addition to the rounding to 16 bits and independent of it. Four deviations
at every position at once would let anything pass; the mean of |error| is 0.8 of a deviation, and two are allowed: log-odds are moved by
sqrt((4 * 1.2 u)^2 (2 L + 4) + (2 * 2 v)^2) S(t). SmolLM2-135M (30 layers, S = 3.0) by vLLM 0.32 with fp8_per_channel: one deviation is
0.120 S where this derivation gives 0.130 S, and the ratio is 0.045, the limit 0.19 (in bfloat16 alone 0.029 S, 0.038 S, 0.011 and
0.084). So the canary of such a server catches gross errors; the exact comparisons catch the rest.

Measured with Qwen2.5-Coder-0.5B (S = 2.3) in bfloat16, by two implementations of attention, logits times 1, 2, 4 and 8: ratios 0.0046,
0.0033, 0.0034, 0.0043, while the largest difference of a log-prob of the text is 0.5, 1.1, 2.1 and 4.3 nats. Two neighbouring layers
exchanged: 0.075; others: 0.78 to 1. A rope base of 1e4 in place of 1e6: 0.066. A flipped exponent bit: 1. A stale bias or the version
before hide in the rounding: the checksums of the server's weights detect those exactly (`publication.held_weights`). A setting that
changes little hides too, such as a base of 10,000 in place of 15,000: the server compares its config.json with the learner's
(`publication.forward`).
"""

from dataclasses import dataclass

import numpy as np

from jaxrl_llm.publication.manifest import Canary

LISTED = 8  # number of most likely tokens that a server lists at each position; a rounded argmax of the learner is among them
_ROUNDOFFS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_NOISE, _DEVIATIONS, _SUMS = 1.2, 4.0, 1e-4
_FP8_NOISE, _FP8_DEVIATIONS = 2 * 2.0**-4, 2.0


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference of a server from the learner on the canary.

    Attributes:
      ratio: the tested ratio; NaN where the server returned NaN.
      mean: mean |difference| of the log-probs of the text's own tokens, nats; for people to read.
      max: the largest of those differences, nats; for people to read.
      likely: mean probability of the learner's most likely token.
    """

    ratio: float
    mean: float
    max: float
    likely: float


def limit(likely: np.ndarray, spread: np.ndarray, layers: int, dtypes: tuple[str, ...], fp8: bool = False) -> float:
    """Returns the largest ratio that rounding explains.

    Args:
      likely: float [P], log-prob of the learner's most likely token at each of P positions, nats.
      spread: float [P], standard deviation of its logits over the vocabulary.
      layers: number of the model's layers.
      dtypes: element types in which learner and server compute and store weights.
      fp8: whether the server quantizes its layers to fp8.
    """
    roundoff = max(_ROUNDOFFS[dtype] for dtype in dtypes)
    p = np.exp(likely.astype(np.float64))
    noise = _DEVIATIONS * _NOISE * roundoff * np.sqrt(2 * layers + 4)
    noise = np.hypot(noise, _FP8_DEVIATIONS * _FP8_NOISE) if fp8 else noise
    reach = np.exp(noise * spread.astype(np.float64))
    lower, higher = p / (p + (1 - p) * reach), p / (p + (1 - p) / reach)
    return float(np.maximum(p - lower, higher - p).sum() / p.sum() + _SUMS)


def gap(canary: Canary, text: np.ndarray, likely: np.ndarray) -> Gap:
    """Compares a server with the learner at the P positions that are followed by a token.

    Args:
      canary: the learner's scores of them.
      text: float [P], the server's log-prob of each token of the text but the first, nats.
      likely: float [P], the server's log-prob of each of the learner's most likely tokens, nats; -inf where it is not among its own first ones.
    """
    by_learner, by_server = np.exp(np.asarray(canary.likely_logprobs)), np.exp(likely)
    apart = np.abs(text - np.asarray(canary.logprobs))
    return Gap(
        ratio=float(np.abs(by_learner - by_server).sum() / by_learner.sum()), mean=float(apart.mean()),
        max=float(apart.max()), likely=float(by_learner.mean()),
    )  # fmt: skip
