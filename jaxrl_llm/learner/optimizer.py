"""The optimizer: AdamW with a schedule, a step count for each layer and sharded moments; and the choice of trainable parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import components
from jaxrl_llm.models.architecture import PRECISE, stack_of
from jaxrl_llm.models.linear import Rounding
from jaxrl_llm.models.value import HEAD

DTYPES = ("float32", "bfloat16")  # dtypes of weights and of their gradients


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """The choice of the policy's parameters that learn; the others keep values, moments and step counts bit for bit.

    Attributes:
      layers: number of first layers that learn; None for all.
      frozen: other parts that do not learn, among "embedding", "norm" (the final one) and "head".
    """

    layers: int | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "frozen", tuple(self.frozen))  # a list in a gin file; hashable here
        if unknown := sorted({*self.frozen} - {"embedding", "norm", "head"}):
            raise ValueError(f"Trainable.frozen may name embedding, norm and head (got {unknown})")
        components.at_least(self, 0, "layers")

    def mask(self, parts: Mapping[str, object], layers: int, period: int = 1) -> dict[str, np.ndarray]:
        """Returns whether each part learns: bool [], and bool [L / period] for each stack of layers (`Architecture.stacks`)."""
        first = layers if self.layers is None else self.layers
        known = {part: np.asarray(part not in self.frozen) for part in parts}
        stacks = {part: stack for part in parts if (stack := stack_of(part)) is not None}
        return known | {part: np.arange(layers)[stack::period] < first for part, stack in stacks.items()}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) under a learning-rate schedule.

    Attributes:
      learning_rate: peak learning rate.
      warmup_steps: updates over which the rate rises linearly to the peak; the first of n takes 1/n of it.
      schedule: "constant", "linear" or "cosine" decay after the warm-up.
      stable: share of the updates after the warm-up that take the peak before the decay (warm-up, stable, decay:
        https://arxiv.org/abs/2404.06395, section 4).
      final_fraction: share of the peak that the decay ends at.
      b1: decay of the first moment.
      b2: decay of the second moment.
      epsilon: added to the root of the second moment.
      weight_decay: decoupled weight decay, on matrices alone.
      max_grad_norm: global norm that gradients are clipped to; 0 never clips.
      moments_dtype: dtype of the first moment; both moments of routers of experts are always float32.
      second_moment_dtype: dtype of the second moment; sums are always float32 (bfloat16 for both moments:
        https://arxiv.org/abs/2412.19437, section 3.3.3).
      offload: keep the moments in the host's pinned memory, from which they move to the device for one group of parameters at a time.
      weights: how the trained weights are stored: "float32"; "stochastic", bfloat16 to which each change is rounded at random, without
        bias; or "compensated", bfloat16 with 16 further bits among the moments, which complete the float32 weight in each update.
        Norms' scales, routers and heads of value models are always float32. A stage that follows begins from the bfloat16 alone.
      gradients_dtype: dtype of the gradient of a micro-batch, "float32" or "bfloat16"; gradients of several micro-batches are always summed
        in float32, and so is each product's. None takes the dtype in which the weights are stored.
      slow_above: last layer, from 0, that learns at the full rate; later layers and the final norm learn at `slow_factor` of it, their
        weight decay included (BuPO's alternative to a first phase, https://arxiv.org/abs/2512.19673). None slows no layer.
      slow_factor: factor of the learning rate of those layers.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    stable: float = 0.0
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    moments_dtype: str = "float32"
    second_moment_dtype: str = "float32"
    offload: bool = False
    weights: Literal["float32", "stochastic", "compensated"] = "float32"
    gradients_dtype: str | None = None
    slow_above: int | None = None
    slow_factor: float = 0.1

    def __post_init__(self) -> None:
        components.at_least(self, 0, "learning_rate", "max_grad_norm", "warmup_steps", "slow_above", "slow_factor")
        components.within(self, "[0, 1]", "stable")
        if self.stable and self.schedule == "constant":
            components.refuse(self, "stable", "0 with the constant schedule, which never decays")
        if self.slow_above is not None and self.offload:
            components.refuse(
                self, "slow_above", "None with train.Optimizer.offload, which updates parts of layers on their own"
            )
        components.choices(self)
        components.one_of(self, (None, *DTYPES), "gradients_dtype")

    @property
    def weights_dtype(self) -> str:
        """The dtype in which the weights are stored, except those that are always float32."""
        return "float32" if self.weights == "float32" else "bfloat16"

    @property
    def slopes_dtype(self) -> str:
        """The dtype of the gradient of a micro-batch."""
        return self.gradients_dtype or self.weights_dtype

    def rate(self, updates: int) -> optax.Schedule:
        """Returns the learning rate by update, for a run of `updates` updates."""
        hold = round(self.stable * max(updates - self.warmup_steps, 0))
        decay = max(updates - self.warmup_steps - hold, 1)
        after = {
            "constant": optax.constant_schedule(self.learning_rate),
            "linear": optax.linear_schedule(self.learning_rate, self.learning_rate * self.final_fraction, decay),
            "cosine": optax.cosine_decay_schedule(self.learning_rate, decay, self.final_fraction)
            if self.learning_rate
            else optax.constant_schedule(0.0),
        }[self.schedule]
        # The first update of a warm-up of n takes 1/n of the peak: a rate of 0 would waste it.
        warmup = lambda step: self.learning_rate * (step + 1) / self.warmup_steps  # noqa: E731
        if hold:
            after = optax.join_schedules([optax.constant_schedule(self.learning_rate), after], [hold])
        return optax.join_schedules([warmup, after], [self.warmup_steps]) if self.warmup_steps else after

    def transform(self, updates: int) -> optax.GradientTransformation:
        """Returns the optax chain for a run of `updates` updates; the learner clips gradients, since it knows the global norm."""
        slower = [] if self.slow_above is None else [scale_late_layers(self.slow_above, self.slow_factor)]
        return optax.chain(
            scale_by_adam(self.b1, self.b2, self.epsilon, self.moments_dtype, self.second_moment_dtype),
            optax.add_decayed_weights(self.weight_decay, decays),
            optax.scale_by_learning_rate(self.rate(updates)),
            *slower,
        )


def precise(path: tuple[Any, ...]) -> bool:
    """Returns whether the leaf at a path of a model's parameters stays float32: a norm's scale, a router, the head of a value model."""
    return path[-1].key in PRECISE or path[0].key == HEAD


def rested(params: Any, dtype: str) -> Any:
    """Casts parameters, arrays or their shapes, to `dtype`, except those that are `precise` or float64."""

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        if precise(path) or x.dtype in (dtype, jnp.float64):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
        return x.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


def slopes_of(params: Any, dtype: str) -> Any:
    """Returns what a gradient in `dtype` is taken of: the parameters, with zeros in place of those that rest in another dtype."""
    shapes = rested(jax.eval_shape(lambda: params), dtype)
    return jax.tree.map(lambda x, like: x if x.dtype == like.dtype else jnp.zeros_like(like), params, shapes)


def read_by(slopes: Any, params: Any) -> Any:
    """Returns the parameters that a model computes with, whose gradient is that of `slopes`.

    Those of layers are rounded one layer at a time, so that no rounded copy of them all is beside their gradient.
    """

    def leaf(path: tuple[Any, ...], slope: Any, x: Any) -> Any:
        if slope.dtype == x.dtype:
            return slope
        found = Rounding(x, slope)
        return found.read() if stack_of(path[0].key) is None else found

    return jax.tree_util.tree_map_with_path(leaf, slopes, params)


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """The rule by which the weights of a model begin and change, for weights stored in float32; see bfloat16_weights for the others.

    Attributes:
      transform: the optax chain.
      name: the model's name.
      seed: seed of random rounding.
    """

    transform: optax.GradientTransformation
    name: str
    seed: int

    def shapes(self, params: Any) -> Any:
        """Returns shapes and shardings of the weights as they are stored, from those in float32."""
        return params

    def init(self, params: Any) -> Any:
        """Returns the optimizer's state before the first update, which is 0 everywhere; only shapes of `params` matter."""
        return self.transform.init(params)

    def begun(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Returns float32 weights as they are stored, and the state with their remainders; the state's sharding is unchanged."""
        return params, state

    def updated(self, params: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        """Returns the weights and the optimizer's state after an update by a float32 gradient, of all leaves or of some."""
        changes, state = self.transform.update(gradient, state, params)
        return optax.apply_updates(params, changes), state


def scale_by_adam(
    b1: float, b2: float, epsilon: float, mu_dtype: str = "float32", nu_dtype: str = "float32"
) -> optax.GradientTransformation:
    """Scales gradients by Adam, with a step count for each part of the parameters, [L] for those stacked over layers.

    A part or a layer that was frozen for a time resumes its bias correction where it was; the learning rate's schedule
    counts the updates of the whole model.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        count = {
            part: jnp.zeros((), jnp.int32) if stack_of(part) is None else jnp.zeros(_depth(tree), jnp.int32)
            for part, tree in params.items()
        }
        mu, nu = (
            jax.tree_util.tree_map_with_path(lambda path, p: jnp.zeros(p.shape, _moment_dtype(path, dtype)), params)  # noqa: B023
            for dtype in (mu_dtype, nu_dtype)
        )
        return optax.ScaleByAdamState(count=count, mu=mu, nu=nu)  # type: ignore[arg-type]

    def update(gradient: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        mu = jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m.astype(g.dtype), gradient, state.mu)
        nu = jax.tree.map(lambda g, v: (1 - b2) * jnp.square(g) + b2 * v.astype(g.dtype), gradient, state.nu)
        count = jax.tree.map(lambda n: n + 1, state.count)

        def direction(part: str) -> Any:
            first, second = (1 - b ** count[part].astype(jnp.float32) for b in (b1, b2))
            return jax.tree.map(
                lambda m, v: (m / along(first, m)) / (jnp.sqrt(v / along(second, v)) + epsilon), mu[part], nu[part]
            )

        cast = lambda tree, dtype: jax.tree_util.tree_map_with_path(  # noqa: E731
            lambda path, x: x.astype(_moment_dtype(path, dtype)), tree
        )
        state = optax.ScaleByAdamState(count=count, mu=cast(mu, mu_dtype), nu=cast(nu, nu_dtype))  # type: ignore[arg-type]
        return {part: direction(part) for part in mu}, state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def scale_late_layers(last: int, factor: float) -> optax.GradientTransformation:
    """Multiplies the changes of the layers after `last` (from 0) and of the final norm by `factor`.

    Raises:
      ValueError: the model has no layer after `last`.
    """

    def numbers(params: Any) -> dict[str, np.ndarray]:
        stacks = {part: stack for part in params if (stack := stack_of(part)) is not None}
        return {part: np.arange(_depth(params[part])[0]) * len(stacks) + stack for part, stack in stacks.items()}

    def init(params: Any) -> optax.EmptyState:
        layers = 1 + max(int(found.max()) for found in numbers(params).values())
        if last >= layers - 1:
            raise ValueError(
                f"train.Optimizer.slow_above must be below {layers - 1}, the last of the model's {layers} layers (got {last}): none would be slower"
            )
        return optax.EmptyState()

    def update(changes: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        factors = {part: jnp.where(found > last, factor, 1.0) for part, found in numbers(changes).items()}
        factors["norm"] = jnp.asarray(factor)
        slowed = {
            part: jax.tree.map(lambda x: x * along(factors[part], x).astype(x.dtype), tree) if part in factors else tree  # noqa: B023
            for part, tree in changes.items()
        }
        return slowed, state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _depth(stack: Any) -> tuple[int, ...]:
    """Returns the number of layers of a stack, as a shape."""
    return tuple(jax.tree.leaves(stack)[0].shape[:1])


def _moment_dtype(path: tuple[Any, ...], dtype: str) -> str:
    """Returns the dtype of a leaf's moment: float32 for routers, since their gradients are small and small differences decide their choices."""
    return "float32" if path[-1].key == "router" else dtype


def along(x: Any, like: Any) -> Any:
    """Reshapes `x` ([] or [L]) so that it broadcasts along the first axis of `like`."""
    return jnp.reshape(x, jnp.shape(x) + (1,) * (jnp.ndim(like) - jnp.ndim(x)))


def keep(new: Any, old: Any, learns: Mapping[str, Any]) -> Any:
    """Returns `new` where a part learns and `old` elsewhere, bit for bit.

    Args:
      new: parameters or an optimizer's state; every dictionary in it that has the keys of `learns` is treated part by part.
      old: the same before the update.
      learns: {part: bool [], or bool [L] for stacked layers}.
    """
    by_part = lambda node: isinstance(node, dict) and node.keys() == learns.keys()  # noqa: E731
    anything = jnp.any(jnp.stack([jnp.any(x) for x in learns.values()]))

    def chosen(new: Any, old: Any) -> Any:
        if not by_part(new):
            return jnp.where(anything, new, old)
        return {
            part: jax.tree.map(lambda n, o: jnp.where(along(learns[part], n), n, o), new[part], old[part])  # noqa: B023
            for part in learns
        }

    return jax.tree.map(chosen, new, old, is_leaf=by_part)


def decays(params: Any) -> Any:
    """Returns whether weight decay acts on each leaf: it acts on matrices, stacked over layers or not, and never on norms and biases, nor
    on the decays and the convolution of layers with a recurrent state."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            not any(word in str(p) for p in path for word in ("norm", "bias", "scale", "log_decay", "taps"))
        ),
        params,
    )


def state_shardings(init: Callable[[Any], Any], params: Any, replicated: Any) -> Any:
    """Returns the shardings of the optimizer's state: moments are sharded as their parameters are, everything else is replicated.

    Args:
      init: makes the state from the parameters.
      params: tree of ShapeDtypeStruct with shardings.
      replicated: sharding of scalars.
    """
    shapes = jax.tree.map(lambda x: x.shape, params)

    def moments(node: Any) -> bool:
        return isinstance(node, dict) and jax.tree.map(lambda x: x.shape, node) == shapes

    own = jax.tree.map(lambda x: x.sharding, params)
    state = jax.eval_shape(init, params)
    return jax.tree.map(lambda node: own if moments(node) else replicated, state, is_leaf=moments)
