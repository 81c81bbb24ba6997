"""The embedded sampler with adapters beside their base: the learner's own numbers, and no sum of the two."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from adapter_cases import LOW, PLAIN, adapted, drawn, gaps, start
from sampler_cases import MAX_LENGTH, Letters, Tiny

from jaxrl_llm.models import lora
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.train.build import sampled_policy
from jaxrl_llm.train.trainer import Trainer


def test_log_probs_are_the_learners_with_adapters_and_not_the_bases(tiny: Tiny, prefixes: list[np.ndarray]) -> None:
    policy, adapters = adapted(tiny)
    joined = policy.joined(adapters, tiny.params)
    groups = drawn(start(policy), joined, prefixes, PLAIN)
    assert np.abs(gaps(tiny, joined, prefixes, groups)).max() < 1e-5
    assert np.abs(gaps(tiny, policy.merged(adapters, tiny.params), prefixes, groups)).max() < 1e-4
    assert np.abs(gaps(tiny, tiny.params, prefixes, groups)).max() > 0.1


def test_a_mesh_draws_the_tokens_of_one_device_and_divides_adapters(
    make: Any, tiny: Tiny, prefixes: list[np.ndarray]
) -> None:
    policy, adapters = adapted(tiny)
    want = drawn(start(policy), policy.joined(adapters, tiny.params), prefixes, PLAIN)
    model = make(4, fsdp=2, tensor=2)
    policy, adapters = adapted(model)
    engine = start(policy, share_weights=False)
    asyncio.run(engine.publish(policy.joined(adapters, model.params), 0))
    query = engine._weights.params["layers"]["attention"]["query"]["kernel"]
    assert query.a.addressable_shards[0].data.shape == (2, 8, 3)  # [layers, width over fsdp, rank]
    assert query.b.addressable_shards[0].data.shape == (2, 3, 2, 8)  # [layers, rank, heads over tensor, head width]
    groups = drawn(engine, policy.joined(adapters, model.params), prefixes, PLAIN)
    for group, expected in zip(groups, want, strict=True):
        for one, other in zip(group, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_a_publication_makes_no_sum_and_copies_no_base(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, adapters = adapted(tiny)
    monkeypatch.setattr(lora, "_sum", lambda *_: pytest.fail("base and adapters were added"))
    sampler = EmbeddedSampler(adapters=True)
    engine = sampler.start(sampled_policy(sampler, policy), Letters(), max_length=MAX_LENGTH)
    run: Any = SimpleNamespace(sampler=engine, policy=policy, bases={"policy": tiny.params})
    held = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    before = held()
    for version in range(2):
        asyncio.run(Trainer._serve(run, SimpleNamespace(policy=adapters), version))  # type: ignore[arg-type]
        assert held() == before and engine.version == version


def test_a_base_that_rests_in_the_compute_dtype_is_served_as_it_is_and_adapters_alone_are_cast(make: Any) -> None:
    model = make(compute_dtype="bfloat16")
    policy, adapters = adapted(model)
    policy = replace(policy, lora=replace(LOW, base_dtype="bfloat16"))
    base = policy.frozen(model.params)
    engine = start(policy)
    asyncio.run(engine.publish(policy.joined(adapters, base), 0))
    assert sum(x.nbytes for x in engine._weights.own) == sum(2 * x.size for x in jax.tree.leaves(adapters))


def test_the_sum_is_rounded_where_small_changes_of_adapters_are_not(make: Any, prefixes: list[np.ndarray]) -> None:
    """A base in bfloat16, computed with in float32: adapters of 1/4 of its last bit are lost in the sum."""
    model = make()
    policy, adapters = adapted(model, size=0.02)
    policy = replace(policy, lora=replace(LOW, base_dtype="bfloat16"))
    base = policy.frozen(jax.tree.map(jax.numpy.copy, model.params))
    exact = policy.joined(adapters, base)
    apart = drawn(start(policy), exact, prefixes, PLAIN)
    summed = drawn(
        EmbeddedSampler().start(policy.plain, Letters(), max_length=MAX_LENGTH),
        policy.merged(adapters, base),
        prefixes,
        PLAIN,
    )
    beside, rounded = (np.abs(gaps(model, exact, prefixes, groups)).mean() for groups in (apart, summed))
    assert beside < 1e-6 < 1e-4 < rounded, (beside, rounded)


def test_what_is_no_adapter_of_the_weight_is_refused(tiny: Tiny) -> None:
    policy, adapters = adapted(tiny)
    adapters["layers"]["mlp"]["up"]["b"] = adapters["layers"]["mlp"]["up"]["b"][..., :-1]
    with pytest.raises(ValueError, match=r"\['up'\]'s adapter is \(2, 16, 31\), the policy's is \(2, 16, 32\)"):
        asyncio.run(start(policy).publish(policy.joined(adapters, tiny.params), 0))


def test_a_sampler_of_adapters_is_refused_where_all_weights_are_trained(tiny: Tiny) -> None:
    sampler = EmbeddedSampler(adapters=True)
    with pytest.raises(ValueError, match=r"EmbeddedSampler.adapters = True .* include gin/adapters/lora.gin"):
        sampled_policy(sampler, tiny.policy)
    policy, _ = adapted(tiny)
    assert sampled_policy(sampler, policy) is policy
    assert sampled_policy(EmbeddedSampler(), policy) is policy.plain
    assert not sampler.start(tiny.policy, Letters(), max_length=MAX_LENGTH).adapted, (
        "what holds no adapters is served whole"
    )
