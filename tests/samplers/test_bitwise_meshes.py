"""The bitwise mode on meshes: rows are divided over devices, and a token's log-prob has the same bits on each mesh and in the sampler."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise_cases import QWEN3, Case, devices, learners, policy_of
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models.policy import Policy

# Three devices divide neither width nor heads of it, so that parameters are stored filled up.
ONE = Case(policy_of(replace(QWEN3, width=20)), seed=0, slots=16, chunk=8)


def found_on(seed=0, **sizes):
    """The log-probs that the learner of a mesh finds in a packing of random sequences."""
    rng = np.random.default_rng(7)
    lengths = [2, 3, 17, 33, 48, *rng.integers(2, 49, 35).tolist()]
    sequences = [(rng.integers(0, 50, n, dtype=np.int32), 1, None) for n in lengths]
    case = replace(ONE, policy=replace(ONE.policy, partitioner=devices(**sizes)))
    return learners(case, sequences, row=96, most=7, seed=seed)


@pytest.fixture(scope="module")
def one_devices():
    found = found_on()
    assert len(found) > 900 and np.isfinite(found).all()
    return found


@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2}, {"fsdp": 3}])
def test_log_probs_have_the_bits_of_one_device_in_another_packing(one_devices, mesh):
    assert np.array_equal(found_on(seed=1, **mesh), one_devices)


def divided(x, weights, inputs):
    """A product whose sum over K is divided over the two devices of fsdp, each of which has a part."""
    mesh, k = dispatch.spread().mesh, int(np.prod(weights.shape[:inputs]))
    rows, matrix = x.reshape(-1, k), weights.reshape(k, -1)

    def local(x, w):
        return lax.psum(arithmetic.matmul(x, w), "fsdp")

    over = PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")
    y = jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=PartitionSpec(), check_vma=False)(rows, matrix)
    return y.reshape(*x.shape[: x.ndim - inputs], *weights.shape[inputs:])


def test_a_sum_over_k_that_devices_divide_is_seen(one_devices, monkeypatch):
    monkeypatch.setattr(arithmetic, "linear", divided)
    found = found_on(fsdp=2)
    np.testing.assert_allclose(found, one_devices, atol=1e-5)
    assert not np.array_equal(found, one_devices)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
def test_axes_that_divide_more_than_rows_are_refused_by_name(axis):
    with pytest.raises(ValueError, match=rf"mesh axis {axis} .* train\.MeshConfig\.{axis} = 1.*got {axis} = 2"):
        Policy(QWEN3, devices(**{axis: 2}), bitwise=True)


def test_a_divided_vocabulary_is_refused_by_name():
    shapes = [jnp.zeros((4, 8)), jnp.zeros((6, 8)), jnp.zeros(4, jnp.int32)]
    with pytest.raises(ValueError, match=r"train\.MeshConfig\.tensor = 1 \(got 2\)"):
        token_stats(*shapes, backend="ordered", mesh=devices(tensor=2).mesh)
