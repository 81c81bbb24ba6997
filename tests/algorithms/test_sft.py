"""Supervised fine-tuning, expert iteration and distillation: losses and gradients by hand."""

import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, value_and_gradient

from jaxrl_llm.algorithms.distill import Distill
from jaxrl_llm.algorithms.expert_iteration import ExpertIteration
from jaxrl_llm.algorithms.sft import SFT


@pytest.mark.parametrize(("aggregation", "constant"), [("token-mean", None), ("constant", 50), ("token-sum", None)])
def test_the_loss_is_the_negative_log_prob_of_the_mask(aggregation, constant):
    sequences = make_sequences(1)
    algorithm = SFT(aggregation=aggregation, constant_length=constant or 1)
    assigned = algorithm.advantages(sequences)
    outputs = make_outputs(sequences)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, algorithm.constant))
    mask = np.asarray(sequences.mask)
    count = {"token-mean": mask.sum(), "constant": 50 * mask.any(1).sum(), "token-sum": 1}[aggregation]
    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    np.testing.assert_allclose(value, -logprob[mask].sum() / count, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.where(mask, -1 / count, 0), rtol=1e-6)


def test_it_learns_from_demonstrations_and_asks_for_nothing():
    assert SFT().learns_from == "demonstrations"
    assert SFT().needs == frozenset()
    assert SFT().group_size_at_least == 1


def test_expert_iteration_imitates_the_good_samples_alone():
    sequences = make_sequences(1)
    algorithm = ExpertIteration(threshold=0.1)
    assigned = algorithm.advantages(sequences)
    good = (np.asarray(sequences.reward) >= np.float32(0.1))[:, None] & np.asarray(sequences.mask)
    assert 0 < good.any(1).sum() < len(good) - 1
    value, gradient = value_and_gradient(
        algorithm, outputs := make_outputs(sequences), make_batch(sequences, assigned, 1.0)
    )
    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    np.testing.assert_allclose(value, -logprob[good].mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.where(good, -1 / good.sum(), 0), rtol=1e-6)
    np.testing.assert_allclose(assigned.metrics["expert/kept_fraction"], good.any(1)[:-1].mean(), rtol=1e-6)
    assert algorithm.learns_from == "samples"


def test_distillation_credits_each_token_by_the_teachers_log_ratio():
    sequences = make_sequences(1)
    assigned = Distill().advantages(sequences)
    gap = np.asarray(sequences.teacher_logprobs, np.float64) - np.asarray(sequences.old_logprobs, np.float64)
    np.testing.assert_allclose(assigned.advantages, np.where(np.asarray(sequences.mask), gap, 0), rtol=1e-5, atol=1e-6)
    assert Distill().needs == {"teacher"}
    with pytest.raises(ValueError, match=r"distill\.Distill\.kl_in"):
        Distill(kl_coef=0.1, kl_in="reward")
