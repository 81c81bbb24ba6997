"""What the backward pass finds in memory of a layer's forward pass, and what it computes again: the policies by name.

Bytes kept of each token and layer in bfloat16, for width D, H heads and K key/value heads of width C, and an MLP of width M:

    offload        0 on the device, 2 D on the host
    full           2 D                          the layer's input
    attention      2 D + 2 H C + 4 H            and what attention returned, so that it runs once
    projections    4 D + 4 H C + 4 K C + 4 H    and queries, keys, values and the stream between attention and MLP
    gate           that and 2 M                 and the MLP's gate
    dots           about 2 (4 D + 2 H C + 2 K C + 2 M)   all matrix products
    none           everything

"full" computes again all products but the MLP's last; "projections" only the MLP's first two, "gate" one of these.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.kernels.attention import cudnn

# Names that a layer gives to its values.
INPUT, QUERY, KEY, VALUE, MIDDLE, GATE = "layer_input", "query", "key", "value", "middle", "gate"
# By which primitive or name fused attention's forward pass returns its output and sums.
ATTENTION_PRIMITIVE, ATTENTION_NAME = cudnn.FORWARD, "splash_attention_residual"

Policy = Callable[..., Any]


def named(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """`x`, known to the policies by `name`."""
    return checkpoint_name(x, name)


def _keeping(*names: str, products: bool = False) -> Policy:
    """Keeps what attention returned, the named values and, if asked, every product that has no batch axes."""
    of_name = jax.checkpoint_policies.save_only_these_names(ATTENTION_NAME, *names)

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
    "gate": _keeping(QUERY, KEY, VALUE, MIDDLE, GATE),
    "dots": _keeping(products=True),
}
NAMES = ("none", *POLICIES)
