"""Gradients are summed to where parameters lie, along the lines of a TPU's torus, and are those of one device."""

import itertools
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.distributed import hlo, scatter
from jaxrl_llm.distributed.mesh import MESH_AXES, MeshConfig, Partitioner
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models.linear import Spread
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2

SIZES = Qwen2(vocabulary_size=94, width=48, layers=3, heads=4, kv_heads=2, head_width=16, mlp_width=96, tied=True)
MATRICES = 7  # of a layer: query, key, value, output, gate, up, down


@dataclass(frozen=True)
class Chip:
    coords: tuple[int, int, int]
    slice_index: int = 0
    platform: str = "tpu"


def torus(*sizes):
    return list(itertools.product(*map(range, sizes)))


def test_a_sum_over_a_rectangle_goes_along_its_lines_and_then_across():
    assert scatter.stages(torus(2, 3, 1)) == [[[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]]
    assert scatter.stages([(x, 1, z) for x, z in torus(2, 2)]) == [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    assert [len(groups) for groups in scatter.stages(torus(2, 2, 2))] == [4, 4, 4]


@pytest.mark.parametrize(
    "places",
    [
        torus(4, 1, 1),
        torus(1, 1, 1),
        torus(2, 2, 1)[::-1],
        [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)],
        torus(2, 2, 1)[:3],
    ],
)
def test_a_line_and_whatever_is_no_rectangle_listed_by_lines_are_one_group(places):
    assert scatter.stages(places) == [[list(range(len(places)))]]


def test_chips_are_listed_line_by_line_and_slice_by_slice():
    by_host = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (2, 0, 0), (3, 0, 0), (2, 1, 0), (3, 1, 0)]
    found = scatter.in_lines([Chip(c, s) for s in (1, 0) for c in by_host])
    assert found == [Chip(c, s) for s in (0, 1) for c in torus(4, 2, 1)]
    assert scatter.in_lines(jax.devices()[::-1]) == jax.devices()[::-1]


@pytest.mark.parametrize(
    ("sizes", "across"),
    [
        ({"data": 2}, {}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        ({}, {"fsdp": 2}),
        ({"fsdp": 2, "context": 4}, {"fsdp": 2}),
        ({"fsdp": 1, "tensor": 8}, {"tensor": 2}),
    ],
)
def test_axes_that_reach_over_slices_are_named(sizes, across):
    chips = [Chip(c, s) for s in range(2) for c in torus(2, 2, 1)]
    grid = np.array(chips, dtype=object).reshape(MeshConfig(**sizes).sizes(8))
    assert Partitioner(Mesh(grid, MESH_AXES)).across_slices == across
    assert Partitioner.create(MeshConfig(**sizes), jax.devices()[:8]).across_slices == {}


@pytest.mark.parametrize("sizes", [(2, 4, 1), (2, 2, 2), (8, 1, 1)])
def test_each_device_has_its_share_of_the_sum_whatever_the_stages(monkeypatch, sizes):
    monkeypatch.setattr(scatter, "_stages", lambda *_: scatter.stages(torus(*sizes)))
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    x = np.random.default_rng(0).integers(-9, 9, (8, 27, 16)).astype(np.float32)  # sums of integers are exact

    def run(local, out):
        each = lambda x: local(x[0], mesh, "fsdp")  # noqa: E731
        spec = PartitionSpec("fsdp")
        return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))(x)

    columns = run(lambda x, *where: scatter.scattered(x, *where, 1), PartitionSpec(None, "fsdp"))
    np.testing.assert_array_equal(columns, x.sum(axis=0))


@pytest.mark.parametrize("sizes", [(2, 4, 1), (2, 2, 2), (8, 1, 1)])
@pytest.mark.parametrize("rows", [64, 27])
def test_each_device_has_the_whole_of_a_matrix_whose_columns_are_spread(monkeypatch, rows, sizes):
    monkeypatch.setattr(scatter, "_stages", lambda *_: scatter.stages(torus(*sizes)))
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    x = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)

    def whole(x):
        return scatter.gathered_rows(x, mesh, "fsdp")[None]

    found = jax.jit(
        jax.shard_map(
            whole, mesh=mesh, in_specs=PartitionSpec(None, "fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False
        )
    )(x)
    np.testing.assert_array_equal(found, np.broadcast_to(x, (8, rows, 16)))


@cache
def gradients(**mesh):
    """(the loss, its gradient, what the loop over layers exchanges) of 16 rows on a mesh of 8 devices, or on one."""
    partitioner = Partitioner.create(MeshConfig(**mesh), jax.devices()[: 8 if mesh else 1])
    policy = Policy(SIZES, partitioner, "float32", "full")
    rng = np.random.default_rng(1)
    tokens, targets = jnp.asarray(rng.integers(0, SIZES.vocabulary_size, (2, 16, 24)), jnp.int32)
    positions, segments = jnp.tile(jnp.arange(24, dtype=jnp.int32), (16, 1)), jnp.ones((16, 24), jnp.int32)

    def loss(params):
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=1)
        flat, whole = hidden.reshape(-1, SIZES.width), partitioner.mesh if mesh else None
        found = token_stats(flat, policy.head(params), targets.ravel(), mesh=whole)
        return found["logprob"].mean() + 0.1 * found["entropy"].mean()

    params = policy.init(jax.random.key(0))
    program = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
    value, gradient = program(params)
    looped = [c for c in hlo.Program(program.as_text()).collectives if c.looped] if mesh else []
    return float(value), jax.tree.map(np.asarray, gradient), looped


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2, "context": 2}], ids=lambda m: "-".join(m)
)
def test_a_mesh_scatters_each_matrix_and_learns_what_one_device_learns(mesh):
    loss, expected, _ = gradients()
    value, found, looped = gradients(**mesh)
    assert value == pytest.approx(loss, rel=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())
    assert sum(c.times for c in looped if c.kind == "reduce-scatter") == MATRICES * SIZES.layers


def test_rows_that_the_devices_do_not_share_are_left_to_the_compiler():
    policy = Policy(SIZES, Partitioner.create(MeshConfig(fsdp=8), jax.devices()[:8]), "float32", "full")
    params, is_spread = policy.abstract(), lambda x: isinstance(x, Spread)
    found = {rows: jax.tree.leaves(policy._spread(params, (rows, 24)), is_leaf=is_spread) for rows in (3, 8)}
    assert not any(map(is_spread, found[3])) and any(map(is_spread, found[8]))
    one = replace(policy, partitioner=Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    assert one._spread(params, (8, 24)) is params
