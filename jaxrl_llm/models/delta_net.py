"""The mixer with a recurrent state in place of attention: projections and a causal convolution around the gated delta rule.

    (q, k, v) = silu(convolution(x W_input))     q = unit(q) / sqrt(dk)     k = unit(k)
    beta = sigmoid(x W_strength)     g = -exp(log_decay) softplus(x W_rate + rate_bias)
    y = (norm(rule(q, k, v, g, beta)) * silu(x W_gate)) W_output

Where the architecture joins the projections, a key head's part of one matrix gives its query, key, values and gates, that of another
its strengths and rates. Convolution, norms, gates and the rule are float32, but that q, k and v are rounded to the dtype of the inputs. Padding changes neither state nor convolution.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.distributed.mesh import Partitioner, names
from jaxrl_llm.kernels.delta_inputs.api import delta_inputs
from jaxrl_llm.kernels.delta_rule.api import State, delta_rule
from jaxrl_llm.kernels.delta_step.api import Tokens, delta_step
from jaxrl_llm.models import gated_delta
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.layers import QUERY, RMSNorm, named, parameter
from jaxrl_llm.models.linear import linear

# The logical axes of what all layers hold, in the order of Held.
STATE_AXES: dict[str, tuple[str | None, ...]] = {
    "state": ("layers", "batch", "heads", None, None),
    "conv": ("layers", "batch", None, None),
}


class Held(NamedTuple):
    """The state that a layer keeps of earlier tokens: the rule's state, float32, and the last inputs of the convolution."""

    state: Float[Array, "B Hv dk dv"]
    conv: Float[Array, "B reach channels"]


class GatedDeltaNet(nnx.Module):
    """The projections, the convolution and the rule of one layer."""

    def __init__(self, architecture: Architecture, partitioner: Partitioner, *, rngs: nnx.Rngs):
        assert architecture.delta is not None
        self.sizes, self.partitioner, self.joined = architecture.delta, partitioner, architecture.joined
        size, width, std = self.sizes, architecture.width, architecture.init_std
        heads, wide = size.value_heads, ("embed", "heads", "head_width")
        if self.joined:
            times = heads // size.key_heads
            shape = (width, size.key_heads, 2 * size.key_width + 2 * times * size.value_width)
            self.inputs = parameter(rngs, shape, wide, std)
            self.rates = parameter(rngs, (width, size.key_heads, 2 * times), wide, std)
        else:
            self.input = parameter(rngs, (width, size.channels), ("embed", "mlp"), std)
            self.gate = parameter(rngs, (width, heads, size.value_width), wide, std)
            self.strength = parameter(rngs, (width, heads), ("embed", "heads"), std)
            self.rate = parameter(rngs, (width, heads), ("embed", "heads"), std)
        self.taps = parameter(rngs, (size.channels, 1, size.taps), (None, None, None), size.taps**-0.5)
        rates = jax.random.uniform(rngs.params(), (heads,), jnp.float32, minval=0.01, maxval=16.0)
        self.log_decay = nnx.Param(jnp.log(rates), axes=(None,))
        self.rate_bias = nnx.Param(jnp.ones(heads, jnp.float32), axes=(None,))
        self.norm = RMSNorm(size.value_width, architecture.norm_epsilon)
        self.output = parameter(rngs, (heads, size.value_width, width), ("heads", "head_width", "embed"), std)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        held: Held | None = None,
    ) -> tuple[Float[Array, "B T D"], Held]:
        """Returns the outputs, and the state to keep for the tokens that follow.

        Args:
          x: inputs.
          segments: the segment of each token, where padding belongs to the segment before it (gated_delta.continued).
          valid: True for tokens that are no padding; they come first where the returned state is used further.
          held: the state kept of earlier tokens, or None where there are none.
        """
        mixed, gate, *rates = self._projected(x)
        tokens = self._tokens(mixed, rates, segments, valid, None if held is None else held.conv)
        held = self.empty(x.shape[0], mixed.dtype) if held is None else held
        out, state = self._rule(*tokens, segments, held.state)
        conv = gated_delta.last_inputs(mixed, valid, held.conv).astype(held.conv.dtype)
        return self._output(out, gate, x.dtype), Held(state, conv)

    def decode(self, x: Float[Array, "S 1 D"], held: Held, layer: Int[Array, ""]) -> tuple[Float[Array, "S 1 D"], Held]:
        """Returns the outputs of one token per slot, and what is kept after it; `held` is of all layers that hold a state, [L, S, ...], and
        those of `layer` are read and written."""
        mixed, gate, *rates = self._projected(x)
        ones = jnp.ones(x.shape[:2], jnp.int32)
        before = jax.lax.dynamic_index_in_dim(held.conv, layer, keepdims=False)
        tokens = self._tokens(mixed, rates, ones, ones > 0, before)
        out, states = self._step(jax.tree.map(lambda part: part[:, 0], tokens), held.state, layer)
        # Computed before it is written: together with what it is read from, XLA would copy the inputs of all layers.
        conv = jax.lax.optimization_barrier(jnp.concatenate([before[:, 1:], mixed.astype(before.dtype)], axis=1))
        return self._output(out[:, None], gate, x.dtype), Held(states, held.conv.at[layer].set(conv))

    def _tokens(
        self,
        mixed: Float[Array, "B T channels"],
        rates: Sequence[Float[Array, "B T Hv"]],
        segments: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        before: Float[Array, "B reach channels"] | None,
    ) -> Tokens:
        """Returns q, k and v in the dtype of `mixed`, g and beta."""
        strength, rate = (x.astype(jnp.float32) for x in rates)
        beta = jnp.where(valid[..., None], jax.nn.sigmoid(strength), 0.0)
        decay = -jnp.exp(self.log_decay[...]) * jax.nn.softplus(rate + self.rate_bias[...])
        # No token sees padding, which is of no token's segment.
        q, k, v = self._inputs(mixed, jnp.where(valid, segments, -1), before)
        return q, k, v, jnp.where(valid[..., None], decay, 0.0), beta

    def _inputs(
        self, mixed: Float[Array, "B T channels"], segments: Int[Array, "B T"], before: jax.Array | None
    ) -> tuple[Float[Array, "B T Hk dk"], Float[Array, "B T Hk dk"], Float[Array, "B T Hv dv"]]:
        """Applies the convolution on the mesh: by whatever backend where only rows are split, else by XLA, which splits channels and tokens."""
        size, partitioner, taps = self.sizes, self.partitioner, self.taps[...][:, 0]
        run = partial(delta_inputs, key_heads=size.key_heads, key_width=size.key_width, value_width=size.value_width)
        if before is not None or partitioner.mesh.size == 1:
            return run(mixed, taps, segments, before)
        rows = partitioner.spec(("batch",), mixed.shape[:1])
        if math.prod(partitioner.axis_sizes[axis] for axis in names(rows[0])) < partitioner.mesh.size:
            return run(mixed, taps, segments, backend="reference")
        return jax.shard_map(
            run,
            mesh=partitioner.mesh,
            in_specs=(PartitionSpec(*rows, None, None), PartitionSpec(None, None), PartitionSpec(*rows, None)),
            out_specs=(PartitionSpec(*rows, None, None, None),) * 3,
            check_vma=False,  # kernels' outputs carry no varying-axes types
        )(mixed, taps, segments)

    def _output(
        self, out: Float[Array, "B T Hv dv"], gate: Float[Array, "B T Hv dv"], dtype: jnp.dtype
    ) -> Float[Array, "B T D"]:
        y = (self.norm(out) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)
        return linear(y, self.output[...], 2)

    def empty(self, rows: int, dtype: jnp.dtype) -> Held:
        """Returns the state before any token."""
        size = self.sizes
        state = jnp.zeros((rows, *size.state_shape), jnp.float32)
        return Held(state, jnp.zeros((rows, size.taps - 1, size.channels), dtype))

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns inputs of the convolution [B, T, channels], gates [B, T, Hv, dv], and strengths and rates [B, T, Hv] before their functions."""
        if not self.joined:
            mixed, gate = (named(linear(x, kernel[...]), QUERY) for kernel in (self.input, self.gate))
            return mixed, gate, linear(x, self.strength[...]), linear(x, self.rate[...])
        size, rows = self.sizes, x.shape[:2]
        ends = (
            size.key_width,
            2 * size.key_width,
            2 * size.key_width + size.value_heads // size.key_heads * size.value_width,
        )
        *parts, gate = jnp.split(named(linear(x, self.inputs[...]), QUERY), ends, axis=-1)
        mixed = jnp.concatenate([part.reshape(*rows, -1) for part in parts], axis=-1)
        strength, rate = (part.reshape(*rows, -1) for part in jnp.split(linear(x, self.rates[...]), 2, axis=-1))
        return mixed, gate.reshape(*rows, size.value_heads, -1), strength, rate

    def _rule(
        self,
        q: Float[Array, "B T Hk dk"],
        k: Float[Array, "B T Hk dk"],
        v: Float[Array, "B T Hv dv"],
        g: Float[Array, "B T Hv"],
        beta: Float[Array, "B T Hv"],
        segments: Int[Array, "B T"],
        state: State,
    ) -> tuple[Float[Array, "B T Hv dv"], State]:
        """Applies the rule on the mesh: rows are split over the batch axes, and heads, in exchange for tokens, over `tensor` and `context`."""
        partitioner, heads = self.partitioner, self.sizes.value_heads
        if partitioner.mesh.size == 1:
            return delta_rule(q, k, v, g, beta, segments, state)
        wanted = (*partitioner.rules["heads"], *partitioner.rules["length"])
        axes = tuple(axis for axis in wanted if partitioner.axis_sizes[axis] > 1)
        ways = math.prod(partitioner.axis_sizes[axis] for axis in axes)
        if heads % ways:  # each device computes all heads of its rows
            axes, ways = (), 1
        if self.sizes.key_heads % ways:
            q, k = (jnp.repeat(x, heads // self.sizes.key_heads, axis=2) for x in (q, k))
        rows, split = partitioner.spec(("batch",), q.shape[:1])[0], axes or None
        tokens, numbers = PartitionSpec(rows, None, split, None), PartitionSpec(rows, None, split)
        kept = PartitionSpec(rows, split, None, None)
        return jax.shard_map(
            delta_rule,
            mesh=partitioner.mesh,
            in_specs=(tokens, tokens, tokens, numbers, numbers, PartitionSpec(rows, None), kept),
            out_specs=(tokens, kept),
            check_vma=False,  # a scan's carry is typed by its start, which may vary over fewer axes
        )(q, k, v, g, beta, segments, state)

    def _step(
        self, tokens: Tokens, states: Float[Array, "L S Hv dk dv"], layer: Int[Array, ""]
    ) -> tuple[Float[Array, "S Hv dv"], Float[Array, "L S Hv dk dv"]]:
        """Applies one token of the rule on the mesh; each device has its own slots and heads."""
        partitioner, (q, k, v, g, beta) = self.partitioner, tokens
        if partitioner.mesh.size == 1:
            return delta_step(q, k, v, g, beta, states, layer)
        kept = partitioner.spec(STATE_AXES["state"], states.shape)
        ways = math.prod(partitioner.axis_sizes[axis] for axis in names(kept[2]))
        if self.sizes.key_heads % ways:
            q, k = (jnp.repeat(x, self.sizes.value_heads // self.sizes.key_heads, axis=1) for x in (q, k))
        wide, numbers = PartitionSpec(kept[1], kept[2], None), PartitionSpec(kept[1], kept[2])
        return jax.shard_map(
            delta_step,
            mesh=partitioner.mesh,
            in_specs=(wide, wide, wide, numbers, numbers, kept, PartitionSpec()),
            out_specs=(wide, kept),
            check_vma=False,  # kernels' outputs carry no varying-axes types
        )(q, k, v, g, beta, states, layer)
