"""Credit of the thought and of the output, with the numbers worked out by hand."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, value_and_gradient

from jaxrl_llm.algorithms.batch import Sequences
from jaxrl_llm.algorithms.gdpo import GDPO
from jaxrl_llm.algorithms.grpo_w_classmate import GRPOWithClassmate

# g_m = [.5, -.5, 1, -1], g_c = [1, -1, 0, 0], s = [1.5, -1.5, 1, -1], whose deviation (n - 1) is sqrt(6.5 / 3).
MAIN, CLASSMATE = (1.0, 0.0, 3.0, 1.0), (2.0, 0.0, 1.0, 1.0)
SPAN = {"span": "thought", "span_parts": ("classmate",), "std": False}


def sequences_of(main: tuple[float, ...] = MAIN, mate: tuple[float, ...] = CLASSMATE) -> Sequences:
    """Two prompts of two responses: a thought of two tokens, an output of one."""
    sequences = make_sequences(0, sizes=(2, 2))
    mask = np.zeros(sequences.mask.shape, bool)
    mask[:4, :3] = True
    parts = {n: jnp.asarray([*x, 0.0], jnp.float32) for n, x in {"main": main, "classmate": mate}.items()}
    finite = {n: jnp.zeros(mask.shape) for n in ("old_logprobs", "sampler_logprobs", "ref_logprobs", "entropy")}
    thought = jnp.asarray(mask & (np.arange(mask.shape[1]) < 2))
    return replace(
        sequences, mask=jnp.asarray(mask), spans={"thought": thought}, parts=parts, reward=sum(parts.values()),
        valid=jnp.asarray([True] * 4 + [False]), **finite,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GDPO(**SPAN, normalize="sequences"), [1.019049, 1.019049, 0.5, 0]),
        (GDPO(std=False, normalize="sequences"), [1.019049, 1.019049, 1.019049, 0]),
        (GDPO(**SPAN, normalize="none"), [1.5, 1.5, 0.5, 0]),
        (GRPOWithClassmate(), [1.5, 1.5, 0.5, 0]),
    ],
)
def test_the_first_response_of_the_worked_example(algorithm: object, expected: list[float]) -> None:
    assigned = algorithm.advantages(sequences_of())  # type: ignore[attr-defined]
    np.testing.assert_allclose(np.asarray(assigned.advantages)[0, :4], expected, atol=2e-6)


def test_a_part_may_count_only_where_it_is_above_zero() -> None:
    # g_c = [1, -1, 0, 0] becomes [1, 0, 0, 0]: the second response's thought keeps -.5 of its own and loses nothing more.
    separated = GDPO(**SPAN, normalize="none", nonnegative=("classmate",))
    assigned = np.asarray(separated.advantages(sequences_of()).advantages)
    np.testing.assert_allclose(assigned[:2, :4], [[1.5, 1.5, 0.5, 0], [-0.5, -0.5, -0.5, 0]], atol=2e-6)
    without = GDPO(**SPAN, normalize="none").advantages(sequences_of())
    np.testing.assert_allclose(np.asarray(without.advantages)[1, :3], [-1.5, -1.5, -0.5], atol=2e-6)


def test_the_deviation_is_that_of_each_sum() -> None:
    assigned = GRPOWithClassmate(std=True).advantages(sequences_of())
    # totals (3, 0): deviation 3 / sqrt(2); main (1, 0): 1 / sqrt(2); both give 1 / sqrt(2)
    np.testing.assert_allclose(np.asarray(assigned.advantages)[:2, :3], [[0.70711] * 3, [-0.70711] * 3], atol=1e-5)


def test_the_classmates_part_has_a_gradient_where_no_clip_is_active() -> None:
    gradients = []
    for mate in (CLASSMATE, (0.0, 0.0, 0.0, 0.0)):
        sequences, algorithm = sequences_of(mate=mate), GRPOWithClassmate(aggregation="token-sum")
        batch = make_batch(sequences, algorithm.advantages(sequences), algorithm.constant)
        outputs = make_outputs(sequences, distance=0.0)  # ratio 1: nothing is clipped
        gradients.append(value_and_gradient(algorithm, outputs, batch)[1])
    with_mate, without = gradients
    np.testing.assert_allclose((without - with_mate)[:2, :2], [[1, 1], [-1, -1]], atol=1e-5)  # g_c
    np.testing.assert_allclose((without - with_mate)[:, 2], 0, atol=1e-7)


@pytest.mark.parametrize("fields", [{"span": "absent"}, {"main_parts": ("absent",)}])
def test_a_span_or_part_that_is_not_there_is_named(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"grpo_w_classmate.GRPOWithClassmate\.\w+ must be .*absent"):
        GRPOWithClassmate(**fields).advantages(sequences_of())  # type: ignore[arg-type]
