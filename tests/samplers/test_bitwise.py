"""The bitwise mode: the log-prob that the embedded sampler records is the learner's, as bits."""

import asyncio
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_cases import Letters, sample

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.kernels.attention import ordered as ordered_attention
from jaxrl_llm.kernels.ordered import arithmetic
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.models.architecture import Experts, GatedDelta
from jaxrl_llm.models.lora import LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.qwen3_5 import Qwen3_5
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.vllm.sampler import VllmSampler

pytestmark = pytest.mark.slow  # its programs take long to compile

MAX_LENGTH = 48
QWEN3 = Qwen3(vocabulary_size=50, width=24, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=40)
QWEN2 = Qwen2(
    vocabulary_size=131, width=40, layers=2, heads=3, kv_heads=1, head_width=12, mlp_width=56, tied=True, window=7,
    sliding=(True, False),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_as_users_compile():
    """Programs have all optimisations: it is these that fuse and reorder."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


def one_device():
    return Partitioner.create(MeshConfig(), jax.devices()[:1])


@dataclass(frozen=True, eq=False)
class Case:
    """A random policy and how it is sampled."""

    policy: Policy
    seed: int
    slots: int
    chunk: int
    temperature: float = 1.0

    @cached_property
    def params(self):
        rng = np.random.default_rng(self.seed)
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.05, 0.4, x.shape), x.dtype), self.policy.abstract())

    @cached_property
    def prompts(self):
        rng = np.random.default_rng(self.seed + 1)
        return [
            rng.integers(0, self.policy.architecture.vocabulary_size, n, dtype=np.int32)
            for n in (5, 19, 1, 7, 8, 2, 13, 16)
        ]

    def drawn(self):
        """[(sequence, length of its prompt, recorded log-probs)] of sequences that end at different lengths."""
        settings = SamplingParams(max_tokens=MAX_LENGTH - 20, temperature=self.temperature, stop_token_ids=(3, 5))

        async def once():
            engine = EmbeddedSampler(slots=self.slots, decode_chunk=self.chunk).start(
                self.policy, Letters(), max_length=MAX_LENGTH
            )
            await engine.publish(self.params, 0)
            try:
                return await sample(engine, self.prompts, 6, settings)
            finally:
                await engine.close()

        groups = asyncio.run(once())
        return [
            (np.concatenate([p, c.tokens]), len(p), np.asarray(c.logprobs)) for p, g in zip(self.prompts, groups) for c in g
        ]  # fmt: skip


def learners(case, drawn, *, policy=None, row=64, most=4, seed=0, gradient=False):
    """The learner's log-probs of the drawn tokens, where sequences are packed in a random order; with `gradient`, the gradients too."""
    policy, rows, places = policy or case.policy, [], {}
    for i in np.random.default_rng(seed).permutation(len(drawn)):
        n = len(drawn[i][0]) - 1
        if not rows or len(rows[-1]) == most or sum(len(drawn[j][0]) - 1 for j in rows[-1]) + n > row:
            rows.append([])
        places[i] = len(rows) - 1, sum(len(drawn[j][0]) - 1 for j in rows[-1])
        rows[-1].append(i)
    tokens, positions, segments, targets = (np.zeros((len(rows), row), np.int32) for _ in range(4))
    targets -= 1
    for i, (b, at) in places.items():
        n, cut = len(drawn[i][0]) - 1, np.s_[b, at : at + len(drawn[i][0]) - 1]
        tokens[cut], targets[cut], positions[cut] = drawn[i][0][:-1], drawn[i][0][1:], np.arange(n)
        segments[cut] = rows[b].index(i) + 1

    def read(params, tokens, positions, segments, targets):
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=most)
        stats = token_stats(
            hidden.reshape(-1, hidden.shape[-1]), policy.head(params), targets.reshape(-1), temperature=case.temperature,
            outputs=("logprob", "entropy"), backend="ordered" if policy.bitwise else None,
        )  # fmt: skip
        return stats["logprob"].sum() / 100 + stats["entropy"].sum() / 300, stats["logprob"].reshape(tokens.shape)

    run = jax.jit(jax.value_and_grad(read, has_aux=True) if gradient else lambda *arrays: (read(*arrays), None))
    (_, found), gradients = run(case.params, tokens, positions, segments, targets)
    found = np.asarray(found)
    by_token = [found[b, at + p - 1 : at + len(s) - 1] for i, (s, p, _) in enumerate(drawn) for b, at in [places[i]]]
    return (np.concatenate(by_token), gradients) if gradient else np.concatenate(by_token)


def recorded(drawn):
    return np.concatenate([logprobs for _, _, logprobs in drawn])


def policy_of(architecture, dtype="float32", **fields):
    return Policy(architecture, one_device(), dtype, bitwise=True, **fields)


@pytest.fixture(scope="module")
def small():
    case = Case(policy_of(QWEN3), seed=0, slots=5, chunk=3)
    return case, case.drawn()


def test_log_probs_are_the_learners_in_every_packing(small):
    case, drawn = small
    assert len({len(s) for s, _, _ in drawn}) > 10 and len(recorded(drawn)) > 500
    assert np.array_equal(learners(case, drawn), recorded(drawn))
    assert np.array_equal(learners(case, drawn, row=131, most=9, seed=1), recorded(drawn))


def test_draws_have_the_same_bits_with_other_slots_and_refills(small):
    case, drawn = small
    for (sequence, _, logprobs), (other, _, others) in zip(drawn, replace(case, slots=64, chunk=8).drawn()):
        assert sequence.tolist() == other.tolist() and logprobs.tolist() == others.tolist()


def test_log_probs_of_bfloat16_are_the_learners_with_windows_biases_and_a_temperature():
    case = Case(policy_of(QWEN2, "bfloat16", remat="full", unroll=2), seed=3, slots=16, chunk=16, temperature=0.7)
    drawn = case.drawn()
    assert len(recorded(drawn)) > 500
    found, _ = learners(case, drawn, gradient=True)  # in an update's own forward pass
    assert np.array_equal(found, recorded(drawn))
    assert np.array_equal(learners(case, drawn, policy=replace(case.policy, remat="none", unroll=1), row=100), found)


def test_gradients_are_those_of_the_default_mode_and_the_same_at_every_call(small):
    case, drawn = small
    found, gradients = learners(case, drawn, gradient=True)
    again, others = learners(case, drawn, gradient=True)
    assert np.array_equal(found, recorded(drawn)) and np.array_equal(again, found)
    default, expected = learners(case, drawn, policy=replace(case.policy, bitwise=False), gradient=True)
    np.testing.assert_allclose(found, default, atol=1e-5)
    for one, other, want in zip(*map(jax.tree.leaves, (gradients, others, expected))):
        assert np.array_equal(one, other)
        np.testing.assert_allclose(one, want, atol=1e-5 * float(np.abs(want).max()))


def in_halves(product):
    """A tile's product whose sum over K is taken in two halves."""

    def mutant(tile, w, *, turned=False):
        middle, axis = tile.shape[1] // 2, 1 if turned else 0
        first, second = jnp.split(w, [middle], axis=axis)
        return product(tile[:, :middle], first, turned=turned) + product(tile[:, middle:], second, turned=turned)

    return mutant


MUTATIONS = {
    "the sums over K": (arithmetic, "tile_product", in_halves(arithmetic.tile_product)),
    "the blocks of keys": (ordered_attention, "KEYS", 8),
    "the sums of rows": (
        arithmetic,
        "totals",
        lambda x: arithmetic.matmul(x[:, ::-1], jnp.ones((x.shape[1], 8)))[:, 0],
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_another_order_on_one_side_is_seen(small, monkeypatch, mutation):
    case, drawn = small
    monkeypatch.setattr(*MUTATIONS[mutation])
    found = learners(case, drawn)
    np.testing.assert_allclose(found, recorded(drawn), atol=1e-5)
    assert not np.array_equal(found, recorded(drawn))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_models_and_meshes_without_an_order_are_refused_by_name():
    sizes = {
        n: getattr(QWEN3, n)
        for n in ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_width", "mlp_width")
    }
    with pytest.raises(ValueError, match="experts are chosen and summed"):
        policy_of(Qwen3MoE(**sizes, experts=Experts(count=4, chosen=2, width=8)))
    with pytest.raises(ValueError, match="layers that hold a state"):
        policy_of(Qwen3_5(**sizes | {"layers": 4, "head_width": 16}, delta=GatedDelta(key_heads=2, value_heads=2)))
    with pytest.raises(ValueError, match=r"run on one device \(got 2\)"):
        Policy(QWEN3, Partitioner.create(MeshConfig(fsdp=2), jax.devices()[:2]), bitwise=True)
    with pytest.raises(ValueError, match="not for adapters"):
        PolicySource(architecture=QWEN3, lora=LoRA(rank=2), bitwise=True).policy(one_device())
    assert PolicySource(architecture=QWEN3, bitwise=True).policy(one_device()).bitwise
    assert not PolicySource(architecture=QWEN3, bitwise=True).policy(one_device(), value=True).bitwise


def test_samplers_without_the_learners_arithmetic_are_refused_by_name(tmp_path):
    policy = policy_of(QWEN3)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        EmbeddedSampler(cache="float8_e4m3fn").start(policy, Letters(), max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="vLLM servers have kernels of their own"):
        VllmSampler(urls=("http://localhost:1",), spawn=False).start(
            policy, Letters(), max_length=MAX_LENGTH, run_dir=tmp_path
        )
