"""Makes the device mesh, holds the one table that maps logical axes of arrays to mesh axes, and gives threads turns on the devices they share."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import scatter

MESH_AXES = ("data", "fsdp", "expert", "tensor", "context")

# Activations have the axes batch and length; lookup is the batch of arrays that are split over their width too. Parameters have the axes
# vocabulary, embed, heads, kv_heads, mlp and experts. The axes layers and head_width are never split.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "lookup": ("data",),
    "vocabulary": ("tensor",),
    "embed": ("fsdp", "expert"),  # the mesh axis expert where no axis `experts` of the same array has it
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "experts": ("expert",),
    "head_width": (),
}

STORED = "fsdp"  # splits stored parameters, which are gathered over it where they are used

Axes = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes.

    Attributes:
      data: replicas of the model; -1 takes the devices that the other axes leave.
      fsdp: shards of parameters, gradients and optimizer state; splits the batch too.
      expert: shards of the experts of a layer, and of their gradients and optimizer state: a device computes its own experts for the tokens
        that the axis's devices route to them, and no experts are gathered over it. Divides the number of experts. All else is as over fsdp.
      tensor: shards of heads, MLP and vocabulary.
      context: shards of the tokens of a row.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    tensor: int = 1
    context: int = 1

    def sizes(self, devices: int) -> tuple[int, ...]:
        """Returns the axis sizes for a device count; raises ValueError where they do not multiply to it."""
        sizes = [self.data, self.fsdp, self.expert, self.tensor, self.context]
        if any(s == 0 or s < -1 for s in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh sizes must be positive, with at most one -1 (got {dict(zip(MESH_AXES, sizes))}): set train.MeshConfig"
            )
        known = math.prod(s for s in sizes if s != -1)
        if devices % known or (-1 not in sizes and known != devices):
            raise ValueError(
                f"mesh {dict(zip(MESH_AXES, sizes))} does not fit {devices} devices: set train.MeshConfig so that the product is {devices}"
            )
        return tuple(devices // known if s == -1 else s for s in sizes)


@dataclass(frozen=True)
class Partitioner:
    """A mesh with the table of logical axes; every sharding of a run is made here.

    Attributes:
      mesh: the device mesh with axes data, fsdp, expert, tensor, context.
      rules: the mesh axes of each logical axis.
    """

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: RULES, hash=False, compare=False)

    @classmethod
    def create(cls, config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> "Partitioner":
        """Returns the partitioner over `devices` (default: all of them), in the order in which they lie in a TPU's torus."""
        devices = scatter.in_lines(jax.devices() if devices is None else devices)
        grid = np.array(devices, dtype=object).reshape(config.sizes(len(devices)))
        return cls(Mesh(grid, MESH_AXES))

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def batch_shards(self) -> int:
        """The number of shards into which the rows of a batch are split."""
        return math.prod(self.axis_sizes[a] for a in self.rules["batch"])

    @property
    def across_slices(self) -> dict[str, int]:
        """{mesh axis: slices} of the axes other than data that span several TPU slices, which are joined by their hosts' network."""
        number = np.vectorize(scatter.slice_of, otypes=[int])(self.mesh.devices)
        lines = {axis: np.moveaxis(number, place, 0) for place, axis in enumerate(MESH_AXES) if axis != "data"}
        reach = {axis: len(np.unique(line.reshape(len(line), -1)[:, 0])) for axis, line in lines.items()}
        return {axis: slices for axis, slices in reach.items() if slices > 1}

    def spec(self, axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of an array with logical `axes`; a mesh axis that does not divide a dimension is left out."""
        used: set[str] = set()
        parts: list[Any] = []
        for name, size in zip(axes, shape, strict=True):
            chosen: list[str] = []
            for axis in self.rules[name] if name is not None else ():
                ways = math.prod(self.axis_sizes[a] for a in (*chosen, axis))
                if axis not in used and self.axis_sizes[axis] > 1 and size % ways == 0:
                    chosen.append(axis)
            used.update(chosen)
            parts.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
        return PartitionSpec(*parts)

    def sharding(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the NamedSharding of an array with logical `axes` and `shape`."""
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def stored(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding in which a parameter with logical `axes` is stored between its uses.

        It is that of `spec`, except where fsdp does not divide the dimension that the table gives to it: then the longest other
        dimension that fsdp divides is split, and each use gathers the parameter. Layers are never split, as a loop runs
        over them. `shape` is that of `padded`, so that a parameter with a dimension for fsdp is divided by any number of devices.
        """
        parts = list(self.spec(axes, shape))
        wanted = any(STORED in self.rules[name] for name in axes if name is not None)
        if wanted and self.axis_sizes[STORED] > 1 and not any(STORED in names(part) for part in parts):
            fitting = [
                (size, -i)
                for i, (name, size) in enumerate(zip(axes, shape, strict=True))
                if name != "layers" and size % (self._ways(parts[i]) * self.axis_sizes[STORED]) == 0
            ]
            if fitting:
                place = -max(fitting)[1]
                chosen = (*names(parts[place]), STORED)
                parts[place] = chosen if len(chosen) > 1 else chosen[0]
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def padded(self, axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which a parameter with logical `axes` and its own `shape` is stored.

        Where fsdp divides none of its dimensions, the one that the table gives to fsdp is padded to the next multiple (see
        distributed/padding.py).
        """
        wanted = [i for i, name in enumerate(axes) if name is not None and STORED in self.rules[name]]
        if not wanted or self.axis_sizes[STORED] == 1:
            return shape
        if any(STORED in names(part) for part in self.stored(axes, shape).spec):
            return shape
        (place,) = wanted
        parts = self.spec(axes, shape)
        taken = {axis for i, part in enumerate(parts) if i != place for axis in names(part)}
        ways = math.prod(self.axis_sizes[axis] for axis in self.rules[axes[place] or ""] if axis not in taken)
        return (*shape[:place], -(-shape[place] // ways) * ways, *shape[place + 1 :])

    def _ways(self, part: Any) -> int:
        return math.prod(self.axis_sizes[axis] for axis in names(part))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def here(self) -> AbstractContextManager[Any]:
        """Returns a context in which programs without arguments run on the mesh's device, where it is one; those of larger meshes are told by `constrain`."""
        return jax.default_device(self.mesh.devices.flat[0]) if self.mesh.size == 1 else nullcontext()

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Returns `x` with its sharding fixed inside jit; does nothing on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))


# Held by the thread that starts programs on the learner's devices, where another one does too: programs that exchange data must start in one
# order on every device, else each may wait for the other.
TURN = threading.Lock()
_LOOK_S = 0.002  # seconds between two looks of an event loop for its turn


@asynccontextmanager
async def loops_turn(needed: bool = True) -> AsyncIterator[None]:
    """Holds TURN for the event loop, whose other tasks run while it waits; nothing where it is not `needed`."""
    while needed and not TURN.acquire(blocking=False):
        await asyncio.sleep(_LOOK_S)
    try:
        yield
    finally:
        if needed:
            TURN.release()


def names(part: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def whole_share(tree: Any) -> tuple[float, float]:
    """Measures how well fsdp divides a tree of shapes with NamedShardings.

    Returns:
      The share of the elements that fsdp does not divide, and the elements on a device as a multiple of an even share: 1 where
      fsdp divides everything, its size where it divides nothing.
    """
    total, whole, held, ideal = 0, 0, 0.0, 0.0
    for x in jax.tree.leaves(tree):
        ways = x.sharding.mesh.shape[STORED]
        divided = any(STORED in names(part) for part in x.sharding.spec)
        here = math.prod(x.sharding.shard_shape(x.shape))
        total, whole = total + math.prod(x.shape), whole + (0 if divided else math.prod(x.shape))
        held, ideal = held + here, ideal + (here if divided else here / ways)
    return whole / total, held / ideal


def to_host(x: jax.Array) -> np.ndarray:
    """Gathers the whole array on this host, wherever its shards are."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
