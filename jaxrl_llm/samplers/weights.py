"""The parameters that the embedded sampler decodes with: the learner's own where they fit, else a copy that does."""

from dataclasses import replace
from typing import Any

import jax

from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import Params


def served(policy: Policy, params: Params, *, share: bool, gather: bool) -> dict[str, Any]:
    """`params` in the policy's compute dtype, laid out for decoding.

    Norm scales stay float32, as the layers use them. A leaf that already has the dtype and the layout is the learner's
    own array if `share`, and a copy otherwise; every other leaf is a new array that the sampler owns.

    Args:
      policy: whose parameters they are.
      params: the learner's parameters.
      share: whether the learner's own arrays may be served.
      gather: whether weights are whole over the fsdp axis, which saves each decode step their gathering.

    Raises:
      ValueError: where `params` are not those of `policy`.
    """
    partitioner = policy.partitioner
    if gather:
        partitioner = replace(partitioner, rules={**partitioner.rules, "embed": ()})

    def leaf(path: tuple[Any, ...], abstract: jax.ShapeDtypeStruct, axes: tuple, x: jax.Array) -> jax.Array:
        if x.shape != abstract.shape:
            raise ValueError(
                f"published parameter {jax.tree_util.keystr(path)} is {x.shape}, the policy's is {abstract.shape}"
            )
        dtype = x.dtype if path[-1].key == "scale" else policy.compute_dtype
        sharding = partitioner.sharding(axes, x.shape)
        if x.dtype == dtype and isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x if share else x.copy()
        # Cast before the transfer: fewer bytes move between devices. A host array goes straight to its shards.
        return jax.device_put(x.astype(dtype), sharding)

    return jax.tree_util.tree_map_with_path(leaf, policy.abstract(), policy.axes(), params)


def deleted(params: Params) -> bool:
    """Whether the learner donated a shared buffer since it was published."""
    return any(x.is_deleted() for x in jax.tree.leaves(params))
