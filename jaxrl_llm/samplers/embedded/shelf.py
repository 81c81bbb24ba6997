"""Sets of adapters that the embedded sampler serves beside the published one, each row of a batch by its own.

The sets of a weight lie side by side along the rank, so that all of them are one adapter of rank sets x rank:

    y = x W + scale x ((x [A_0 | A_1 | ...]) . own) [B_0; B_1; ...]

where `own` is 1 at the ranks of a row's set and 0 elsewhere (`models.linear.Adapted.rows`). Two products read each set once, however many
rows ask for it, where copies of each row's own A and B would be read from memory for every row. Places are empty or taken, and shapes
never change: to load a set compiles nothing after the first time.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.distributed import padding
from jaxrl_llm.models import hf_format
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Params

_A, _B = -1, 1  # the axis of ranks in a stacked [L, *in, rank] and [L, rank, *out]


@dataclass(eq=False, kw_only=True)
class Shelf:
    """Loaded sets of adapters, by name; the published set has the empty name and place 0.

    Attributes:
      policy: the policy whose adapters all sets are like; None where it has none.
      places: most sets beside the published one.
    """

    policy: AdaptedPolicy | None = None
    places: int = 0

    def __post_init__(self) -> None:
        self._sets: dict[str, tuple[int, Params]] = {}

    @property
    def names(self) -> list[str]:
        """The names of the loaded sets, in order."""
        return sorted(self._sets)

    def place(self, name: str) -> int:
        """Returns the place of a set; raises ValueError where none has the name."""
        if name and name not in self._sets:
            loaded = ", ".join(self.names) or "none"
            raise ValueError(
                f"no adapters are loaded as {name!r} (SamplingParams.adapter; loaded: {loaded}): load() them, or set '' for the published ones"
            )
        return self._sets[name][0] if name else 0

    def add(self, name: str, adapters: Params) -> None:
        """Copies a set, a tree like `AdaptedPolicy.sizes()` of host or device arrays, to the devices.

        Raises:
          ValueError: no place is free, the name is taken or empty, or the set is not like the policy's or not finite.
        """
        if self.policy is None or not self.places:
            raise ValueError(
                "this sampler has no room for further adapters: set embedded.EmbeddedSampler.loaded to how many (and adapters = True)"
            )
        if not name or name in self._sets:
            raise ValueError(
                f"adapters need a name that none has (got {name!r}; loaded: {', '.join(self.names) or 'none'}): unload() those first"
            )
        free = sorted(set(range(1, self.places + 1)) - {place for place, _ in self._sets.values()})
        if not free:
            raise ValueError(
                f"all {self.places} places are taken by {', '.join(self.names)}: unload() one, or raise embedded.EmbeddedSampler.loaded"
            )
        self._sets[name] = free[0], _copied(self.policy, name, adapters)

    def remove(self, name: str) -> None:
        """Frees the place of a set; raises ValueError where none has the name."""
        self.place(name)
        del self._sets[name]

    def beside(self, params: Params) -> Params:
        """Returns served parameters with room for all sets, and the loaded ones in it."""
        if not self.places:
            return params

        def wide(x: Any) -> Any:
            if not isinstance(x, Adapted):
                return x
            a = _widened(x.a, axis=_A, sets=1 + self.places, sharding=x.a.sharding)
            b = _widened(x.b, axis=_B, sets=1 + self.places, sharding=x.b.sharding)
            return replace(x, a=a, b=b, sets=1 + self.places)

        params = jax.tree.map(wide, params, is_leaf=_adapted)
        for name in self._sets:
            params = self.put(params, name)
        return params

    def put(self, params: Params, name: str) -> Params:
        """Returns what `beside` has returned, with a set in its place; other leaves are the same arrays."""
        place, adapters = self._sets[name]

        def written(path: tuple[Any, ...], x: Any) -> Any:
            if not isinstance(x, Adapted):
                return x
            new = hf_format.leaf_of(adapters, tuple(key.key for key in path))
            a = _written(x.a, new["a"], place, axis=_A, sharding=x.a.sharding)
            return replace(x, a=a, b=_written(x.b, new["b"], place, axis=_B, sharding=x.b.sharding))

        return jax.tree_util.tree_map_with_path(written, params, is_leaf=_adapted)


def of_rows(params: Any, rows: Int[Array, " B"] | None) -> Any:
    """Returns parameters, or one layer's, in whose products each row of activations has its own set of adapters.

    Where there is one set, they are returned as they are.
    """

    def chosen(x: Any) -> Any:
        if not isinstance(x, Adapted) or x.sets == 1:
            return x
        assert rows is not None  # a program with several sets says which each row has
        stacked = x.a.ndim + x.b.ndim - x.weights.ndim > 2  # of all layers
        return replace(x, rows=jnp.broadcast_to(rows, (x.a.shape[0], len(rows))) if stacked else rows)

    return jax.tree.map(chosen, params, is_leaf=_adapted)


def _adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def _copied(policy: AdaptedPolicy, name: str, adapters: Params) -> Params:
    """Returns own arrays of a set, stored as the policy's are; raises ValueError where it is not like those, or not finite."""
    sizes, stored = policy.sizes(), policy.abstract()
    layout: Any = jax.tree.structure(sizes)
    if jax.tree.structure(adapters) != layout:
        raise ValueError(
            f"the adapters {name!r} are not those of the policy's linear maps {', '.join(policy.lora.targets)}: all sets of a sampler have "
            "the same lora.LoRA.targets"
        )

    def copied(path: tuple[Any, ...], own: Any, like: Any, x: Any) -> jax.Array:
        if x.shape not in (own.shape, like.shape):
            raise ValueError(
                f"adapter {jax.tree_util.keystr(path)} of {name!r} is {x.shape}, the policy's is {own.shape}: all sets of a sampler have "
                f"the same lora.LoRA.rank ({policy.lora.rank}) and base"
            )
        whole = padding.filled(jnp.asarray(x, policy.compute_dtype), like.shape)
        return jax.device_put(whole, like.sharding, may_alias=False)

    found = jax.tree_util.tree_map_with_path(copied, sizes, stored, adapters)
    if not bool(_finite(found)):  # a product of other rows with them would be nan, where they are multiplied by 0
        raise ValueError(f"the adapters {name!r} hold values that are not finite, and are not loaded")
    return found


@jax.jit
def _finite(adapters: Params) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(adapters)]))


@partial(jax.jit, static_argnames=("axis", "sets", "sharding"))
def _widened(x: Float[Array, "..."], *, axis: int, sets: int, sharding: Any) -> Float[Array, "..."]:
    """Returns an array with room for `sets` times its entries along an axis; the first are its own, the others 0."""
    shape = list(x.shape)
    shape[axis] *= sets
    return jax.lax.with_sharding_constraint(padding.filled(x, shape), sharding)


@partial(jax.jit, static_argnames=("axis", "sharding"))
def _written(
    table: Float[Array, "..."], new: Float[Array, "..."], place: Int[Array, ""], *, axis: int, sharding: Any
) -> Float[Array, "..."]:
    """Returns a table with a set in the place of that number."""
    begin, new = place * new.shape[axis], new.astype(table.dtype)
    return jax.lax.with_sharding_constraint(
        jax.lax.dynamic_update_slice_in_dim(table, new, begin, axis % table.ndim), sharding
    )
