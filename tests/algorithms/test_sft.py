"""Supervised fine-tuning: its loss and gradient by hand."""

import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_view, value_and_gradient

from jaxrl_llm.algorithms.sft import SFT


@pytest.mark.parametrize(("aggregation", "constant"), [("token-mean", None), ("constant", 50), ("token-sum", None)])
def test_the_loss_is_the_negative_log_prob_of_the_mask(aggregation, constant):
    view = make_view(1)
    algorithm = SFT(aggregation=aggregation, constant_length=constant or 1)
    credit = algorithm.advantages(view)
    outputs = make_outputs(view)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(view, credit, algorithm.constant))
    mask = np.asarray(view.mask)
    count = {"token-mean": mask.sum(), "constant": 50 * mask.any(1).sum(), "token-sum": 1}[aggregation]
    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    np.testing.assert_allclose(value, -logprob[mask].sum() / count, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.where(mask, -1 / count, 0), rtol=1e-6)


def test_it_learns_from_demonstrations_and_asks_for_nothing():
    assert SFT().learns_from == "demonstrations"
    assert SFT().needs == frozenset()
    assert SFT().group_size_at_least == 1
