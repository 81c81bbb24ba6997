"""Model FLOPs against numbers derived by hand, and against what XLA counts of the same products."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.metrics import flops


@dataclass(frozen=True, kw_only=True)
class Sizes:
    vocabulary_size: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    windows: tuple[int | None, ...]
    experts: None = None
    delta: None = None
    output_gate: bool = False

    @property
    def sparse(self) -> tuple[bool, ...]:
        return (False,) * len(self.windows)

    @property
    def recurrent(self) -> tuple[bool, ...]:
        return (False,) * len(self.windows)


QWEN_0_5B = Sizes(
    vocabulary_size=151936, width=896, heads=14, kv_heads=2, head_width=64, mlp_width=4864, windows=(None,) * 24
)
# Heads wider than the stream (4 x 24 = 96 > 32), as in Qwen3-0.6B.
SMALL = Sizes(vocabulary_size=96, width=32, heads=4, kv_heads=2, head_width=24, mlp_width=80, windows=(None,) * 3)


def test_a_published_model_by_hand():
    # Per layer 2 x 896^2 (query, output) + 2 x 896 x 128 (key, value) + 3 x 896 x 4864 (MLP) = 14,909,440 weights;
    # 24 layers and the head 151,936 x 896: 493,961,216 weights, two FLOPs each a token.
    assert flops.layer_weights(QWEN_0_5B) == 14_909_440
    products = 2 * 493_961_216 * 2048
    # 2048^2 / 2 pairs, a dot product and a weighted sum of 14 x 64 numbers each, in 24 layers.
    attention = 4 * 2_097_152 * 896 * 24
    assert flops.forward(QWEN_0_5B, [2048]) == products + attention
    assert flops.update(QWEN_0_5B, [2048]) == 3 * (products + attention)


def test_attention_counts_half_of_the_square_or_of_the_windows_band():
    assert flops.attention_pairs(8) == 32
    assert flops.attention_pairs(8, window=8) == flops.attention_pairs(8, window=100) == 32
    assert flops.attention_pairs(8, window=2) == 14
    # The exact number of pairs, the diagonal included, is within half a pair a token.
    for n, w in ((64, 64), (64, 16), (64, 1)):
        exact = sum(min(i + 1, w) for i in range(n))
        assert abs(exact - flops.attention_pairs(n, w)) <= n / 2


def test_packed_sequences_count_by_their_own_lengths_and_layers_by_their_windows():
    assert flops.forward(SMALL, [5, 7]) == flops.forward(SMALL, [5]) + flops.forward(SMALL, [7])
    assert flops.forward(SMALL, [12]) - flops.forward(SMALL, [5, 7]) == 4 * (5 * 7) * 96 * 3
    half = Sizes(**{**vars(SMALL), "windows": (4, None, 4)})
    assert flops.forward(SMALL, [12]) - flops.forward(half, [12]) == 4 * 2 * (72 - 40) * 96
    assert flops.forward(SMALL, []) == 0


def test_a_truncated_forward_counts_its_layers_and_no_head():
    assert flops.forward(SMALL, [6], layers=0, head=False) == 0
    assert flops.forward(SMALL, [6], layers=1, head=False) * 3 == flops.forward(SMALL, [6], head=False)
    assert flops.forward(SMALL, [6]) - flops.forward(SMALL, [6], head=False) == 2 * 96 * 32 * 6


def products(weights, x):
    """The products of a forward over one sequence, all pairs of query and key, and nothing elementwise."""
    length, kept = x.shape[0], []
    for w in weights["layers"]:
        k, v = ((x @ w[name]).reshape(length, 2, 64) for name in "kv")
        q = (x @ w["q"]).reshape(length, 2, -1, 64)
        scores = jnp.einsum("tkgc,skc->kgts", q, k)
        x = jnp.einsum("kgts,skc->tkgc", scores, v).reshape(length, -1) @ w["o"]
        kept.append(x @ w["gate"])  # returned instead of multiplied
        x = (x @ w["up"]) @ w["down"]
    return x @ weights["head"], kept


def weights_of(sizes):
    queries, keys = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    shapes = {
        "q": (sizes.width, queries),
        "k": (sizes.width, keys),
        "v": (sizes.width, keys),
        "o": (queries, sizes.width),
        "gate": (sizes.width, sizes.mlp_width),
        "up": (sizes.width, sizes.mlp_width),
        "down": (sizes.mlp_width, sizes.width),
    }
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    head = jax.ShapeDtypeStruct((sizes.width, sizes.vocabulary_size), jnp.float32)
    return {"layers": [layer] * len(sizes.windows), "head": head}


def counted(function, *args):
    return jax.jit(function).lower(*args).cost_analysis()["flops"]


def test_xla_counts_the_same_products_with_the_other_half_of_attention():
    sizes, length = Sizes(**{**vars(QWEN_0_5B), "windows": (None,) * 2}), 512
    weights, x = weights_of(sizes), jax.ShapeDtypeStruct((length, sizes.width), jnp.float32)
    other_half = 4 * length**2 / 2 * 896 * 2
    assert counted(products, weights, x) == flops.forward(sizes, [length]) + other_half

    def step(weights, x, cotangents):
        out, pull = jax.vjp(products, weights, x)
        return out, pull(cotangents)

    out = jax.eval_shape(products, weights, x)
    full = counted(step, weights, x, out)
    # Sums of gradients that meet are the only further FLOPs.
    assert full == pytest.approx(flops.update(sizes, [length]) + 3 * other_half, rel=1e-3)


def test_mfu_is_the_share_of_the_peak():
    assert flops.peak("NVIDIA H200") == flops.peak("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak("NVIDIA H100 PCIe") == 756e12
    assert flops.peak("cpu") is None
    # 2 devices at half of their peak for 3 seconds.
    assert flops.mfu(989e12 * 3, 3.0, 2, 989e12) == 0.5


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"at least 0 \(got \[-1\]\)"):
        flops.forward(SMALL, [-1])
    with pytest.raises(ValueError, match="between 0 and the 3 layers"):
        flops.forward(SMALL, [1], layers=4)
    with pytest.raises(ValueError, match="positive time"):
        flops.mfu(1.0, 0.0, 1, 989e12)
