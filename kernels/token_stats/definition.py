"""The shared definitions of all backends of token_stats: the static description of a call, the logits, and the noise.

    z_v = cap(h . w_v) + bias_v,   cap(x) = x, or soft_cap tanh(x / soft_cap),   p = softmax(z / temperature)

A bias of -inf excludes an entry from the softmax. Differences of logits are taken before the division by the temperature, since
quotients of large logits are rounded too coarsely.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, UInt32

OUTPUTS = ("logprob", "entropy", "sum_p2", "uniform_logprob", "noise_logprob")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The static description of a call, by which a backend accepts or refuses it.

    Attributes:
      platform: platform on which the call runs, "cpu", "gpu" or "tpu".
      dtype: name of the dtype of the hidden states, in which products are computed.
      tokens: number of rows of the hidden states.
      width: number of columns of the hidden states.
      vocabulary: number of rows of the head.
      outputs: the requested statistics, members of OUTPUTS.
      temperature: divisor of the logits.
      soft_cap: bound of the logits, or None.
      biased: whether there is a bias.
      chunk: vocabulary entries of a tile, or None for the backend's own choice.
      shards: number of devices over which the call is split.
      parts: number of shares of a device's tokens, which are processed one after another.
      turned: whether the head's gradient is stored as [D, V], as TPUs scatter it over a mesh.
    """

    platform: str
    dtype: str
    tokens: int
    width: int
    vocabulary: int
    outputs: tuple[str, ...]
    temperature: float
    soft_cap: float | None
    biased: bool
    chunk: int | None
    shards: int
    parts: int = 1
    turned: bool = False


def product(hidden: Float[Array, "T D"], head: Float[Array, "V D"]) -> Float[Array, "T V"]:
    """Returns h . w_v in the dtype of `hidden`, with float32 sums."""
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(hidden, head.astype(hidden.dtype), dimensions, preferred_element_type=jnp.float32)


def logits(raw: Float[Array, "T V"], bias: Float[Array, " V"] | None, call: Call) -> Float[Array, "T V"]:
    """Returns the float32 logits z of the module's equation from the products h . w_v."""
    z = raw if call.soft_cap is None else call.soft_cap * jnp.tanh(raw / call.soft_cap)
    return z if bias is None else z + bias.astype(jnp.float32)


def noise(words: UInt32[Array, "2"], tokens: Int[Array, " T"], entries: Int[Array, " V"]) -> Float[Array, "T V"]:
    """Returns uniform numbers in (0, 1) that depend on the words, the token's index and the vocabulary entry alone.

    Tiles, shards and the backward pass therefore see the same numbers (Threefry, Salmon et al. 2011).
    """
    shape = (tokens.shape[0], entries.shape[0])
    counters = jnp.stack([jnp.broadcast_to(tokens[:, None], shape), jnp.broadcast_to(entries, shape)])
    bits = threefry_2x32((words[0], words[1]), counters.astype(jnp.uint32).reshape(-1))
    return ((bits.reshape(2, *shape)[0] >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
