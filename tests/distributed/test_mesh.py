"""Mesh sizes multiply to the devices, and logical axes become shards where they divide."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed.mesh import MESH_AXES, RULES, MeshConfig, Partitioner, to_host


def partitioner(devices: int, **sizes: int) -> Partitioner:
    return Partitioner.create(MeshConfig(**sizes), jax.devices()[:devices])


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        (MeshConfig(), 8, (1, 8, 1, 1, 1)),
        (MeshConfig(expert=4), 8, (1, 2, 4, 1, 1)),
        (MeshConfig(data=-1, fsdp=2), 8, (4, 2, 1, 1, 1)),
        (MeshConfig(tensor=2, context=2), 8, (1, 2, 1, 2, 2)),
        (MeshConfig(data=2, fsdp=1, context=-1), 6, (2, 1, 1, 1, 3)),
        (MeshConfig(data=2, fsdp=1, tensor=3), 6, (2, 1, 1, 3, 1)),
        (MeshConfig(), 1, (1, 1, 1, 1, 1)),
    ],
)
def test_one_axis_takes_the_devices_that_the_others_leave(config, devices, sizes):
    assert config.sizes(devices) == sizes


@pytest.mark.parametrize(
    ("config", "devices"),
    [(MeshConfig(fsdp=4), 8), (MeshConfig(tensor=3), 8), (MeshConfig(data=2, fsdp=2, tensor=2, context=2), 8)],
)
def test_sizes_that_do_not_fit_the_devices_are_refused(config, devices):
    with pytest.raises(
        ValueError, match=f"does not fit {devices} devices: set train.MeshConfig so that the product is 8"
    ):
        config.sizes(devices)


@pytest.mark.parametrize("sizes", [{"data": 0}, {"tensor": -2}, {"data": -1, "fsdp": -1}])
def test_sizes_that_are_no_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match=re.escape("must be positive, with at most one -1")):
        MeshConfig(**sizes).sizes(8)


def test_devices_fill_the_mesh_in_order_with_context_innermost():
    mesh = partitioner(8, fsdp=2, tensor=2, context=2).mesh
    assert mesh.axis_names == MESH_AXES == ("data", "fsdp", "expert", "tensor", "context")
    assert [d.id for d in mesh.devices[0, 0, 0, 0]] == [0, 1] and [d.id for d in mesh.devices[0, :, 0, 0, 0]] == [0, 4]


@pytest.mark.parametrize(
    ("sizes", "axes", "shape", "spec"),
    [
        ({"fsdp": 2, "tensor": 2, "context": 2}, ("batch", "length"), (4, 8), P("fsdp", "context")),
        ({"data": 2, "fsdp": 2, "context": 2}, ("batch", "length", None), (4, 8, 3), P(("data", "fsdp"), "context", None)),
        ({"data": 2, "fsdp": 4}, ("batch", "length"), (2, 8), P("data", None)),  # fsdp no longer divides
        ({"data": 2, "fsdp": 4}, ("batch",), (3,), P(None)),
        ({"fsdp": 4, "tensor": 2}, ("vocabulary", "embed"), (32, 16), P("tensor", "fsdp")),
        ({"fsdp": 4, "tensor": 2}, ("vocabulary", "embed"), (31, 16), P(None, "fsdp")),
        ({"fsdp": 2, "tensor": 4}, ("layers", "embed", "heads", "head_width"), (4, 8, 8, 8), P(None, "fsdp", "tensor", None)),
        ({"fsdp": 2, "tensor": 4}, ("embed", "kv_heads", "head_width"), (8, 2, 8), P("fsdp", None, None)),
        ({"fsdp": 8}, ("heads", "mlp"), (8, 8), P(None, None)),
        ({"fsdp": 4, "tensor": 2}, ("heads", "mlp"), (8, 8), P("tensor", None)),  # a mesh axis splits one dimension
        ({"fsdp": 2, "expert": 4}, ("experts", "embed", None, "mlp"), (8, 16, 2, 8), P("expert", "fsdp", None, None)),
        ({"fsdp": 2, "expert": 4}, ("embed", "mlp"), (16, 8), P(("fsdp", "expert"), None)),  # a dense matrix
        ({"fsdp": 2, "expert": 4}, ("batch", "length"), (8, 8), P(("fsdp", "expert"), None)),
    ],
)  # fmt: skip
def test_the_spec_of_an_array_by_its_logical_axes(sizes, axes, shape, spec):
    assert partitioner(8, **sizes).spec(axes, shape) == spec


@pytest.mark.parametrize(
    ("sizes", "axes", "shape", "spec"),
    [
        ({"fsdp": 4, "tensor": 2}, ("vocabulary", "embed"), (32, 16), P("tensor", "fsdp")),  # as the table says
        ({"fsdp": 4, "tensor": 2}, ("vocabulary", "embed"), (32, 6), P(("tensor", "fsdp"), None)),
        ({"fsdp": 4, "tensor": 2}, ("vocabulary", "embed"), (12, 6), P("tensor", None)),  # 12 / 2 has no 4 parts
        ({"fsdp": 8}, ("layers", "embed", "heads", "head_width"), (8, 6, 16, 64), P(None, None, None, "fsdp")),
        ({"fsdp": 8}, ("layers", "embed", "mlp"), (8, 6, 7), P(None, None, None)),  # layers are run over by a loop
        ({"fsdp": 8}, ("layers", None), (8, 64), P(None, None)),  # norms have no dimension for fsdp
    ],
)  # fmt: skip
def test_a_parameter_that_fsdp_does_not_divide_as_the_table_says_is_stored_by_another_dimension(
    sizes, axes, shape, spec
):
    assert partitioner(8, **sizes).stored(axes, shape).spec == spec


def test_the_rows_of_a_batch_are_split_over_data_fsdp_and_expert():
    assert partitioner(8, data=2, fsdp=2, tensor=2).batch_shards == 4
    assert partitioner(8, fsdp=2, expert=2, tensor=2).batch_shards == 4
    assert partitioner(1).batch_shards == 1
    assert {axis for axes in RULES.values() for axis in axes} == set(MESH_AXES)


def test_arrays_are_placed_and_come_back_whole():
    split = partitioner(8, fsdp=4, tensor=2)
    host = np.arange(32.0).reshape(8, 4)
    placed = jax.device_put(host, split.sharding(("embed", "mlp"), (8, 4)))
    assert placed.addressable_shards[0].data.shape == (2, 2)
    assert split.sharding((None,), (3,)).is_fully_replicated and split.replicated.is_fully_replicated
    np.testing.assert_array_equal(to_host(placed), host)


def test_a_constraint_fixes_the_sharding_inside_jit_and_changes_no_value():
    split = partitioner(8, fsdp=4, tensor=2)
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    y = jax.jit(lambda x: split.constrain(2 * x, ("batch", None)))(x)
    assert y.sharding.is_equivalent_to(split.sharding(("batch", None), (8, 4)), 2)
    np.testing.assert_array_equal(y, 2 * x)
    alone = jnp.asarray(x)
    assert partitioner(1).constrain(alone, ("batch", None)) is alone


def test_partitioners_over_the_same_devices_are_equal():
    assert partitioner(8, fsdp=4, tensor=2) == partitioner(8, tensor=2)
    assert hash(partitioner(8, fsdp=4, tensor=2)) == hash(partitioner(8, tensor=2))
    assert partitioner(8, fsdp=4, tensor=2) != partitioner(8)
