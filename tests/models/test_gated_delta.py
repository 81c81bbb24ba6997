"""The causal convolution before a gated delta rule, within segments and from its last inputs."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.kernels.delta_inputs.reference import convolved
from jaxrl_llm.models import gated_delta

ROWS = 2
# Boundaries inside the reach of the convolution after another, and padding at the end.
PARTS = [(0, 21), (21, 23), (23, 48), (48, 70)]
PACKED = 75


def packed_segments():
    segments = np.zeros(PACKED, np.int32)
    for number, (start, stop) in enumerate(PARTS, 1):
        segments[start:stop] = number
    return jnp.asarray(np.tile(segments, (ROWS, 1)))


def in_float32(*values):
    return tuple(jnp.asarray(x, jnp.float32) for x in values)


def test_the_convolution_reaches_back_within_its_segment_alone():
    rng = np.random.default_rng(4)
    x, weights = rng.normal(size=(ROWS, PACKED, 5)), rng.normal(size=(5, 4))
    segments = packed_segments()
    got = convolved(*in_float32(x, weights), segments, jnp.zeros((ROWS, 3, 5)))
    for start, stop in PARTS:
        part = np.concatenate([np.zeros((ROWS, 3, 5)), x[:, start:stop]], axis=1)
        want = sum(weights[:, j] * part[:, j : j + stop - start] for j in range(4))
        np.testing.assert_allclose(got[:, start:stop], want, rtol=1e-5, atol=1e-5)


def test_a_convolution_goes_on_from_its_last_inputs():
    rng = np.random.default_rng(5)
    x, weights = in_float32(rng.normal(size=(2, 9, 5)), rng.normal(size=(5, 4)))
    one = jnp.ones((2, 9), jnp.int32)
    whole = convolved(x, weights, one, jnp.zeros((2, 3, 5)))
    for first in (1, 2, 5):
        valid = jnp.arange(6) < jnp.array([[first], [first]])
        before = gated_delta.last_inputs(x[:, :6], valid, jnp.zeros((2, 3, 5)))
        rest = convolved(x[:, first:], weights, one[:, first:], before)
        np.testing.assert_array_equal(rest, whole[:, first:])


def test_padding_counts_to_the_segment_before_it():
    segments = jnp.array([[0, 0, 1, 1, 0, 2, 0], [3, 0, 0, 2, 2, 0, 1]])
    assert gated_delta.continued(segments).tolist() == [[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 2, 2, 2, 1]]
