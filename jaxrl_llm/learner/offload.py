"""Offloads optimizer state and frozen models to the host's pinned memory, from which they move to the device when they are needed.

The moments of an offloaded optimizer are on the device only while their own parameters are updated: the parameters are
split into groups of at most GROUP bytes and a share of the model, small ones first, and while one group is updated and moves out, the
moments of the next move in, unless the moments of both take more than AHEAD bytes or more than the parameters. A device holds no gradient
of groups that are done.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

HOST, DEVICE = "pinned_host", "device"
GROUP, PARTS = 2**29, 8  # most bytes of float32 parameters of a group, and the least number of such groups in a model
# Bytes of moments. Above this, the moments of a large group find no contiguous space in a device's memory.
AHEAD = 2**33

Path = tuple[str, ...]


def to_host(tree: Any) -> Any:
    """Moves the arrays to the pinned memory of their hosts, with the same shards; returns before the transfer is complete."""
    return jax.device_put(tree, jax.tree.map(lambda x: on_host(x.sharding), tree))


def to_device(tree: Any) -> Any:
    """Moves the arrays to the memory of their devices; returns before the transfer is complete."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(DEVICE), tree))


def shapes_on_host(tree: Any) -> Any:
    """Returns the same shapes, with shardings in the host's memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_host(x.sharding)), tree)


def on_host(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    return sharding.with_memory_kind(HOST)


def bytes_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of one device's shard, in whichever memory it is."""
    return leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))


def at(tree: Any) -> tuple[str, ...]:
    """Returns the paths of the leaves."""
    return tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def groups(params: Mapping[str, Any], most: int | None = None) -> list[list[Path]]:
    """Groups the paths of the leaves, small ones first, by at most `most` bytes a device; a larger leaf is a group of its own."""
    found: list[list[Path]] = []
    leaves = [(bytes_of(leaf), path) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    used, most = 0, min(GROUP, sum(size for size, _ in leaves) // PARTS) if most is None else most
    for size, path in sorted(leaves, key=lambda one: one[0]):
        if not found or used + size > most:
            found.append([])
            used = 0
        found[-1].append(tuple(key.key for key in path))
        used += size
    return found


def pruned(tree: Any, paths: Iterable[Path]) -> Any:
    """Returns the nested dictionary with the leaves at `paths` alone; a path that goes deeper than the tree keeps the leaf it reaches."""
    out: dict[str, Any] = {}
    for path in paths:
        source, target = tree, out
        for i, key in enumerate(path):
            if not isinstance(source[key], dict):
                target[key] = source[key]
                break
            if i + 1 < len(path):
                source, target = source[key], target.setdefault(key, {})
    return out


def joined(old: Any, parts: Sequence[Any]) -> Any:
    """Returns the nested dictionary `old` with the leaves of `parts` in place of its own."""
    out = {key: joined(x, []) if isinstance(x, dict) else x for key, x in old.items()}
    for part in parts:
        for key, x in part.items():
            out[key] = joined(out[key], [x]) if isinstance(x, dict) else x
    return out


def of_parts(params: Mapping[str, Any]) -> Callable[[Any], bool]:
    """Returns a function that says whether a node of an optimizer's state has a value for each parameter."""
    return lambda node: isinstance(node, dict) and node.keys() == params.keys()


def cut(state: Any, params: Mapping[str, Any], paths: list[Path]) -> Any:
    """Returns the optimizer's state of the parameters at `paths`."""
    by_part = of_parts(params)
    return jax.tree.map(lambda x: pruned(x, paths) if by_part(x) else x, state, is_leaf=by_part)


def visits(params: Mapping[str, Any], state: Any) -> list[list[int]]:
    """Returns the bytes of moments that a device holds while each group is updated: the group's own, and those moving in for the next."""
    sizes = [sum(map(bytes_of, jax.tree.leaves(cut(state, params, paths)))) for paths in groups(params)]
    both = [sizes[i : i + 2] for i in range(len(sizes))]
    most = min(AHEAD, sum(map(bytes_of, jax.tree.leaves(params))))
    return [pair if sum(pair) <= most else pair[:1] for pair in both]


def _leaf(tree: Any, path: Path) -> Any:
    """Returns the value at a path; None where the tree ends before it."""
    for key in path:
        if not isinstance(tree, dict):
            return None
        tree = tree[key]
    return tree


def _delete(arrays: Iterable[Any]) -> None:
    for x in arrays:
        if x is not None:
            x.delete()


def streamed(
    apply: Callable[[Any, Any, Any], tuple[Any, Any]], params: dict[str, Any], gradient: dict[str, Any], state: Any
) -> tuple[dict[str, Any], Any]:
    """Calls `apply(params, gradient, state) -> (params, state)` for one group of leaves at a time, moving its state in and out.

    Args:
      apply: updates some leaves of the parameters; the state it gets is cut to the same leaves.
      params: the parameters, on the device.
      gradient: the parameters' gradient, on the device; it is deleted group by group.
      state: the optimizer's state, on the host; it is deleted group by group, so that the host never holds it twice.
    """
    by_part, wanted, visiting = of_parts(params), groups(params), visits(params, state)
    old = [node for node in jax.tree.leaves(state, is_leaf=by_part) if by_part(node)]
    coming: Any = None
    new_params: list[Any] = []
    new_states: list[Any] = []
    for number, paths in enumerate(wanted):
        # The host must not run ahead: a transfer takes memory as soon as it is requested, and a gradient's is free after its update.
        jax.block_until_ready(new_states[-1:])
        here = jax.block_until_ready(to_device(cut(state, params, paths)) if coming is None else coming)
        coming = None
        _delete(_leaf(node, path) for node in old for path in paths)  # the updated moments take their place on the host
        if len(visiting[number]) > 1:
            coming = to_device(cut(state, params, wanted[number + 1]))
        slope = pruned(gradient, paths)
        part, here = apply(pruned(params, paths), slope, here)
        _delete(jax.tree.leaves(slope))
        new_params.append(part)
        new_states.append(to_host(here))
        del here, slope
    jax.block_until_ready(new_states[-1:])  # else the next gradient comes while the last moments are on the device
    together = lambda old, *parts: joined(old, parts) if by_part(old) else parts[-1]  # noqa: E731
    return joined(params, new_params), jax.tree.map(together, state, *new_states, is_leaf=by_part)
