"""Gradients of the bitwise mode have the same bits at every call, on GPUs too: what is summed in any order there is avoided, or asked for in one order."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_cases import GRPO_CASE, make_learner

from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.models.linear import looked_up


class Device(NamedTuple):
    platform: str


def test_programs_with_gradients_ask_for_one_order_in_the_bitwise_mode_alone(monkeypatch):
    monkeypatch.setattr(xla_flags, "deterministic", lambda _: {"no_such_option": True})
    default = make_learner(GRPO_CASE)
    bitwise = replace(default, models={"policy": replace(default.policy, bitwise=True)})
    assert default.jit(lambda x: x + 1)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        bitwise.jit(lambda x: x + 1)(1)


def test_the_options_are_ones_that_xla_knows_and_give_way_to_the_users():
    options = xla_flags.deterministic({"XLA_FLAGS": "--xla_cpu_x=1"})
    assert options == {"xla_gpu_exclude_nondeterministic_ops": True}
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert xla_flags.deterministic({"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops=false"}) is None


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
