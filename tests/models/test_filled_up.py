"""Models of which a mesh divides no dimension: filled up with zeros where they rest, and the same everywhere else."""

import asyncio
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import slow_but
from safetensors.numpy import load_file

from jaxrl_llm.distributed import tree_sums
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_format, hf_weights
from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import read_version
from jaxrl_llm.samplers.embedded import weights
from jaxrl_llm.samplers.servers.publisher import Publisher
from jaxrl_llm.samplers.servers.store_publisher import StorePublisher
from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints, read_model

# As of Qwen2.5-0.5B (14 heads, 2 of keys, width 896), 3 divides none of the dimensions but the layers, which are never split.
MODEL = Qwen2(
    vocabulary_size=64, width=28, layers=3, heads=7, kv_heads=1, head_width=4, mlp_width=44, init_std=0.2, tied=True
)
ROWS, LENGTH = 6, 8


def policy_on(devices: int, model: Any = MODEL, **sizes: int) -> Policy:
    config = MeshConfig(**{"fsdp": devices, **sizes})
    return Policy(model, Partitioner.create(config, jax.devices()[:devices]))


@cache
def host() -> Any:
    """Random parameters, norms' scales and biases too."""
    policy = policy_on(1)
    keys = iter(jax.random.split(jax.random.key(2), 100))
    return jax.tree.map(
        lambda x: np.asarray(x + 0.1 * jax.random.normal(next(keys), x.shape)), policy.init(jax.random.key(1))
    )


def placed(policy: Policy, params: Any) -> Any:
    """Parameters of one device on the policy's mesh, with zeros written out here."""

    def put(x: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        whole = np.zeros(like.shape, np.float32)
        whole[tuple(slice(n) for n in x.shape)] = x
        return jax.device_put(whole, like.sharding)

    return jax.tree.map(put, params, policy.abstract())


def own(policy: Policy, tree: Any) -> Any:
    """What of a stored tree is not filling, on the host; the filling is 0."""

    def leaf(x: jax.Array, like: jax.ShapeDtypeStruct) -> np.ndarray:
        part = np.asarray(x)[tuple(slice(n) for n in like.shape)]
        assert np.count_nonzero(np.asarray(x)) == np.count_nonzero(part)
        return part

    return jax.tree.map(leaf, tree, policy.sizes())


def same(found: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def results(policy: Policy, params: Any) -> tuple[Any, ...]:
    """The loss of packed rows, and its gradient."""
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, 64)
    places = jnp.tile(jnp.array([0, 1, 2, 3, 4, 0, 1, 0]), (ROWS, 1))
    segments = jnp.tile(jnp.array([1, 1, 1, 1, 1, 2, 2, 0]), (ROWS, 1))

    def loss(params: Any) -> jax.Array:
        hidden = policy.hidden(params, tokens, places, segments, max_segments=2)
        logits = jnp.einsum("btd,vd->btv", hidden, policy.head(params), precision="highest")
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, 1)[..., None], -1)
        return -jnp.sum(jnp.where(segments[..., None] > 0, chosen, 0.0))

    return jax.jit(jax.value_and_grad(loss))(params)


def cached(policy: Policy, params: Any) -> jax.Array:
    """The hidden states of a cached run of 4 tokens."""
    tokens, places = jnp.arange(4 * ROWS).reshape(ROWS, 4), jnp.tile(jnp.arange(4), (ROWS, 1))
    return jax.jit(policy.extend)(params, policy.cache(ROWS, LENGTH), tokens, places)[0]


@cache
def alone() -> tuple[Any, ...]:
    return jax.tree.map(np.asarray, results(policy_on(1), placed(policy_on(1), host())))


SIZES = ({"devices": 3}, {"devices": 6}, {"devices": 6, "fsdp": 3, "tensor": 2})


@pytest.mark.parametrize("sizes", slow_but((SIZES[0], SIZES[2]), SIZES))
def test_losses_and_gradients_are_those_of_one_device_and_the_filling_gets_none(sizes: dict[str, int]) -> None:
    policy = policy_on(**sizes)
    stored, spread = policy.abstract(), [x for x in jax.tree.leaves(policy.abstract()) if x.ndim > 1]
    assert stored["embedding"].shape == (64, 30) and stored["layers"]["mlp"]["down"].shape == (3, 44, 30)
    assert sum("fsdp" in str(x.sharding.spec) for x in spread) == 8  # embedding, four of attention, three of the MLP
    value, slopes = results(policy, placed(policy, host()))
    want, wanted = alone()
    # Devices add up their own rows' parts, so that a sum of n numbers is taken in another order: each of two orders is within
    # (n - 1) u sum |x| of the true sum (Higham, section 4.2). n is the 42 tokens times the 44 terms of the longest product of a token,
    # and the terms' absolute sum is taken to be within 2 of the largest entry, since they are of the same sign for the most part.
    bound = 2 * (42 * 44) * 2.0**-24 * 2
    assert abs(float(value) - float(want)) < bound * abs(float(want))
    for got, expected in zip(jax.tree.leaves(own(policy, slopes)), jax.tree.leaves(wanted), strict=True):
        assert np.abs(got - expected).max() < bound * np.abs(expected).max()


@pytest.mark.slow
def test_experts_are_filled_up_alike() -> None:
    model = Qwen3MoE(
        vocabulary_size=64, width=28, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=44, init_std=0.2,
        experts=Experts(count=4, chosen=2, width=20, normalised=True),
    )  # fmt: skip
    one, many = policy_on(1, model), policy_on(6, model, fsdp=3, expert=2)
    assert many.abstract()["layers"]["mlp"]["down"].shape == (1, 4, 20, 30)
    params = one.init(jax.random.key(3))
    value, slopes = results(many, placed(many, jax.tree.map(np.asarray, params)))
    want, wanted = results(one, params)
    assert float(value) == pytest.approx(float(want), rel=1e-5)
    for got, expected in zip(jax.tree.leaves(own(many, slopes)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4 * float(np.abs(expected).max()) + 1e-6)


def test_random_parameters_are_those_of_one_device_with_zeros_after_them() -> None:
    policy = policy_on(3)
    same(own(policy, policy.init(jax.random.key(7))), policy_on(1).init(jax.random.key(7)))


def test_a_checkpoint_of_three_devices_is_read_on_four_and_on_one(tmp_path: Any) -> None:
    """It holds zeros where three devices do, four and one divide the width; and another model's is refused."""
    three, params = policy_on(3), placed(policy_on(3), host())
    sizes = tree_sums.filled_up({"state": three.abstract()}, {"state": three.sizes()})
    checkpoints = Checkpoints(tmp_path, Checkpointing())
    checkpoints.save(1, {"state": params}, {}, sizes=sizes)
    checkpoints.wait()
    same(checkpoints.restore(1, {"state": three.abstract()}, sizes)["state"], params)
    for devices in (4, 1):
        same(checkpoints.restore(1, {"state": policy_on(devices).abstract()})["state"], host())
    six = policy_on(6)
    back = checkpoints.restore(1, {"state": six.abstract()}, dict(sizes))["state"]
    same(own(six, back), host())
    wider = Policy(Qwen2(**{**vars(MODEL), "width": 30}), three.partitioner)
    with pytest.raises(ValueError, match=r"is of another model.* has shape \(64, 28\) where the model has \(64, 30\)"):
        checkpoints.restore(1, {"state": wider.abstract()})
    # Written on one device, where nothing is filled up, and read on three.
    checkpoints.save(2, {"state": placed(policy_on(1), host())}, {})
    checkpoints.wait()
    same(own(three, checkpoints.restore(2, {"state": three.abstract()}, sizes)["state"]), host())
    checkpoints.close()


def test_a_model_is_read_alone_from_a_checkpoint_of_three_devices(tmp_path: Any) -> None:
    from jaxrl_llm.learner.state import TrainState

    three, number = policy_on(3), jnp.zeros((), jnp.int32)
    state = TrainState(
        step=number, skipped=number, params={"policy": placed(three, host())}, moments={"policy": {"count": number}}
    )
    own_state = TrainState(
        step=number, skipped=number, params={"policy": three.sizes()}, moments={"policy": {"count": number}}
    )
    checkpoints = Checkpoints(tmp_path, Checkpointing())
    sizes = tree_sums.filled_up({"state": state}, {"state": own_state})
    checkpoints.save(1, {"state": state}, {}, sizes=sizes)
    checkpoints.close()
    one, six = policy_on(1), policy_on(6)
    same(read_model(tmp_path / "checkpoints", 1, one.abstract()), host())
    same(own(six, read_model(tmp_path / "checkpoints", 1, six.abstract(), own=six.sizes())), host())
    wider = Policy(Qwen2(**{**vars(MODEL), "width": 30}), three.partitioner)
    with pytest.raises(ValueError, match=r"where the model has \(64, 30\)"):
        read_model(tmp_path / "checkpoints", 1, wider.abstract(), own=wider.sizes())


def test_a_folder_and_a_publication_hold_no_filling(tmp_path: Any) -> None:
    one, three = policy_on(1), policy_on(3)
    params = placed(three, host())
    hf_weights.save(three, params, tmp_path / "three")
    hf_weights.save(one, placed(one, host()), tmp_path / "one")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("three", "one")]
    assert files[0].keys() == files[1].keys()
    same(files[0], files[1])
    same(hf_weights.load(three, tmp_path / "one"), params)

    given = {"policy": three, "folder": tmp_path / "p", "dtype": "float32", "keep": 1, "canary": np.zeros(0, np.int32)}

    async def publish(publisher: Publisher) -> str:
        publisher.start(params, 3)
        await publisher.finish(3)
        return publisher.place(3)

    want = {name: np.asarray(x) for name, x in hf_format.export(placed(one, host())).items()}
    targets = {name: Target(shape=x.shape, box=whole_box(x.shape)) for name, x in want.items()}
    for publisher in (Publisher(**given), StorePublisher(**given, address=f"file://{tmp_path}/store")):
        staged = read_version(asyncio.run(publish(publisher)), 3, targets)  # compares the checksums of the manifest
        same(dict(staged.parts), want)
        publisher.close(remove=True)


def test_adapters_beside_a_model_that_is_filled_up(tmp_path: Any) -> None:
    """Of a product that three devices do not divide, both adapters' sides: b of `o_proj` rests with zeros too."""
    lora = LoRA(rank=2, targets=("q_proj", "o_proj"))
    of = lambda n: AdaptedPolicy(MODEL, policy_on(n).partitioner, lora=lora)  # noqa: E731
    one, three = of(1), of(3)
    keys = iter(jax.random.split(jax.random.key(5), 10))
    low = jax.tree.map(lambda x: np.asarray(jax.random.normal(next(keys), x.shape)), one.init(jax.random.key(0)))
    assert three.abstract()["layers"]["attention"]["output"]["b"].shape == (3, 2, 30)
    same(own(three, three.init(jax.random.key(3))), one.init(jax.random.key(3)))
    merged = three.merged(placed(three, low), placed(three.plain, host()))
    want = one.merged(placed(one, low), placed(one.plain, host()))
    for x, y in zip(jax.tree.leaves(own(three.plain, merged)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    beside = three.joined(placed(three, low), placed(three.plain, host()))
    weights.check_shapes(three.plain, beside)
    expected = cached(one.plain, want)
    for gather in (False, True):
        found = cached(three.plain, weights.served(three.plain, beside, share=True, gather=gather))
        np.testing.assert_allclose(found, expected, atol=2e-5)
    hf_weights.save_adapters(three, placed(three, low), tmp_path / "a", base_name=None)
    same(hf_weights.load_adapters(three, tmp_path / "a"), placed(three, low))
    same(hf_weights.load_adapters(one, tmp_path / "a"), low)
