"""The weights that a running embedded sampler decodes with, and which of their arrays are its own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxrl_llm.distributed.mesh import Axes
from jaxrl_llm.models.architecture import PRECISE
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.policy import Params, Policy, adapter_shapes
from jaxrl_llm.models.transformer import Apart
from jaxrl_llm.samplers.embedded import narrow
from jaxrl_llm.samplers.embedded.decode import Served, layers_apart
from jaxrl_llm.samplers.embedded.room import room_apart
from jaxrl_llm.samplers.embedded.shelf import Shelf


def deleted(params: Params) -> bool:
    """Returns whether the learner donated a shared buffer since it was published."""
    return any(x.is_deleted() for x in jax.tree.leaves(params))


@dataclass(eq=False, kw_only=True)
class Weights:
    """The served parameters and the adapters loaded beside them.

    Attributes:
      policy: the model.
      serve: converts the learner's parameters to those that decoding reads.
      shelf: the further sets of adapters; they stay from one publication to the next.
      params: the served parameters; None where there are none.
      apart: the parameters of each layer by itself, where a device has room for them.
      own: the arrays of both that are not the learner's.
    """

    policy: Policy
    serve: Callable[[Params], dict[str, Any]]
    shelf: Shelf
    params: dict[str, Any] | None = field(default=None, init=False)
    apart: Apart | None = field(default=None, init=False)
    own: list[jax.Array] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._splits: bool | None = None  # whether there is room for `apart`; known from the first publication on

    @property
    def served(self) -> Served:
        """What decoding reads; there are parameters."""
        assert self.params is not None
        return Served(self.params, self.apart)

    @property
    def live(self) -> dict[str, Any]:
        """The served parameters; raises RuntimeError where the learner donated those that it shares."""
        if self.params is None or deleted(self.params):
            raise RuntimeError(
                "the learner donated the weights that the sampler shares: publish() after each update, or set embedded.EmbeddedSampler.share_weights = False"
            )
        return self.params

    def publish(self, params: Params) -> None:
        """Takes the place of the version before, whose own arrays are deleted before new ones are made.

        Raises:
          ValueError: where `params` are not those of the policy; the version before stays served.
        """
        check_shapes(self.policy, params)
        self.free()
        new = self.shelf.beside(self.serve(params))
        if self._splits is None:
            self._splits = room_apart(self.policy, new)
        self._take(new, jax.tree.leaves(params))

    def load(self, name: str, adapters: Params) -> None:
        """Serves a further set of adapters as `name`; raises ValueError as `Shelf.add` does."""
        self.shelf.add(name, adapters)
        if self.params is not None and not deleted(self.params):
            own = {id(array) for array in self.own}
            shared = [array for array in jax.tree.leaves(self.params) if id(array) not in own]
            self._take(self.shelf.put(self.params, name), shared)

    def free(self) -> None:
        """Frees what is served."""
        self.params = self.apart = None
        for array in self.own:
            array.delete()
        self.own = []

    def _take(self, new: dict[str, Any], shared: list[Any]) -> None:
        others = {id(array) for array in shared}
        self.params, self.apart = new, layers_apart(new, policy=self.policy) if self._splits else None
        self.own = [array for array in jax.tree.leaves(new) if id(array) not in others]
        self.own.extend(jax.tree.leaves(self.apart))


# -- what is served of the learner's parameters ------------------------------------------------------------------------


def check_shapes(policy: Policy, params: Params) -> None:
    """Raises ValueError where `params` are not those of `policy`, with adapters beside their weights or without."""

    def check(path: tuple[Any, ...], own: jax.ShapeDtypeStruct, axes: Axes, x: Any) -> None:
        whole, padded = own.shape, policy.partitioner.padded
        found = {"": ((x.weights if isinstance(x, Adapted) else x).shape, padded(axes, whole))}
        if isinstance(x, Adapted):  # the product of a [L, *in, rank] and b [L, rank, *out] is added to the weight
            of, shapes = adapter_axes(axes, x), adapter_shapes(whole, x.a, x.b)
            a, b = (padded(*one) for one in zip(of, shapes))
            found["'s adapter"] = ((*x.a.shape[:-1], *x.b.shape[2:]), (*a[:-1], *b[2:]))
        for name, (shape, stored) in found.items():
            if shape not in (whole, stored):
                raise ValueError(
                    f"published parameter {jax.tree_util.keystr(path)}{name} is {shape}, the policy's is {whole}"
                )

    jax.tree_util.tree_map_with_path(check, policy.sizes(), policy.axes(), params)


def adapter_axes(axes: Axes, x: Adapted) -> tuple[Axes, Axes]:
    """Returns the logical axes of an adapter's two parts beside a weight with `axes`."""
    inner = x.a.ndim - 1  # layers and inputs
    return (*axes[:inner], None), (axes[0], None, *axes[inner:])


def served(policy: Policy, params: Params, *, share: bool, gather: bool, weights: str | None = None) -> dict[str, Any]:
    """Returns `params` in the policy's compute dtype, with the layout for decoding.

    Norm scales and routers stay float32, as the layers use them. A leaf that already has the dtype and the layout is the learner's
    own array if `share`, and a copy otherwise; every other leaf is a new array that shares no memory with the learner's,
    so that the sampler may delete it. An adapter has its weight's layout, except for its rank, which no mesh axis splits.

    Args:
      policy: the policy of the parameters.
      params: the learner's parameters; an `Adapted` in the place of a weight that has an adapter beside it.
      share: whether the learner's own arrays may be served.
      gather: whether weights are whole over the fsdp axis, which saves each decode step their gathering.
      weights: dtype of the layers' matrices, which then have scales (`narrow`); None leaves them in the compute dtype.

    Raises:
      ValueError: where `params` are not those of `policy`.
    """
    partitioner = policy.partitioner
    if gather:
        partitioner = replace(partitioner, rules={**partitioner.rules, "embed": ()})

    check_shapes(policy, params)

    def placed(path: tuple[Any, ...], axes: tuple, x: jax.Array) -> jax.Array:
        dtype = x.dtype if path[-1].key in PRECISE else policy.compute_dtype
        sharding = partitioner.stored(axes, x.shape)
        if x.dtype == dtype and isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x if share else x.copy()
        if x.dtype == dtype:
            return jax.device_put(x, sharding, may_alias=False)
        # Cast before the transfer: fewer bytes move between devices. A host array goes straight to its shards.
        return jax.device_put(x.astype(dtype), sharding)

    def leaf(path: tuple[Any, ...], axes: tuple, x: Any) -> Any:
        if weights is not None and (inputs := narrow.inputs_of(path, axes)):
            layout = partitioner.stored(axes, x.shape)
            if isinstance(x, jax.Array) and x.sharding.device_set != layout.device_set:
                x = jax.device_put(x, layout)
            return narrow.quantized(x, inputs, weights, layout)
        if not isinstance(x, Adapted):
            return placed(path, axes, x)
        a, b = (placed(path, *one) for one in zip(adapter_axes(axes, x), (x.a, x.b)))
        return Adapted(placed(path, axes, x.weights), a, b, x.scale)

    axes = policy.axes()
    return jax.tree_util.tree_map_with_path(leaf, axes, params, is_leaf=lambda x: isinstance(x, tuple))
