"""Whether a sequence without advantages adds nothing to a loss is said by each policy gradient, and is so."""

import importlib
import pkgutil

import algorithm_cases as cases
import numpy as np
import pytest

import jaxrl_llm.algorithms
from jaxrl_llm.algorithms.cispo import CISPO
from jaxrl_llm.algorithms.dro import DRO
from jaxrl_llm.algorithms.grpo import GRPO, PolicyGradient
from jaxrl_llm.algorithms.kl_cov import KLCov
from jaxrl_llm.algorithms.ppo import PPO

for module in pkgutil.iter_modules(jaxrl_llm.algorithms.__path__):
    importlib.import_module(f"jaxrl_llm.algorithms.{module.name}")


def concrete(cls):
    """All policy gradients of the package."""
    found = [] if cls.__abstractmethods__ else [cls]
    return found + [c for sub in cls.__subclasses__() for c in concrete(sub) if c.__module__.startswith("jaxrl_llm.")]


def silent_case(algorithm):
    """(batch of all sequences, batch of those that speak, their rows, outputs) where two of five groups have no advantage."""
    sequences = cases.make_sequences()
    if "greedy" in algorithm.needs:
        first = np.diff(np.asarray(sequences.group), prepend=-1) > 0
        sequences = cases.make_sequences(greedy=cases.jnp.asarray(first))
    assigned = algorithm.advantages(sequences)
    quiet = np.isin(np.asarray(sequences.group), (1, 3))
    assigned = cases.Advantages(**{**assigned.__dict__, "advantages": np.where(quiet[:, None], 0, assigned.advantages)})
    assert np.asarray(assigned.loss_mask)[quiet].any()
    np.testing.assert_array_equal(np.asarray(assigned.silent)[quiet], True)
    kept = np.flatnonzero(~np.asarray(assigned.silent))
    whole = cases.make_batch(sequences, assigned, algorithm.constant)
    part = cases.make_batch(sequences, assigned, algorithm.constant, [[int(i)] for i in kept])
    return whole, part, kept, cases.make_outputs(sequences)


def rows_of(outputs, rows):
    return {model: {n: x[rows] for n, x in stats.items()} for model, stats in outputs.items()}


ALL = sorted(concrete(PolicyGradient), key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", [c for c in ALL if c().silent], ids=lambda cls: cls.__name__)
def test_sequences_without_advantages_can_be_left_out(cls):
    algorithm = cls()
    whole, part, kept, outputs = silent_case(algorithm)
    value, gradient = cases.value_and_gradient(algorithm, outputs, whole)
    found, rest = cases.value_and_gradient(algorithm, rows_of(outputs, kept), part)
    assert len(kept) < len(gradient) and np.abs(gradient[kept]).max() > 0
    np.testing.assert_array_equal(np.delete(gradient, kept, axis=0), 0)
    np.testing.assert_allclose(rest, gradient[kept], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "algorithm",
    [DRO(), KLCov(share=0.9), GRPO(entropy_coef=0.1), GRPO(kl_coef=0.1), CISPO(kl_coef=0.1), PPO()],
    ids=["DRO", "KLCov", "GRPO entropy", "GRPO KL", "CISPO KL", "PPO"],
)
def test_those_that_say_otherwise_add_to_the_loss(algorithm):
    assert not algorithm.silent
    if algorithm.needs & {"entropy", "critic"}:
        return  # their terms are no function of log-probs alone
    whole, _, kept, outputs = silent_case(algorithm)
    _, gradient = cases.value_and_gradient(algorithm, outputs, whole)
    assert np.abs(np.delete(gradient, kept, axis=0)).max() > 1e-4


def test_a_divergence_in_the_reward_adds_nothing_where_the_advantage_is_zero():
    assert GRPO(kl_coef=0.1, kl_in="reward").silent


def test_every_policy_gradient_is_looked_at():
    assert len(ALL) >= 18 and {cls.__name__ for cls in ALL if not cls().silent} == {"DRO", "KLCov", "PPO"}
