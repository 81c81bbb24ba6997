"""Weights of 8 bits for sampling: the matrices of the layers, rounded when a version of the policy is published to the sampler.

    w ~ values * scale,   scale = max |w| / 448 over the inputs of each output channel,   values = float8_e4m3fn(w / scale)

so that each channel uses the whole range of the type. Embedding, head, norms, biases, routers, experts and layers with a state keep the
compute dtype. The product with the values is summed in float32 and multiplied by the scale after it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import Axes
from jaxrl_llm.models import hf_format
from jaxrl_llm.models.architecture import LAYERS, stack_of
from jaxrl_llm.models.linear import Quantized
from jaxrl_llm.models.lora import LINEAR
from jaxrl_llm.models.policy import Policy

MOST = 448.0  # the largest float8_e4m3fn
_PATHS = frozenset(path[1:] for path in LINEAR.values())


def inputs_of(path: tuple[Any, ...], axes: Axes) -> int:
    """Returns the number of input axes of the matrix at a path of the parameters; 0 where the leaf keeps its dtype."""
    keys = tuple(key.key for key in path)
    if stack_of(keys[0]) is None or keys[1:] not in _PATHS or "experts" in axes:
        return 0
    return hf_format.TENSORS["/".join((LAYERS, *keys[1:]))][1] or 0


@partial(jax.jit, static_argnames=("inputs", "dtype", "sharding"))
def quantized(x: jax.Array, inputs: int, dtype: str, sharding: NamedSharding) -> Quantized:
    """Rounds the matrices [L, *in, *out] of a leaf to `dtype`; the values have the layout `sharding`, and the scales [L, *out] a matching one."""
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=tuple(range(1, 1 + inputs)), keepdims=True)
    scale = jnp.where(most > 0, most / MOST, 1.0)
    values = jnp.clip(wide / scale, -MOST, MOST).astype(dtype)
    scale = jnp.squeeze(scale, tuple(range(1, 1 + inputs)))
    fixed = jax.lax.with_sharding_constraint
    return Quantized(fixed(values, sharding), fixed(scale, _beside(sharding, x.ndim, inputs)))


def shapes(policy: Policy, params: Any, dtype: str) -> Any:
    """Returns shapes and shardings of what is served in the place of `params`, itself shapes with shardings, with matrices in `dtype`."""

    def leaf(path: tuple[Any, ...], x: jax.ShapeDtypeStruct, axes: Axes) -> Any:
        if not (inputs := inputs_of(path, axes)):
            return x
        outputs, beside = (x.shape[0], *x.shape[1 + inputs :]), _beside(x.sharding, len(x.shape), inputs)
        return Quantized(
            jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding),
            jax.ShapeDtypeStruct(outputs, jnp.float32, sharding=beside),
        )

    return jax.tree_util.tree_map_with_path(leaf, params, policy.axes())


def _beside(sharding: NamedSharding, ndim: int, inputs: int) -> NamedSharding:
    """Returns the sharding of the scales that matches the values' `sharding`."""
    spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(spec[0], *spec[1 + inputs :]))
