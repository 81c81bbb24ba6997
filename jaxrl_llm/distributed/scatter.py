"""Reduce-scatters sums over a mesh axis, so that each device keeps its own share, along the lines of a TPU's torus.

TPU's compiler makes a reduce-scatter of a sum along a line of the torus, but an all-reduce of a sum over several lines, which sends
twice as much and leaves the whole array on every device. So a sum over an axis that fills a rectangle of the torus is
scattered along its lines first and then across them. Each stage is a float32 sum; nothing is rounded in between.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

TILE = 8  # rows of a matrix in one tile of a TPU's memory
Groups = list[list[int]]  # indices along a mesh axis that exchange with one another


def in_lines(devices: Sequence[Any]) -> list[Any]:
    """Returns the devices; those of TPUs are sorted by slice and then by their places in the torus, so that neighbours are adjacent."""
    if any(device.platform != "tpu" for device in devices):
        return list(devices)
    return sorted(devices, key=lambda d: (slice_of(d), *d.coords, getattr(d, "core_on_chip", 0)))


def slice_of(device: Any) -> int:
    """Returns the number of a TPU's slice; 0 for devices of other kinds."""
    return getattr(device, "slice_index", 0) or 0 if device.platform == "tpu" else 0


def stages(places: Sequence[tuple[int, ...]]) -> list[Groups]:
    """Returns the stages of a sum over devices at these places of a torus, in the order of the mesh axis.

    Where the devices fill a rectangle and are listed line by line, the first stage sums along its first axis, the next along its
    second, and so on; otherwise all devices are one group.
    """
    number = len(places)
    extents = [sorted(set(axis)) for axis in zip(*places)]
    sizes = [len(extent) for extent in extents if len(extent) > 1]
    if len(sizes) < 2 or math.prod(sizes) != number or list(itertools.product(*extents)) != list(places):
        return [[list(range(number))]]
    grid, found = np.arange(number).reshape(sizes), []
    for axis, size in enumerate(sizes):
        found.append(np.moveaxis(grid, axis, -1).reshape(-1, size).tolist())
    return found


def _stages(mesh: Mesh, axis: str) -> list[Groups]:
    """Returns the stages of sums over a mesh axis; those of one line of devices hold for all lines, as the mesh is a grid."""
    line = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0).reshape(mesh.shape[axis], -1)[:, 0]
    if any(device.platform != "tpu" for device in line):
        return [[list(range(len(line)))]]
    return stages([tuple(device.coords) for device in line])


def by_hand(mesh: Mesh) -> bool:
    """Returns whether sums over the mesh are scattered, and weights gathered, by this module; GPUs are left to XLA, which does both well."""
    return mesh.devices.flat[0].platform != "gpu"


def scattered(x: jax.Array, mesh: Mesh, axis: str, dimension: int) -> jax.Array:
    """Sums `x` over the devices of a mesh axis, each of which keeps its share of `dimension`; under shard_map."""
    for groups in _stages(mesh, axis):
        whole = len(groups) == 1
        x = jax.lax.psum_scatter(
            x, axis, scatter_dimension=dimension, tiled=True, axis_index_groups=None if whole else groups
        )
    return x


def gathered_rows(x: jax.Array, mesh: Mesh, axis: str) -> jax.Array:
    """Gathers a matrix whose columns are split over the devices of a mesh axis; under shard_map.

    The devices first exchange columns for whole rows: gathered columns lie column by column in a TPU's memory, and would have to be
    transposed before a kernel reads rows. Then the rows are gathered across the torus's lines and along them, which SparseCores do beside
    computation.
    """
    rows, unit = x.shape[0], TILE * mesh.shape[axis]
    x = jnp.pad(x, ((0, -rows % unit), (0, 0)))
    part = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)
    for groups in reversed(_stages(mesh, axis)):
        part = jax.lax.all_gather(part, axis, tiled=True, axis_index_groups=None if len(groups) == 1 else groups)
    return part[:rows]
