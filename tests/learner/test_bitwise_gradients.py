"""The bitwise mode avoids what a GPU sums in any order: the scatter of the embedding's gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.models.linear import looked_up


class Device(NamedTuple):
    platform: str


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embeddings_gradient_in_the_bitwise_mode_on_a_gpu_has_no_scatter(dtype):
    rng = np.random.default_rng(0)
    table, tokens = rng.normal(size=(50, 6)), jnp.asarray(rng.integers(0, 40, (3, 70)), jnp.int32)
    weights = rng.normal(size=(3, 70, 6)).astype(dtype)
    gradient = jax.grad(lambda t: (looked_up(t, tokens).astype(jnp.float32) * weights).sum())

    def found(bitwise, platform):
        with dispatch.target(Device(platform)), dispatch.ordering(bitwise):
            program = jax.jit(lambda t: gradient(t)).lower(jnp.asarray(table, dtype))
        return program.as_text().count("scatter"), np.asarray(program.compile()(jnp.asarray(table, dtype)), np.float64)

    want = np.zeros(table.shape)
    np.add.at(want, np.asarray(tokens), weights.astype(np.float64))
    for bitwise, platform in ((True, "gpu"), (True, "cpu"), (False, "gpu")):
        scatters, sums = found(bitwise, platform)
        assert (scatters == 0) == (bitwise and platform == "gpu")
        np.testing.assert_allclose(sums, want, rtol=1e-5 if dtype == "float32" else 4e-3, atol=1e-5)
