"""The bias by which experts are chosen: it enters the choice alone, each update moves it by the sign of the loads' errors, and loads even out."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from learner_cases import PACKING, SFT_CASE, batches_of, leaves, make_batch, split
from test_router import ALTERNATING as MODEL
from test_router import CHOSEN, COUNT, HALVES, learner_of

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.learner.optimizer import Optimizer, Trainable
from jaxrl_llm.learner.router import Router, biases, moved, with_biases
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.experts import ExpertMLP, Routed
from jaxrl_llm.models.lora import LoRA
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.samplers.vllm.sampler import VllmSampler
from jaxrl_llm.train.build import check_bias

BIASED = replace(MODEL, experts=replace(MODEL.experts, choice_bias=True))
RATE = 0.01
STACK, SPARSE = "layers_1", (1, 3)  # of the layers with experts


def biased(**fields):
    """A learner of a policy whose experts have biases, which it moves."""
    learner = learner_of(bias_rate=RATE, **fields)
    return replace(learner, models={"policy": Policy(BIASED, learner.partitioner)})


@cache
def shared():
    """The one of a device alone that several tests use, whose programs are compiled once."""
    return biased()


def state_of(learner):
    """A state with biases that are not 0, so that they matter."""
    params = learner.policy.init(jax.random.key(3))
    some = np.random.default_rng(0).normal(0, 0.02, (len(SPARSE), COUNT)).astype(np.float32)
    place = learner.policy.abstract()[STACK]["mlp"]["choice_bias"].sharding
    return learner.init({"policy": with_biases(params, {STACK: jax.device_put(some, place)})})


@partial(jax.jit, static_argnums=0)
def chosen_by(policy, params, *places):
    return policy.routed(params, *places)[1].chosen


def loads_of(learner, params, batch):
    """Tokens of each layer at each expert, [L, E], counted from the choices of a forward pass."""
    counts = np.zeros((len(SPARSE), COUNT), int)
    for micro in batches_of(learner, batch):
        chosen = chosen_by(learner.policy, params, micro.tokens, micro.positions, micro.segments)
        real = np.asarray(micro.segments) > 0
        for layer, ids in enumerate(np.asarray(chosen)):
            counts[layer] += np.bincount(ids[real].reshape(-1), minlength=COUNT)
    return counts


def test_the_bias_enters_the_choice_and_not_the_weights():
    """Against a loop in float64 over tokens."""
    layer = ExpertMLP(BIASED, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]), rngs=nnx.Rngs(3))
    rng = np.random.default_rng(1)
    x, bias = rng.normal(size=(2, 9, 32)).astype(np.float32), rng.normal(0, 0.3, COUNT).astype(np.float32)
    layer.choice_bias[...] = jnp.asarray(bias)
    y, report = layer(jnp.asarray(x), Routed(jnp.ones((2, 9), bool), None))
    router, gate_up, down = (np.asarray(w[...], np.float64) for w in (layer.router, layer.gate_up, layer.down))
    want, otherwise = np.zeros(x.shape), 0
    for place in np.ndindex(2, 9):
        token = x[place].astype(np.float64)
        p = np.exp(token @ router)
        p /= p.sum()
        chosen = np.argsort(-(p + bias))[:CHOSEN]
        otherwise += set(chosen) != set(np.argsort(-p)[:CHOSEN])
        assert set(np.asarray(report.chosen)[place].tolist()) == set(chosen.tolist())
        for e in chosen:
            gate, up = token @ gate_up[e, :, 0], token @ gate_up[e, :, 1]
            want[place] += p[e] / p[chosen].sum() * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    assert otherwise > 3
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "mesh"), [(None, None), pytest.param(HALVES, MeshConfig(fsdp=2, expert=2), marks=pytest.mark.slow)]
)
def test_updates_move_it_by_the_sign_of_the_load_errors(parts, mesh):
    learner = biased(mesh=mesh, devices=4) if mesh else shared()
    batch = make_batch() if parts is None else split(parts)
    state = state_of(learner)
    want = np.asarray(state.policy[STACK]["mlp"]["choice_bias"])
    for _ in range(3):
        for layer, loads in enumerate(loads_of(learner, state.policy, batch)):
            for expert, load in enumerate(loads):
                want = want.copy()
                want[layer, expert] += RATE * np.sign(loads.sum() / COUNT - load)
        state, _ = learner.update(state, batches_of(learner, batch))
        np.testing.assert_allclose(state.policy[STACK]["mlp"]["choice_bias"], want, rtol=1e-5, atol=1e-7)
    assert jax.tree.map(lambda x: x.sharding, state) == learner.shardings
    moments = leaves(state.moments["policy"])
    assert all(np.all(x == 0) for path, x in moments.items() if "choice_bias" in path)


def test_it_evens_the_loads_out_where_nothing_else_learns():
    """An update of rate 0 leaves all weights, and the most loaded expert comes near the mean."""
    learner = biased(algorithm=SFT_CASE, optimizer=Optimizer(learning_rate=0.0))
    learner = replace(learner, router=replace(learner.router, bias_rate=0.003))
    state, batch = state_of(learner), make_batch()
    before, told = leaves(state.policy), []
    for _ in range(120):
        state, metrics = learner.update(state, batches_of(learner, batch))
        told.append(float(metrics["router/load_max_worst"]))
    assert told[0] > 0.4
    assert max(told[-20:]) < 0.5 * told[0]
    changed = {path for path, x in leaves(state.policy).items() if not np.array_equal(x, before[path])}
    assert changed == {f"['{STACK}']['mlp']['choice_bias']"}


def test_a_skipped_update_and_layers_that_do_not_learn_leave_it():
    learner = shared()
    state, batches = state_of(learner), batches_of(learner, make_batch())
    before = np.array(biases(state.policy)[STACK])
    broken = [batch.replace(advantages=batch.advantages * jnp.nan) for batch in batches]
    state, metrics = learner.update(state, broken)
    assert float(metrics["update/skipped"]) == 1
    np.testing.assert_array_equal(biases(state.policy)[STACK], before)
    half = biased(trainable=Trainable(layers=2, frozen=("embedding",)))
    after = np.asarray(biases(half.update(state_of(half), batches)[0].policy)[STACK])
    assert np.any(after[0] != before[0]) and np.array_equal(after[1], before[1])


def test_layers_that_were_not_run_and_many_stacks_keep_their_places():
    stacks = {f"layers_{i}": jnp.zeros((2, 3)) for i in (0, 2, 10)}
    counts = np.array([[5, 1, 0], [2, 2, 2], [0, 0, 6], [6, 0, 0]])  # of layers 0, 2, 10 and 11 of 22
    found = moved(stacks, jnp.asarray(counts), 1.0, dict.fromkeys(stacks, jnp.asarray(True)))
    assert found["layers_0"].tolist() == [[-1, 1, 1], [-1, 1, 1]]
    assert found["layers_2"].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert found["layers_10"].tolist() == [[1, 1, -1], [0, 0, 0]]


def test_recorded_choices_are_replayed_whatever_the_bias_is():
    learner = biased(replay="R3")
    rng = np.random.default_rng(8)
    length = lambda r: len(r.prompt.tokens) + len(r.tokens) - 1  # noqa: E731
    forced = lambda r: np.stack([[rng.permutation(COUNT)[:CHOSEN] for _ in SPARSE] for _ in range(length(r))])  # noqa: E731
    batch = make_batch()
    groups = [
        replace(g, rollouts=[replace(r, routes=forced(r).astype(np.uint8)) for r in g.rollouts]) for g in batch.groups
    ]
    recorded = replace(batch, groups=groups)
    without = replace(learner_of(replay="R3"), models={"policy": Policy(MODEL, learner.partitioner)})
    params = state_of(learner).policy
    plain = {
        **params,
        STACK: {**params[STACK], "mlp": {k: v for k, v in params[STACK]["mlp"].items() if k != "choice_bias"}},
    }
    (one,), (other,) = batches_of(learner, recorded), batches_of(without, recorded)
    got, want = learner.score({"policy": params}, one), without.score({"policy": plain}, other)
    np.testing.assert_array_equal(got["policy"]["logprob"], want["policy"]["logprob"])
    assert PACKING.rows and np.any(np.asarray(biases(params)[STACK]) != 0)


# -- where it may be ---------------------------------------------------------------------------------------------------


def test_a_pretrained_folder_gets_biases_of_0_and_the_rest_of_its_weights(tmp_path):
    one = Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])
    plain = Policy(MODEL, one)
    params = plain.init(jax.random.key(0))
    hf_weights.save(plain, params, tmp_path / "m")
    source = PolicySource(pretrained=str(tmp_path / "m"), choice_bias=True)
    policy = source.policy(one)
    found = leaves(source.params(policy, jax.random.key(1)))
    bias = found.pop(f"['{STACK}']['mlp']['choice_bias']")
    assert bias.shape == (len(SPARSE), COUNT) and not bias.any()
    assert (
        all(np.array_equal(found[path], x) for path, x in leaves(params).items())
        and found.keys() == leaves(params).keys()
    )
    assert jax.tree.structure(policy.abstract()) == jax.tree.structure(source.params(policy, jax.random.key(1)))


def test_an_exported_folder_holds_it_and_other_programs_refuse_the_folder(tmp_path):
    learner = shared()
    params = state_of(learner).policy
    hf_weights.save(learner.policy, params, tmp_path / "m")
    assert hf_weights.architecture(tmp_path / "m") == BIASED
    source = PolicySource(pretrained=str(tmp_path / "m"))
    found = source.params(source.policy(learner.partitioner), jax.random.key(1))
    assert np.abs(biases(found)[STACK]).min() > 0
    jax.tree.map(np.testing.assert_array_equal, found, params)
    with pytest.raises(ValueError, match="choice_bias_qwen3_moe"):
        transformers.AutoConfig.from_pretrained(tmp_path / "m")


def test_vllm_has_no_place_for_it(tmp_path):
    policy = Policy(BIASED, Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1]))
    with pytest.raises(
        ValueError, match=r"is not published to vLLM servers.*: sample it with embedded\.EmbeddedSampler"
    ):
        VllmSampler(spawn=False, urls=("http://127.0.0.1:1",)).start(policy, None, max_length=32, run_dir=tmp_path)


def test_a_rate_without_biases_is_refused_and_so_are_biases_without_experts():
    router = Router(bias_rate=RATE)
    one = Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])
    check_bias("rl", router, Policy(BIASED, one))
    with pytest.raises(ValueError, match=r"the model has none: set sources\.PolicySource\.choice_bias = True"):
        check_bias("rl", router, Policy(MODEL, one))
    adapted = PolicySource(architecture=MODEL, choice_bias=True, lora=LoRA(rank=2, targets=("q_proj",))).policy(one)
    with pytest.raises(ValueError, match="adapters leave as it is"):
        check_bias("rl", router, adapted)
    dense = Qwen3(vocabulary_size=8, width=8, layers=1, heads=2, kv_heads=1, head_width=4, mlp_width=8)
    with pytest.raises(ValueError, match="is for a model with experts"):
        PolicySource(architecture=dense, choice_bias=True).policy(one)
