"""The mesh axis `expert` divides experts and changes nothing: neither outputs nor gradients nor reports, whatever the other axes do."""

import math
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from builders import slow_but

from jaxrl_llm import command_line
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.architecture import Experts
from jaxrl_llm.models.experts import ExpertMLP, Routed
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.qwen3_moe import Qwen3MoE
from jaxrl_llm.tools import fit, memory
from jaxrl_llm.tools.planning import cost_model

COUNT, CHOSEN, WIDTH, INNER = 8, 3, 32, 24
HEADS = {"heads": 4, "kv_heads": 2, "head_width": 16}
SIZES = {"vocabulary_size": 61, "width": WIDTH, "layers": 2, "mlp_width": 48, **HEADS}
MODEL = Qwen3MoE(**SIZES, init_std=0.2, experts=Experts(count=COUNT, chosen=CHOSEN, width=INNER, normalised=True))
LENGTH = 12
MESHES = {  # sizes of the axes, rows of the batch
    "2": ({"expert": 2}, 16),
    "4": ({"expert": 4}, 16),
    "8": ({"expert": 8}, 16),
    "fsdp2_2": ({"fsdp": 2, "expert": 2}, 16),
    "data2_fsdp2_2": ({"data": 2, "fsdp": 2, "expert": 2}, 16),
    "tensor2_2": ({"expert": 2, "tensor": 2}, 16),
    "context2_2": ({"expert": 2, "context": 2}, 16),
    "fsdp2_tensor2_2": ({"fsdp": 2, "expert": 2, "tensor": 2}, 16),
    "rows_that_it_does_not_divide": ({"fsdp": 2, "expert": 4}, 6),
}


def policy_on(sizes, model=MODEL):
    axes = {"fsdp": 1, **sizes}
    devices = jax.devices()[: math.prod(axes.values())]
    return Policy(model, Partitioner.create(MeshConfig(**axes), devices))


def rows(count):
    """Tokens, positions and segments of rows of two sequences and some padding."""
    rng = np.random.default_rng(count)
    tokens = rng.integers(1, 61, (count, LENGTH))
    segments = np.broadcast_to(np.repeat([1, 2, 0], [5, 4, 3]), tokens.shape)
    positions = np.broadcast_to([*range(5), *range(4), 0, 0, 0], tokens.shape)
    return tuple(jnp.asarray(x, jnp.int32) for x in (tokens, positions, segments))


@partial(jax.jit, static_argnums=0)
def slopes(policy, params, places, routes):
    """((loss, report), gradient) of a loss that every logit and every expert's load enter."""

    def objective(p):
        hidden, report = policy.routed(p, *places, routes=routes)
        logs = jax.nn.log_softmax(hidden @ policy.head(p).T, axis=-1)
        found = jnp.take_along_axis(logs[:, :-1], places[0][:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(found * (places[2][:, 1:] > 0)) + jnp.sum(report.mass * jnp.arange(COUNT)), report

    return jax.value_and_grad(objective, has_aux=True)(params)


@cache
def created(model):
    """Parameters on the host, which are made once for all meshes."""
    return jax.tree.map(np.asarray, policy_on({}, model).init(jax.random.key(1)))


def params_of(policy):
    place = lambda x, like: jax.device_put(x, like.sharding)  # noqa: E731
    return jax.tree.map(place, created(policy.architecture), policy.abstract())


def slopes_on(sizes, count, record):
    policy = policy_on(sizes)
    return slopes(policy, params_of(policy), rows(count), recorded(count, record))


@cache
def alone(count, record):
    return slopes_on({}, count, record)


def recorded(count, record):
    """A record of each token's experts, which are the first ones or none are named; or no record, which is a program of its own."""
    if record is None:
        return None
    named = {"first": np.arange(CHOSEN), "empty": np.full(CHOSEN, 255)}[record].astype(np.uint8)
    return jnp.asarray(np.broadcast_to(named, (count, LENGTH, SIZES["layers"], CHOSEN)))


RECORDING = ("4", "fsdp2_2")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_it_changes_neither_loss_nor_any_gradient_nor_the_report(mesh):
    (sizes, count), record = MESHES[mesh], "empty" if mesh in RECORDING else None
    (got, report), gradient = slopes_on(sizes, count, record)
    (want, told), slope = alone(count, record)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for field in ("counts", "tokens", "recorded", "differs", "chosen"):
        np.testing.assert_array_equal(getattr(report, field), getattr(told, field), err_msg=field)
    np.testing.assert_allclose(report.mass, told.mass, rtol=1e-5)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(slope), jax.tree.leaves(gradient), strict=True):
        most = np.abs(x).max()
        assert most > 0
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5 * most, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("mesh", slow_but(("4",), RECORDING))
def test_a_device_whose_experts_no_token_goes_to_gets_gradients_of_0(mesh):
    """Every token is sent to experts 0, 1 and 2, which the first devices hold."""
    sizes, count = MESHES[mesh]
    (_, told), slope = alone(count, "first")
    assert np.asarray(told.counts)[:, CHOSEN:].sum() == 0 < np.asarray(told.counts)[:, :CHOSEN].min()
    gradient = slopes_on(sizes, count, "first")[1]
    for name in ("gate_up", "down"):
        found = np.asarray(gradient["layers"]["mlp"][name])
        assert np.all(found[:, CHOSEN:] == 0) and np.abs(found[:, :CHOSEN]).max() > 0
        want = np.asarray(slope["layers"]["mlp"][name])
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_a_layer_is_the_sum_over_each_token_s_experts():
    """Against a loop in float64 over tokens and experts."""
    from flax import nnx

    policy = policy_on({"fsdp": 2, "expert": 4})
    layer = ExpertMLP(MODEL, policy.partitioner, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(0)
    x, valid = rng.normal(size=(8, LENGTH, WIDTH)).astype(np.float32), rng.random((8, LENGTH)) < 0.8
    y, report = jax.jit(lambda x, valid: layer(x, Routed(valid, None)))(jnp.asarray(x), jnp.asarray(valid))
    router, gate_up, down = (np.asarray(w[...], np.float64) for w in (layer.router, layer.gate_up, layer.down))
    want, counts = np.zeros(x.shape), np.zeros(COUNT, int)
    for place in zip(*np.nonzero(valid)):
        token = x[place].astype(np.float64)
        p = np.exp(token @ router)
        p /= p.sum()
        chosen = np.argsort(-p)[:CHOSEN]
        for e in chosen:
            gate, up = token @ gate_up[e, :, 0], token @ gate_up[e, :, 1]
            want[place] += p[e] / p[chosen].sum() * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
            counts[e] += 1
    assert np.asarray(report.counts).tolist() == counts.tolist() and counts.sum() == CHOSEN * valid.sum()
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_a_device_holds_its_own_experts_and_its_share_of_all_else():
    abstract = policy_on({"fsdp": 2, "expert": 4}).abstract()
    held = lambda leaf: leaf.sharding.shard_shape(leaf.shape)  # noqa: E731
    mlp = abstract["layers"]["mlp"]
    assert held(mlp["gate_up"]) == (2, COUNT // 4, WIDTH // 2, 2, INNER)
    assert held(mlp["down"]) == (2, COUNT // 4, INNER, WIDTH // 2)
    assert held(abstract["layers"]["attention"]["output"]) == (2, 4, 16, WIDTH // 8)
    assert held(abstract["embedding"]) == (61, WIDTH // 8)


def test_no_device_ever_has_all_experts():
    policy = policy_on({"expert": 4})
    text = slopes.lower(policy, policy.abstract(), rows(16), recorded(16, "empty")).compile().as_text()
    assert f"[{COUNT // 4},{WIDTH},{2 * INNER}]" in text or f"[{COUNT // 4},{WIDTH},2,{INNER}]" in text
    assert f"[{COUNT},{WIDTH},2,{INNER}]" not in text and f"[{COUNT},{INNER},{WIDTH}]" not in text
    whole = policy_on({"fsdp": 4})
    gathered = slopes.lower(whole, whole.abstract(), rows(16), None).compile().as_text()
    assert f"[{COUNT},{INNER},{WIDTH}]" in gathered


@pytest.mark.parametrize("ways", [3, 5])
def test_experts_that_the_axis_does_not_divide_are_refused(ways):
    with pytest.raises(ValueError, match=rf"expert = {ways} does not divide the 8 experts .* one of \[2, 4, 8\]"):
        policy_on({"expert": ways})


def test_a_model_without_experts_is_divided_by_it_as_by_fsdp():
    dense = Qwen3(**SIZES)
    one, other = (policy_on(sizes, dense) for sizes in ({"fsdp": 4}, {"fsdp": 2, "expert": 2}))
    shapes = lambda policy: [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(policy.abstract())]  # noqa: E731
    assert shapes(one) == shapes(other)
    found = [jax.jit(p.hidden)(params_of(p), *rows(8)) for p in (one, other)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


# -- accounts ----------------------------------------------------------------------------------------------------------


def test_the_account_of_memory_divides_the_state_and_counts_the_crowd():
    one = cost_model.Setting(sizes=MODEL, remat="full")
    four = cost_model.Setting(sizes=MODEL, remat="full", expert=4, fsdp=2)
    assert (four.shards, four.crowd, four.experts) == (8, 4, 3 * COUNT * INNER * WIDTH)
    dense = cost_model.Setting(sizes=Qwen3(**SIZES), remat="full", expert=4)
    assert (dense.crowd, dense.experts) == (1, 0)
    state = one.weights * (4 + 8 + 4)
    # 12 bytes of each token and of each unit of width of the experts that it goes to, four times the tokens of the device.
    more = cost_model.memory_bytes(four, 1000) - cost_model.memory_bytes(four, 0)
    less = cost_model.memory_bytes(one, 1000) - cost_model.memory_bytes(one, 0)
    assert more - less == 3 * 12 * 1000 * CHOSEN * INNER
    attention = WIDTH * (2 * 4 * 16 + 2 * 2 * 16)
    gathered = 6 * (attention + COUNT * WIDTH + four.experts / 4) + 4 * 61 * WIDTH
    assert cost_model.memory_bytes(four, 0) == pytest.approx(state / 8 + gathered + 2 * 61 * WIDTH)


def test_a_gin_file_sets_it_and_the_accounts_of_a_run_know_it(tmp_path):
    """8 devices and 4 experts: fsdp takes what the axis leaves, and 8 shards are refused."""

    def policy(ways):
        file = str(Path(__file__).parents[1] / "tiny_moe.gin")
        bindings = tiny_run.bindings(tmp_path, **tiny_run.RL_ALONE, **{"train.MeshConfig.expert": ways})
        run = command_line.build([file], bindings)[0]
        return run, run.policy.policy(Partitioner.create(run.mesh))

    run, spread = policy(4)
    setting = fit.setting_of(spread, run.stages[0], "full")
    assert (setting.fsdp, setting.expert, setting.shards) == (2, 4, 8)
    # Parameters of 4 bytes, of which a device has its own experts' and an eighth of the rest, but for norms, which are whole.
    held = memory.state(run.stages[0], spread)["weights"]
    sizes = {jax.tree_util.keystr(p): x.size for p, x in jax.tree_util.tree_leaves_with_path(spread.abstract())}
    assert 4 * sum(sizes.values()) / 8 <= held < 4 * sum(sizes.values()) / 7
    with pytest.raises(ValueError, match=r"expert = 8 does not divide the 4 experts"):
        policy(8)


def test_a_result_of_the_benchmark_tells_its_axis():
    row = {
        "remat": "full", "unroll": 1, "moments_dtype": "float32", "devices": 8, "fsdp": -1, "expert": 4, "tensor": 1, "context": 1,
        "rows": 8, "row_tokens": 64, "segments": 1,
    }  # fmt: skip
    setting, tokens, length = cost_model.of_row(row, MODEL)
    assert (setting.fsdp, setting.expert, tokens, length) == (2, 4, 64, 64)
