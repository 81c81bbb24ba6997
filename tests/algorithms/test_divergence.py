"""The KL estimators: values, gradients, their expectation, and the controller's arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.divergence import AdaptiveKL, divergence
from jaxrl_llm.algorithms.grpo import GRPO

LOGPROB, REFERENCE = jnp.asarray([-0.5, -1.0, -2.0]), jnp.asarray([-0.7, -0.4, -2.0])
D = np.asarray(REFERENCE, np.float64) - np.asarray(LOGPROB, np.float64)
VALUES = {"k1": -D, "abs": abs(D), "k2": D**2 / 2, "k3": np.exp(D) - D - 1}
GRADIENTS = {"k1": np.ones(3), "abs": -np.sign(D), "k2": -D, "k3": 1 - np.exp(D)}


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_values_and_gradients(estimator):
    name = estimator.removesuffix("+")
    value, pull = jax.vjp(lambda x: divergence(x, REFERENCE, estimator), LOGPROB)
    np.testing.assert_allclose(value, VALUES[name], rtol=1e-5, atol=1e-7)
    expected = GRADIENTS["k2"] if estimator.endswith("+") else GRADIENTS[name]
    np.testing.assert_allclose(pull(jnp.ones(3))[0], expected, rtol=1e-5, atol=1e-7)


def test_k1_and_k3_average_to_the_divergence_and_k2_to_its_gradient():
    """Over all four tokens of two known distributions, in closed form."""
    logits, reference = jnp.asarray([0.3, -0.2, 1.0, 0.1]), jax.nn.log_softmax(jnp.asarray([0.0, 0.5, 0.2, -0.4]))
    p = jax.nn.softmax(logits)
    kl = float(jnp.sum(p * (jnp.log(p) - reference)))

    def expectation(x, estimator):
        return jnp.sum(p * divergence(jax.nn.log_softmax(x), reference, estimator))

    for estimator in ("k1", "k3"):
        np.testing.assert_allclose(expectation(logits, estimator), kl, rtol=1e-5)
    exact = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - reference)))(logits)
    np.testing.assert_allclose(jax.grad(expectation)(logits, "k2"), exact, atol=1e-6)
    np.testing.assert_allclose(jax.grad(expectation)(logits, "k3+"), exact, atol=1e-6)
    np.testing.assert_allclose(jax.grad(expectation)(logits, "k1"), 0, atol=1e-6)


def test_a_token_that_is_impossible_for_the_policy_stays_bounded():
    assert float(divergence(jnp.asarray([-200.0]), jnp.asarray([-1.0]), "k3")[0]) == 10.0
    assert float(divergence(jnp.asarray([-1.0]), jnp.asarray([-200.0]), "k1")[0]) == 20.0


def test_the_controller_moves_the_coefficient_by_at_most_a_fifth_a_horizon():
    control = AdaptiveKL(target=0.1, horizon=100)
    np.testing.assert_allclose(control.update(0.5, kl=0.11, sequences=50), 0.5 * (1 + 0.1 * 0.5))
    np.testing.assert_allclose(control.update(0.5, kl=9.0, sequences=50), 0.5 * (1 + 0.2 * 0.5))
    np.testing.assert_allclose(control.update(0.5, kl=0.0, sequences=100), 0.5 * 0.8)


def test_an_algorithm_passes_its_measured_divergence_to_the_controller():
    algorithm = GRPO(kl_coef=0.5, kl_controller=AdaptiveKL(target=0.1, horizon=100))
    assert algorithm.controls == {"kl_coef": 0.5}
    moved = algorithm.adapt({"kl_coef": 0.5}, {"kl/reference_before": 0.11}, 50)
    np.testing.assert_allclose(moved["kl_coef"], 0.525)
    assert GRPO(kl_coef=0.5).adapt({"kl_coef": 0.5}, {}, 50) == {"kl_coef": 0.5}


def test_bad_settings_are_refused_by_their_binding():
    with pytest.raises(ValueError, match=r"divergence\.AdaptiveKL\.horizon must be above a fifth of a step's 500"):
        AdaptiveKL(target=0.1, horizon=100.0).update(0.5, 0.0, 500)
    with pytest.raises(ValueError, match=r"divergence\.AdaptiveKL\.target"):
        AdaptiveKL(target=0.0, horizon=10.0)
    with pytest.raises(ValueError, match=r"grpo\.GRPO\.kl_coef"):
        GRPO(kl_controller=AdaptiveKL(target=0.1, horizon=10.0))
