"""Input that token_stats cannot take is refused with words on what to change; real shapes keep to the memory bound."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.kernels.token_stats import definition, xla
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.kernels.token_stats.specs import SPECS

HIDDEN, HEAD, TARGETS = jnp.ones((3, 4)), jnp.ones((5, 4)), jnp.zeros(3, jnp.int32)

BAD = {
    "must share D": {"head": jnp.ones((5, 3))},
    r"targets must be \[T\] = \(3,\)": {"targets": jnp.zeros(2, jnp.int32)},
    r"bias must be \[V\] = \(5,\)": {"bias": jnp.zeros(4)},
    "at least 1": {"hidden": jnp.ones((0, 4)), "targets": jnp.zeros(0, jnp.int32)},
    "hidden must be one of .*float16": {"hidden": HIDDEN.astype(jnp.float16)},
    "head must be one of .*int32": {"head": jnp.ones((5, 4), jnp.int32)},
    "targets must be integers": {"targets": jnp.zeros(3)},
    "unknown token_stats backend 'cuda'": {"backend": "cuda"},
    "distinct members of .*'probability'": {"outputs": ("probability",)},
    r"at least one \(got \(\)\)": {"outputs": ()},
    "give noise_key": {"outputs": ("noise_logprob",)},
    "temperature must be positive and finite .got 0": {"temperature": 0.0},
    "soft_cap must be positive": {"soft_cap": -1.0},
    "chunk must be at least 1": {"chunk": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    given = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS, **BAD[message]}
    # The function below the checker of annotations, as users run it.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(token_stats)(given.pop("hidden"), given.pop("head"), given.pop("targets"), **given)


def call_of(spec, platform="gpu"):
    return definition.Call(
        platform=platform,
        dtype="bfloat16",
        tokens=spec.tokens,
        width=spec.width,
        vocabulary=spec.vocabulary,
        outputs=("logprob", "entropy"),
        temperature=1.0,
        soft_cap=spec.soft_cap,
        biased=False,
        chunk=None,
        shards=1,
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_tiles_of_real_shapes_keep_to_their_budget_and_waste_little(name, platform):
    spec, budget = SPECS[name], xla.BUDGETS[platform]
    tokens, entries = xla.tile_sizes(call_of(spec, platform))
    assert tokens * (entries - 256) <= budget.elements
    tiles = -(-spec.tokens // tokens) * -(-spec.vocabulary // entries)
    assert tiles * tokens * entries <= 1.25 * spec.tokens * spec.vocabulary


@pytest.mark.parametrize("name", ["qwen2.5-3b", "qwen3-0.6b-unpadded", "smollm2"])
def test_a_full_step_at_a_real_shape_needs_little_memory_beyond_its_arrays(name, monkeypatch):
    monkeypatch.setitem(xla.BUDGETS, "cpu", xla.BUDGETS["gpu"])
    spec = SPECS[name]
    shapes = ((spec.tokens, spec.width), (spec.vocabulary, spec.width))
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def loss(hidden, head, targets):
        out = token_stats(hidden, head, targets, backend="xla")
        return (out["logprob"] + out["entropy"]).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = step.lower(hidden, head, jax.ShapeDtypeStruct((spec.tokens,), jnp.int32)).compile()
    # One tile of logits with its gradient and temporaries, one of head gradients, and the float32 sum for hidden.
    bound = 5 * 4 * xla.BUDGETS["gpu"].elements + 4 * spec.tokens * spec.width
    assert compiled.memory_analysis().temp_size_in_bytes <= bound
    assert bound < 4 * spec.tokens * spec.vocabulary / 5
