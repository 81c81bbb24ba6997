"""The parts of a layer: RMSNorm, rotary positions, grouped-query projections and gated MLP; and what their backward pass recomputes.

RMSNorm: https://arxiv.org/abs/1910.07467, RoPE (half-split form): https://arxiv.org/abs/2104.09864,
GQA: https://arxiv.org/abs/2305.13245, SwiGLU: https://arxiv.org/abs/2002.05202.
Each parameter carries its logical axes (`axes`), which the partitioner maps to the mesh; parameters are float32 and are
cast to the compute dtype where they are used. Statistics and rotations are computed in float32.

A rematerialisation policy (`POLICIES`) says what the backward pass finds in memory and what it recomputes. Bytes kept for each
token and layer in bfloat16, for width D, H heads and K key/value heads of width C, and an MLP of width M:

    offload        0 on the device, 2 D on the host
    full           2 D                          the layer's input
    attention      2 D + 2 H C + 4 H            and attention's results, so that it runs once
    projections    4 D + 4 H C + 4 K C + 4 H    and queries, keys, values and the stream between attention and MLP
    gate           that and 2 M                 and the MLP's gate
    dots           about 2 (4 D + 2 H C + 2 K C + 2 M)   all matrix products
    none           everything

A layer with k experts of width M in place of its MLP keeps 4 k M bytes of them with "gate": both of their first products.

"full" recomputes all products but the MLP's last; "projections" only the MLP's first two, "gate" one of these.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.attention import cudnn
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.gated import GATE, gated_mlp
from jaxrl_llm.models.linear import added, biased, linear, linears, pinned, rounded, written

# Names that a layer gives to its values.
INPUT, QUERY, KEY, VALUE, MIDDLE = "layer_input", "query", "key", "value", "middle"
ROUTER, EXPERT_GATE = "router", "expert_gate"
# The primitive, and the name, with which fused attention's forward pass returns its output and sums.
ATTENTION_PRIMITIVE, ATTENTION_NAME = cudnn.FORWARD, "splash_attention_residual"

Policy = Callable[..., Any]


def named(x: Shaped[Array, "..."], name: str) -> Shaped[Array, "..."]:
    """Names `x` for the rematerialisation policies."""
    return checkpoint_name(x, name)


def _keeping(*names: str, products: bool = False) -> Policy:
    """Makes a policy that keeps attention's results, experts' choices, the named values and, if asked, every product that has no batch axes."""
    of_name = jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME, ROUTER, *names)

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        dots = products and jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
        return primitive.name == ATTENTION_PRIMITIVE or dots or of_name(primitive, *args, **params)

    return policy


POLICIES: dict[str, Policy] = {
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": _keeping(),
    "projections": _keeping(QUERY, KEY, VALUE, MIDDLE),
    "gate": _keeping(QUERY, KEY, VALUE, MIDDLE, GATE, EXPERT_GATE),
    "dots": _keeping(products=True),
}
NAMES = ("none", *POLICIES)

Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float) -> nnx.Param:
    """Returns a float32 parameter drawn from a normal distribution, with its logical axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def rope_frequencies(architecture: Architecture) -> Float[Array, " half"]:
    """Returns radians per position of each pair of head dimensions, with Llama 3's stretch where the architecture has one."""
    half = architecture.rotated // 2
    frequencies = architecture.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    turns = frequencies * (scaling.original_max_positions / (2 * math.pi))  # within the original context length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rope(architecture: Architecture, positions: Int[Array, "B T"]) -> Rope:
    """Returns cosine and sine of each rotation, float32; on TPUs they are computed once, and not in each layer."""
    angles = pinned(positions[..., None].astype(jnp.float32) * _known_frequencies(architecture))
    return written(pinned(jnp.cos(angles))), written(pinned(jnp.sin(angles)))


def _known_frequencies(architecture: Architecture) -> Float[Array, " half"]:
    """Returns `rope_frequencies`; ordered programs hold them as constants and do not compute them."""
    with jax.ensure_compile_time_eval() if dispatch.ordered() else contextlib.nullcontext():
        return rope_frequencies(architecture)


@jax.custom_vjp
def rotate(x: Float[Array, "B T heads C"], rotation: Rope) -> Float[Array, "B T heads C"]:
    """Rotates the pairs (i, i + C/2) of each head; angles have no gradient, and that of `x` is rotated back."""
    return _turned(x, rotation, -1.0)


def _turned(x: jax.Array, rotation: Rope, sign: float) -> jax.Array:
    # Written without a concatenation, which XLA would not join to what comes before and after it.
    cos, sin = (part[:, :, None, None, :] for part in rotation)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    signs = jnp.array([sign, -sign])[:, None]
    turned = pinned(halves * cos) + pinned(jnp.flip(halves, -2) * (signs * sin))
    return rounded(turned.reshape(x.shape), x.dtype)


def _rotate_back(rotation: Rope, g: Float[Array, "B T heads C"]) -> tuple[Float[Array, "B T heads C"], None]:
    return _turned(g, rotation, 1.0), None


rotate.defvjp(lambda x, rotation: (rotate(x, rotation), rotation), _rotate_back)


def rotate_first(x: Float[Array, "B T heads C"], rotation: Rope) -> Float[Array, "B T heads C"]:
    """Rotates as many of each head's first dimensions as there are angles for, and leaves the others."""
    width = 2 * rotation[0].shape[-1]
    if width == x.shape[-1]:
        return rotate(x, rotation)
    return jnp.concatenate([rotate(x[..., :width], rotation), x[..., width:]], axis=-1)


class RMSNorm(nnx.Module):
    """RMSNorm: scale * x / sqrt(mean(x^2) + epsilon) over the last axis, in float32; with 1 + scale where it is `centred` on zero."""

    def __init__(self, width: int, epsilon: float, centred: bool = False):
        first = jnp.zeros if centred else jnp.ones
        self.scale = nnx.Param(first(width, jnp.float32), axes=(None,))
        self.epsilon, self.centred = epsilon, centred

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        if dispatch.ordered():
            return arithmetic.rms_norm(x, self._scale(), self.epsilon)
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * inverse * self._scale()).astype(x.dtype)

    def of_sum(self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], name: str) -> tuple[jax.Array, jax.Array]:
        """Returns x + y, named `name` for the policies, and its norm; ordered programs compute those of one token a row, a sampler's, in one pass."""
        if dispatch.ordered() and x.shape[1] == 1:
            return arithmetic.added_norm(x, y, self._scale(), self.epsilon)
        total = named(added(x, y), name)
        return total, self(total)

    def _scale(self) -> Float[Array, " D"]:
        return 1.0 + self.scale[...] if self.centred else self.scale[...]


class Projection(nnx.Module):
    """A linear map from the residual stream to heads, `parts` widths of a head each, with an optional bias."""

    def __init__(self, architecture: Architecture, heads: int, axis: str, parts: int = 1, *, rngs: nnx.Rngs):
        shape = (architecture.width, heads, parts * architecture.head_width)
        self.kernel = parameter(rngs, shape, ("embed", axis, "head_width"), architecture.init_std)
        bias = nnx.Param(jnp.zeros(shape[1:], jnp.float32), axes=(axis, "head_width"))
        self.bias = bias if architecture.qkv_bias else None

    def of(self, y: Float[Array, "B T heads C"]) -> Float[Array, "B T heads C"]:
        """Adds the projection's bias, where there is one, to its product `y`."""
        return y if self.bias is None else biased(y, self.bias[...])


class Attention(nnx.Module):
    """The projections around attention, which the caller computes."""

    def __init__(self, architecture: Architecture, *, rngs: nnx.Rngs):
        self.gated, self.head_width = architecture.output_gate, architecture.head_width
        self.query = Projection(architecture, architecture.heads, "heads", 1 + self.gated, rngs=rngs)
        self.key = Projection(architecture, architecture.kv_heads, "kv_heads", rngs=rngs)
        self.value = Projection(architecture, architecture.kv_heads, "kv_heads", rngs=rngs)
        shape = (architecture.heads, architecture.head_width, architecture.width)
        self.output = parameter(rngs, shape, ("heads", "head_width", "embed"), architecture.init_std)
        norm = (architecture.head_width, architecture.norm_epsilon, architecture.zero_centred)
        self.query_norm = RMSNorm(*norm) if architecture.qk_norm else None
        self.key_norm = RMSNorm(*norm) if architecture.qk_norm else None

    def project(
        self, x: Float[Array, "B T D"], rotation: Rope
    ) -> tuple[Float[Array, "B T H C"], Float[Array, "B T K C"], Float[Array, "B T K C"], jax.Array | None]:
        """Returns rotated queries, rotated keys, values, and the gate of the heads' outputs, [B, T, H, C], where there is one."""
        maps, gate = (self.query, self.key, self.value), None
        q, k, v = (part.of(y) for part, y in zip(maps, linears(x, [part.kernel[...] for part in maps])))
        if self.gated:
            q, gate = q[..., : self.head_width], q[..., self.head_width :]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate_first(q, rotation), rotate_first(k, rotation), v, gate

    def merge(self, heads: Float[Array, "B T H C"], gate: jax.Array | None = None) -> Float[Array, "B T D"]:
        """Projects the heads' outputs, through their gate where there is one, back to the residual stream."""
        if gate is not None:
            heads = heads * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(heads.dtype)
        return linear(heads, self.output[...], 2)


class MLP(nnx.Module):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, architecture: Architecture, mlp_width: int, *, rngs: nnx.Rngs):
        width, std = architecture.width, architecture.init_std
        self.gate = parameter(rngs, (width, mlp_width), ("embed", "mlp"), std)
        self.up = parameter(rngs, (width, mlp_width), ("embed", "mlp"), std)
        self.down = parameter(rngs, (mlp_width, width), ("mlp", "embed"), std)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return gated_mlp(x, self.gate[...], self.up[...], self.down[...])
