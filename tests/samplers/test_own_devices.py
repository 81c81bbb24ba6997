"""The embedded sampler on devices of its own, which the learner's mesh leaves out: simulated ones."""

import asyncio

import jax
import numpy as np
import pytest
from sampler_cases import MAX_LENGTH, Letters, Tiny, sample

from jaxrl_llm.distributed.padding import filled
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

SETTINGS = SamplingParams(max_tokens=6, temperature=1.0)
# Devices of the learner, sizes of its mesh, and fields of the sampler; the tests have eight devices.
APART = {
    "one and one": (1, {"fsdp": 1}, {"devices": 1}),
    "replicas": (2, {"fsdp": 2}, {"devices": 2}),
    "tensor": (4, {"fsdp": 2, "tensor": 2}, {"devices": 4, "tensor": 2}),
    "padded": (3, {"fsdp": 3}, {"devices": 2}),
    "pages and a smaller batch": (1, {"fsdp": 1}, {"devices": 1, "page": 16, "shrink": 2, "slots": 16}),
    "fp8": (1, {"fsdp": 1}, {"devices": 1, "weights": "float8_e4m3fn"}),
}


@pytest.mark.parametrize("case", APART)
def test_devices_apart_draw_the_tokens_of_the_learners_own(make, tiny, prefixes, draw, case):
    devices, sizes, fields = APART[case]
    policy = make(devices, **sizes).policy
    place = lambda x, to: jax.device_put(filled(np.asarray(x), to.shape), to.sharding)  # noqa: E731
    apart = Tiny(policy=policy, params=jax.tree.map(place, tiny.params, policy.abstract()))
    expected = draw(tiny, prefixes, 2, SETTINGS, **{n: v for n, v in fields.items() if n == "weights"})
    for group, others in zip(draw(apart, prefixes, 2, SETTINGS, **fields), expected, strict=True):
        for completion, other in zip(group, others, strict=True):
            assert completion.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-4)


def test_everything_is_on_the_last_devices_and_the_learners_weights_may_be_donated(make, prefixes):
    model = make(2, fsdp=2)
    own = set(jax.devices()[-2:])

    async def once():
        engine = model.start(devices=2)
        assert engine.overlaps and set(engine.policy.partitioner.mesh.devices.flat) == own
        params = jax.tree.map(lambda x: x.copy(), model.params)
        await engine.publish(params, 0)
        jax.tree.map(lambda x: x.delete(), params)
        engine.retire()  # leaves what is served
        found = await sample(engine, prefixes, 1, SETTINGS)
        arrays = jax.tree.leaves(engine._weights.params)
        assert all(set(x.sharding.device_set) <= own for x in arrays)
        await engine.close()
        return found

    assert all(len(group) == 1 for group in asyncio.run(once()))


def test_the_cache_is_made_where_it_is_read(make, prefixes, draw, monkeypatch):
    """A cache made on the first device would take room there, and a copy."""
    made, real = [], decode.empty

    def noted(**given):
        found = real(**given)
        made.extend(x.devices() for x in jax.tree.leaves(found))
        return found

    monkeypatch.setattr(decode, "empty", noted)
    draw(make(1, fsdp=1), prefixes, 1, SETTINGS, devices=1)
    assert made and all(where == {jax.devices()[-1]} for where in made)


def test_weights_that_change_in_mid_response_are_told_by_each_token(make, prefixes):
    model = make(1, fsdp=1)

    async def once():
        engine = model.start(devices=1, decode_chunk=2)
        await engine.publish(model.params, 3)
        settings = SamplingParams(max_tokens=12, temperature=1.0, min_tokens=12)
        task = asyncio.ensure_future(sample(engine, prefixes[:2], 1, settings))
        while engine._batch is None or not any(d and d.count for d in engine._batch._drafts):
            await asyncio.sleep(0)
        await engine.publish(jax.tree.map(lambda x: x * 1.5, model.params), 4)
        found = await task
        await engine.close()
        return [np.asarray(completion.versions) for (completion,) in found]

    for versions in asyncio.run(once()):
        assert versions[0] == 3 and versions[-1] == 4 and (np.diff(versions) >= 0).all()


def test_an_evaluation_alone_samples_on_the_whole_mesh(make):
    engine = EmbeddedSampler(devices=2).start(make(8, fsdp=-1).policy, Letters(), max_length=MAX_LENGTH)
    assert not engine.overlaps and engine.policy.partitioner.mesh.size == 8


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"devices": -1}, "devices"),
        ({"devices": 3, "tensor": 2}, "a divisor of embedded.EmbeddedSampler.devices = 3"),
        ({"tensor": 2}, "1 without such"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields, why):
    with pytest.raises(ValueError, match=why):
        EmbeddedSampler(**fields)


def test_the_learner_keeps_a_device():
    sampler = EmbeddedSampler(devices=3)
    assert sampler.left(jax.devices()) == jax.devices()[:5]
    with pytest.raises(ValueError, match="must leave the learner at least one of the 3 devices"):
        sampler.left(jax.devices()[:3])
