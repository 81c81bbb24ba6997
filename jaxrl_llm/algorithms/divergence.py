"""Estimators of the KL divergence from a sampled token's two log-probs, and the controller of its coefficient.

With d = log pi_ref - log pi and tokens drawn from pi: k1 = -d, abs = |d|, k2 = d^2 / 2, k3 = exp(d) - d - 1
(http://joschu.net/blog/kl-approx.html). k1 and k3 estimate KL(pi || pi_ref), but the gradient of neither does: k1's
has mean zero and k3's is that of KL(pi_ref || pi). k2's gradient is the right one; a trailing "+" keeps the value and
takes k2's gradient (straight-through). d is clipped to +-20 and k3 to 10, so that one token cannot overflow the loss.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from jaxrl_llm import components

Estimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


def absolute(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns |x| with gradient 0 at 0, so that a policy that has not moved is not pushed either way."""
    return x * stop_gradient(jnp.sign(x))


def divergence(
    logprob: Float[Array, "*shape"], reference: Float[Array, "*shape"], estimator: Estimator
) -> Float[Array, "*shape"]:
    """Returns a per-token estimate of KL(pi || pi_ref); `logprob` is of the policy that drew the token.

    Raises:
      ValueError: an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is not one of {ESTIMATORS}")
    d = jnp.clip(reference - logprob, -20.0, 20.0)
    k2 = 0.5 * jnp.square(d)
    name = estimator.removesuffix("+")
    value = {"k1": -d, "abs": absolute(d), "k2": k2, "k3": jnp.minimum(jnp.expm1(d) - d, 10.0)}[name]
    return k2 + stop_gradient(value - k2) if estimator.endswith("+") else value


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """Moves the KL coefficient so that the measured KL approaches a target (Ziegler et al.,
    https://arxiv.org/abs/1909.08593).

    coef <- coef x (1 + clip(kl / target - 1, -0.2, 0.2) x sequences / horizon)

    Attributes:
      target: the KL per token aimed at, in nats.
      horizon: sequences over which a lasting error of 20 % changes the coefficient by 20 %.
    """

    target: float
    horizon: float

    def __post_init__(self) -> None:
        components.above(self, 0, "target", "horizon")

    def update(self, coef: float, kl: float, sequences: int) -> float:
        """Returns the coefficient after a batch of `sequences` whose mean KL per token was `kl`.

        Raises:
          ValueError: the horizon is so short that a step may turn the coefficient's sign.
        """
        if sequences >= 5 * self.horizon:
            components.refuse(self, "horizon", f"above a fifth of a step's {sequences} sequences")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * sequences / self.horizon)
