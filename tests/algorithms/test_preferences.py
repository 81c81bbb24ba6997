"""Preference losses against float64 NumPy, pair by pair, with numeric gradients."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, numeric_gradient, value_and_gradient

from jaxrl_llm.algorithms.apo import APO
from jaxrl_llm.algorithms.bco import BCO
from jaxrl_llm.algorithms.cpo import CPO
from jaxrl_llm.algorithms.discopop import DiscoPOP
from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.exo import EXO
from jaxrl_llm.algorithms.ipo import IPO
from jaxrl_llm.algorithms.kto import KTO
from jaxrl_llm.algorithms.nca import NCA
from jaxrl_llm.algorithms.orpo import ORPO
from jaxrl_llm.algorithms.simpo import SimPO
from jaxrl_llm.algorithms.sppo import SPPO, SPPOHard


def logsigmoid(x):
    return -np.log1p(np.exp(-x))


def dpo_margin(w, rw, n, x, rx, k):
    return 0.5 * ((w - rw) - (x - rx))


def sigmoid_loss(eps=0.0):
    return lambda *x: -(1 - eps) * logsigmoid(dpo_margin(*x)) - eps * logsigmoid(-dpo_margin(*x))


def robust_loss(*x):
    return (-0.8 * logsigmoid(dpo_margin(*x)) + 0.2 * logsigmoid(-dpo_margin(*x))) / 0.6


def odds(mean):
    p = np.exp(mean)
    return np.log(p / (1 - p))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def exo_loss(w, rw, n, x, rx, k):
    q = sigmoid(0.5 * (w - rw - x + rx))
    return q * np.log(q / 0.9) + (1 - q) * np.log((1 - q) / 0.1)


def discopop_loss(w, rw, n, x, rx, k):
    m = 0.5 * (w - rw - x + rx)
    share = sigmoid(m / 0.4)
    return (1 - share) * np.log(1 + np.exp(-m)) + share * np.exp(-m)


def nca_loss(w, rw, n, x, rx, k):
    a, b = sigmoid(0.5 * (w - rw)), sigmoid(0.5 * (x - rx))
    return -np.log(a) - 0.5 * np.log(1 - a) - 0.5 * np.log(1 - b)


def smooth_cpo_loss(w, rw, n, x, rx, k):
    p = sigmoid(0.5 * (w - x))
    return -0.8 * np.log(p) - 0.2 * np.log(1 - p) - 0.3 * w / n


# Sums of the preferred answer's log-probs, of its reference's, its tokens; the same of the rejected answer.
CASES = {
    "dpo": (DPO(beta=0.5), sigmoid_loss()),
    "cdpo": (DPO(beta=0.5, label_smoothing=0.2), sigmoid_loss(0.2)),
    "robust": (DPO(beta=0.5, label_smoothing=0.2, form="robust"), robust_loss),
    "hinge": (DPO(beta=0.5, form="hinge"), lambda *x: max(0.0, 1 - dpo_margin(*x))),
    "ipo": (IPO(beta=0.5), lambda w, rw, n, x, rx, k: ((w - rw) / n - (x - rx) / k - 1.0) ** 2),
    "ipo of sums": (IPO(beta=0.5, length_average=False), lambda w, rw, n, x, rx, k: (w - rw - x + rx - 1.0) ** 2),
    "simpo": (SimPO(), lambda w, rw, n, x, rx, k: -logsigmoid(2 * (w / n - x / k) - 1)),
    "cpo": (CPO(beta=0.5, nll_coef=0.3), lambda w, rw, n, x, rx, k: -logsigmoid(0.5 * (w - x)) - 0.3 * w / n),
    "cpo with smoothing": (CPO(beta=0.5, nll_coef=0.3, label_smoothing=0.2), smooth_cpo_loss),
    "apo_zero": (
        APO(beta=0.5),
        lambda w, rw, n, x, rx, k: 1 - sigmoid(0.5 * (w - rw)) + sigmoid(0.5 * (x - rx)),
    ),
    "apo_down": (
        APO(beta=0.5, form="down"),
        lambda w, rw, n, x, rx, k: sigmoid(0.5 * (w - rw)) + 1 - sigmoid(0.5 * (w - rw - x + rx)),
    ),
    "discopop": (DiscoPOP(beta=0.5, tau=0.4), discopop_loss),
    "exo_pair": (EXO(beta=0.5, label_smoothing=0.1), exo_loss),
    "nca_pair": (NCA(beta=0.5), nca_loss),
    "sppo_hard": (SPPOHard(beta=0.5), lambda w, rw, n, x, rx, k: (w - rw - 1.0) ** 2 + (x - rx + 1.0) ** 2),
    "orpo": (ORPO(beta=0.4), lambda w, rw, n, x, rx, k: -w / n - 0.4 * logsigmoid(odds(w / n) - odds(x / k))),
}


def sums(sequences, logprob):
    mask = np.asarray(sequences.mask)
    ref = np.where(mask, np.asarray(sequences.ref_logprobs, np.float64), 0).sum(1)
    return np.where(mask, logprob, 0).sum(1), ref, mask.sum(1)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_follow_the_definition(name):
    algorithm, rule = CASES[name]
    sequences = make_sequences(3, pairs=True)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    batch = make_batch(sequences, assigned, 1.0)
    mask = np.asarray(assigned.loss_mask)

    def expected(logprob):
        p, r, n = sums(sequences, logprob)
        return np.mean([rule(p[i], r[i], n[i], p[i + 1], r[i + 1], n[i + 1]) for i in range(0, 8, 2)])

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    value, gradient = value_and_gradient(algorithm, outputs, batch)
    np.testing.assert_allclose(value, expected(logprob), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, logprob, mask), rtol=1e-4, atol=1e-6)
    assert float(batch.counts["pairs"]) == 4


def test_bco_shifts_the_rewards_by_their_mean_before_the_update():
    sequences = make_sequences(3, pairs=True)
    algorithm = BCO(beta=0.5)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    mask = np.asarray(assigned.loss_mask)
    before, ref, _ = sums(sequences, np.asarray(sequences.old_logprobs, np.float64))
    delta = 0.5 * (before - ref)[:8].mean()
    assert abs(delta) > 1e-3
    np.testing.assert_allclose(assigned.metrics["bco/delta"], delta, rtol=1e-4)

    def expected(logprob):
        p, r, _ = sums(sequences, logprob)
        logit = (0.5 * (p - r) - delta)[:8]
        return -np.mean(np.log(sigmoid(logit[0::2])) + np.log(1 - sigmoid(logit[1::2])))

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(value, expected(logprob), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, logprob, mask), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wins", ["greater", "bradley-terry"])
def test_sppo_regresses_each_samples_log_ratio_to_how_often_it_wins(wins):
    sequences = make_sequences(3)
    algorithm = SPPO(beta=0.5, wins=wins)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    mask, reward, group = (np.asarray(x) for x in (assigned.loss_mask, sequences.reward, sequences.group))
    won = np.zeros(15)
    for i in range(15):
        mine = reward[:15][group[:15] == group[i]].astype(np.float64)
        beats = [1.0 if reward[i] > r else 0.5 if reward[i] == r else 0.0 for r in mine]
        won[i] = np.mean(beats if wins == "greater" else sigmoid(reward[i] - mine))
    assert won.min() < 0.5 < won.max()

    def expected(logprob):
        p, r, _ = sums(sequences, logprob)
        return np.mean(((p - r)[:15] - (won - 0.5) / 0.5) ** 2)

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(value, expected(logprob), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, logprob, mask), rtol=1e-4, atol=1e-6)


def test_discopop_is_finite_where_the_exponential_alone_is_not():
    sequences = make_sequences(3, pairs=True)
    algorithm = DiscoPOP(beta=100.0)
    assigned = algorithm.advantages(sequences)
    value, gradient = value_and_gradient(algorithm, make_outputs(sequences), make_batch(sequences, assigned, 1.0))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_kto_counts_a_prompt_once_however_many_answers_it_has():
    plain = make_sequences(3, sizes=(4, 3, 2))
    side = jnp.asarray([1, -1, -1, -1, 1, 1, -1, -1, 1, 0], jnp.int32)
    sequences, algorithm = replace(plain, side=side), KTO(answers_of="policy")
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    p, r, _ = sums(sequences, np.asarray(outputs["policy"]["logprob"], np.float64))
    h, at = p - r, lambda i, js: np.mean([h[i] > h[j] for j in js])
    want = at(0, (1, 2, 3)) + (at(4, (6,)) + at(5, (6,))) / 2 + at(8, (7,))
    _, metrics = algorithm.loss(outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(metrics["pairs/accuracy"][0], want, rtol=1e-6)


def test_the_accuracy_is_the_share_of_pairs_in_the_right_order():
    sequences = make_sequences(3, pairs=True)
    algorithm = DPO()
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    _, metrics = algorithm.loss(outputs, make_batch(sequences, assigned, 1.0))
    p, r, _ = sums(sequences, np.asarray(outputs["policy"]["logprob"], np.float64))
    margins = 0.1 * ((p - r)[0:8:2] - (p - r)[1:8:2])
    assert 0 < (margins > 0).sum() < 4
    assert float(metrics["pairs/accuracy"][0]) == (margins > 0).sum()
    np.testing.assert_allclose(metrics["pairs/margin"][0], margins.sum(), rtol=1e-4, atol=1e-5)


def test_a_pair_that_lacks_an_answer_is_left_out_whole():
    sequences = make_sequences(3, pairs=True)
    sequences = replace(sequences, valid=sequences.valid.at[3].set(False))
    assigned = DPO().advantages(sequences)
    assert np.asarray(assigned.loss_mask).any(1).nonzero()[0].tolist() == [0, 1, 4, 5, 6, 7]
    assert float(assigned.metrics["pairs/incomplete"]) == 1


def test_kto_values_each_answer_against_the_mean_log_ratio():
    sequences = make_sequences(3, pairs=True)
    sequences = replace(sequences, old_logprobs=sequences.ref_logprobs + 0.2)
    algorithm = KTO(beta=0.5, desirable=1.5, undesirable=0.5)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    mask, side = np.asarray(assigned.loss_mask), np.asarray(sequences.side)
    point = 0.2 * np.asarray(sequences.mask).sum(1)[:8].mean()
    np.testing.assert_allclose(assigned.metrics["kto/point"], point, rtol=1e-4)

    def expected(logprob):
        p, r, _ = sums(sequences, logprob)
        gain = (side * (p - r - float(assigned.metrics["kto/point"])))[:8]
        return np.mean(np.where(side[:8] > 0, 1.5, 0.5) * (1 - 1 / (1 + np.exp(-0.5 * gain))))

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    np.testing.assert_allclose(value, expected(logprob), rtol=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(expected, logprob, mask), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [1, -1])
def test_kto_weighs_the_larger_side_by_its_share_where_it_is_balanced(more):
    plain = make_sequences(3, sizes=(4, 3, 2))
    side = more * jnp.asarray([-1, 1, 1, 1, -1, -1, 1, 1, 1, 0], jnp.int32)
    sequences = replace(plain, side=side)
    algorithm = KTO(answers_of="policy", beta=0.5, desirable=1.5, balanced=True)
    assigned, outputs = algorithm.advantages(sequences), make_outputs(sequences)
    preferred, rejected = (np.asarray(side)[np.asarray(sequences.valid)] == sign for sign in (1, -1))
    assert (preferred.sum(), rejected.sum()) == (assigned.metrics["kto/desirable"], assigned.metrics["kto/undesirable"])

    def expected(logprob):
        p, r, _ = sums(sequences, logprob)
        gain = np.asarray(side) * (p - r - float(assigned.metrics["kto/point"]))
        fewer = min(preferred.sum(), rejected.sum())
        weight = np.where(side > 0, 1.5 * fewer / preferred.sum(), fewer / rejected.sum())
        return np.sum(
            np.where(side != 0, weight * (1 - 1 / (1 + np.exp(-0.5 * gain))), 0.0)[np.asarray(sequences.valid)]
        )

    logprob = np.asarray(outputs["policy"]["logprob"], np.float64)
    value, gradient = value_and_gradient(algorithm, outputs, make_batch(sequences, assigned, 1.0))
    count = float(make_batch(sequences, assigned, 1.0).counts["sequences"])
    np.testing.assert_allclose(value, expected(logprob) / count, rtol=1e-5)
    wanted = numeric_gradient(lambda x: expected(x) / count, logprob, np.asarray(assigned.loss_mask))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_balanced_kto_learns_nothing_where_one_side_has_no_answer():
    sequences = make_sequences(3, sizes=(4, 3, 2))
    sequences = replace(sequences, side=jnp.full_like(sequences.side, -1))
    assert not np.any(KTO(answers_of="policy", balanced=True).advantages(sequences).advantages)


def test_the_point_of_reference_is_not_negative():
    sequences = make_sequences(3, pairs=True)
    assigned = KTO().advantages(replace(sequences, old_logprobs=sequences.ref_logprobs - jnp.float32(0.2)))
    assert float(assigned.metrics["kto/point"]) == 0


def test_reference_policies_are_asked_for_where_the_loss_has_one():
    for algorithm in (DPO(), IPO(), KTO(), BCO(), SPPO()):
        assert algorithm.needs == {"reference"}
    for algorithm in (SimPO(), CPO(), ORPO()):
        assert algorithm.needs == frozenset()


def test_a_loss_of_preferences_learns_from_samples_where_it_is_told_to():
    assert DPO().learns_from == "pairs"
    for algorithm in (DPO(answers_of="policy"), KTO(answers_of="policy")):
        assert algorithm.learns_from == "samples" and algorithm.needs == {"reference", "sides"}
    assert SimPO(answers_of="policy").needs == {"sides"} and SPPO().learns_from == "samples"


@pytest.mark.parametrize(
    ("build", "binding"),
    [
        (lambda: DPO(beta=0.0), "dpo.DPO.beta"),
        (lambda: DPO(label_smoothing=0.5), "dpo.DPO.label_smoothing"),
        (lambda: DPO(label_smoothing=0.1, form="hinge"), "dpo.DPO.label_smoothing"),
        (lambda: SPPO(answers_of="data"), "sppo.SPPO.answers_of"),
        (lambda: EXO(label_smoothing=0.0), "exo.EXO.label_smoothing"),
        (lambda: DiscoPOP(tau=2.0), "discopop.DiscoPOP.tau"),
        (lambda: CPO(label_smoothing=0.5), "cpo.CPO.label_smoothing"),
        (lambda: SimPO(gamma=-1.0), "simpo.SimPO.gamma"),
        (lambda: CPO(nll_coef=-1.0), "cpo.CPO.nll_coef"),
        (lambda: KTO(desirable=-1.0), "kto.KTO.desirable"),
    ],
)
def test_a_bad_setting_is_refused_by_its_binding(build, binding):
    with pytest.raises(ValueError, match=binding):
        build()
