"""Adapters alone learn: the base stays bit-equal, adapted and merged weights agree, and PEFT's files hold the same product."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from builders import Words
from learner_cases import (
    MODEL,
    SFT_CASE,
    batches_of,
    host_params,
    leaves,
    make_batch,
    make_learner,
)
from safetensors.numpy import load_file, save_file

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.models import hf_weights, lora
from jaxrl_llm.models.lora import AdaptedPolicy, LoRA
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import export
from jaxrl_llm.train import load
from jaxrl_llm.train.trainer import Trainer

pytestmark = pytest.mark.slow

LORA = LoRA(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))


def make(lora: LoRA = LORA, **changes: Any) -> tuple[Learner, Any]:
    """The learner of SFT on adapters, and the frozen base, with the same values on every mesh."""
    learner = make_learner(SFT_CASE, **changes)
    plain = learner.policy
    policy = AdaptedPolicy(plain.architecture, plain.partitioner, plain.compute_dtype, plain.remat, lora)
    base = jax.tree.map(lambda x, like: jax.device_put(np.array(x), like.sharding), host_params(), plain.abstract())
    return replace(learner, models={"policy": policy}), policy.frozen(base)


def noisy(policy: AdaptedPolicy) -> Any:
    """Adapters with B away from 0, the same on every mesh."""
    random = np.random.default_rng(3)
    draw = lambda like: jax.device_put(random.normal(0, 0.3, like.shape).astype(np.float32), like.sharding)  # noqa: E731
    return jax.tree.map(draw, policy.abstract())


def rows_of(learner: Learner) -> Any:
    (rows,) = make_batch().rows
    return to_device(bare(rows), learner.partitioner)


def logprobs(learner: Learner, params: Any, base: Any = None) -> np.ndarray:
    bases = {} if base is None else {"policy": base}
    return np.asarray(learner.score_frozen(params, rows_of(learner), bases))


def test_fresh_adapters_give_the_base_exactly() -> None:
    learner, base = make()
    adapters = learner.policy.init(jax.random.key(0))
    plain = make_learner(SFT_CASE)
    np.testing.assert_array_equal(logprobs(learner, adapters, base), logprobs(plain, base))
    first = adapters["layers"]["attention"]["query"]["kernel"]["a"]
    assert first.shape == (2, 32, 3) and 0.9 / np.sqrt(32) < np.abs(first).max() <= 1 / np.sqrt(32)


def test_merged_weights_are_base_plus_scaled_product_and_give_the_same_log_probs() -> None:
    learner, base = make()
    adapters = noisy(learner.policy)
    merged = learner.policy.merged(adapters, base)
    got, start, low = leaves(merged), leaves(base), leaves(adapters)
    product = {"['query']['kernel']": "ldr,lrhc->ldhc", "['output']": "lhcr,lrd->lhcd", "['down']": "lfr,lrd->lfd"}
    for path, x in start.items():
        how = next((h for end, h in product.items() if path.endswith(end)), None)
        want = x.astype(np.float64)
        if how is not None:
            want = want + 2.0 * np.einsum(how, *(low[f"{path}['{n}']"].astype(np.float64) for n in "ab"))
        np.testing.assert_allclose(got[path], want, rtol=1e-6, atol=1e-6, err_msg=path)
    adapted, whole = logprobs(learner, adapters, base), logprobs(make_learner(SFT_CASE), merged)
    assert np.abs(adapted - logprobs(make_learner(SFT_CASE), base)).max() > 0.1
    np.testing.assert_allclose(adapted, whole, rtol=1e-6, atol=1e-5)


def test_only_adapters_learn_and_their_gradient_is_the_chain_rule_of_the_merged_weights() -> None:
    learner, base = make()
    plain = make_learner(SFT_CASE)
    adapters, before = noisy(learner.policy), leaves(base)
    merged = learner.policy.merged(adapters, base)
    batches = batches_of(learner, make_batch())
    full, _ = plain._slopes(
        {"policy": merged}, batches[0], {}, (0, 0)
    )  # the model's own weights, checked in test_learner
    own, _ = learner._slopes({"policy": adapters}, batches[0], {"policy": base}, (0, 0))
    slope, low, found = leaves(full["policy"]), leaves(adapters), leaves(own["policy"])
    path = "['layers']['attention']['output']"
    a, b = (low[f"{path}['{n}']"] for n in "ab")
    for name, how, other in (("a", "lhcd,lrd->lhcr", b), ("b", "lhcd,lhcr->lrd", a)):
        want = 2.0 * np.einsum(how, slope[path].astype(np.float64), other)
        np.testing.assert_allclose(found[f"{path}['{name}']"], want, rtol=1e-4, atol=1e-6)
    state = learner.init({"policy": adapters})
    assert leaves(state.params["policy"]).keys() == low.keys()
    start = {path: x.copy() for path, x in low.items()}
    for _ in range(2):
        state, metrics = learner.update(state, batches, {"policy": base})
    assert metrics["grad_norm/policy"] > 0
    for path, x in leaves(state.params["policy"]).items():
        assert np.abs(x - start[path]).max() > 1e-4, path
    for path, x in leaves(base).items():
        np.testing.assert_array_equal(x, before[path], err_msg=path)
    count = sum(x.size for x in start.values())
    moments = (x for x in leaves(state.moments).values() if jnp.issubdtype(x.dtype, jnp.floating))
    assert sum(x.size for x in moments) == 2 * count


def test_no_gradient_of_the_frozen_weights_is_computed() -> None:
    """A full update takes three forwards of products, one with adapters two and the adapters' own."""
    learner, base = make(LoRA(rank=1, alpha=1.0))
    adapters = noisy(learner.policy)
    plain = make_learner(SFT_CASE)
    (batch,) = batches_of(learner, make_batch())

    def flops(of: Learner, params: Any, bases: Any) -> float:
        def gradient(params: Any, bases: Any) -> Any:
            hidden = lambda p: of.policy.hidden(  # noqa: E731
                of.policy.joined(p, bases), batch.tokens, batch.positions, batch.segments
            )
            return jax.grad(lambda p: jnp.sum(hidden(p) ** 2))(params)

        return jax.jit(gradient).lower(params, bases).compile().cost_analysis()["flops"]

    assert flops(learner, adapters, base) < 0.85 * flops(plain, base, None)


def test_the_base_may_be_kept_in_bfloat16() -> None:
    learner, base = make(replace(LORA, base_dtype="bfloat16"))
    kinds = {path: str(x.dtype) for path, x in leaves(base).items()}
    assert {k for path, k in kinds.items() if "scale" in path} == {"float32"}
    assert {k for path, k in kinds.items() if "scale" not in path} == {"bfloat16"}
    state = learner.init({"policy": learner.policy.init(jax.random.key(0))})
    state, metrics = learner.update(state, batches_of(learner, make_batch()), {"policy": base})
    assert np.isfinite(metrics["loss/total"]) and {str(x.dtype) for x in leaves(state.policy).values()} == {"float32"}


def test_a_mesh_changes_nothing_and_adapters_lie_split_as_their_weights_do() -> None:
    results = []
    for changes in ({}, {"mesh": MeshConfig(fsdp=2, tensor=2), "devices": 4}):
        learner, base = make(**changes)
        state = learner.init({"policy": noisy(learner.policy)})
        state, metrics = learner.update(state, batches_of(learner, make_batch()), {"policy": base})
        assert jax.tree.map(lambda x: x.sharding, state) == learner.shardings
        merged = learner.policy.merged(state.policy, base)
        assert jax.tree.map(lambda x: x.sharding, merged) == jax.tree.map(
            lambda x: x.sharding, learner.policy.plain.abstract()
        )
        results.append((float(metrics["loss/total"]), float(metrics["grad_norm/policy"]), state.policy))
    (loss, norm, _), (other, other_norm, adapters) = results
    assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-5)
    query = adapters["layers"]["attention"]["query"]["kernel"]
    assert query["a"].addressable_shards[0].data.shape == (2, 16, 3)  # [layers, width over fsdp, rank]
    assert query["b"].addressable_shards[0].data.shape == (2, 3, 2, 8)  # [layers, rank, heads over tensor, head width]


def test_exported_adapters_add_up_to_the_merged_folder_in_numpy(tmp_path: Path) -> None:
    learner, base = make()
    policy, adapters = learner.policy, noisy(learner.policy)
    hf_weights.save(policy.plain, base, tmp_path / "base")
    hf_weights.save(policy.plain, policy.merged(adapters, base), tmp_path / "merged")
    hf_weights.save_adapters(policy, adapters, tmp_path / "adapters", base_name="owner/name")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6.0, "owner/name")
    low = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    start, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    used = set()
    for name, x in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        want = x.astype(np.float64)
        if f"{stem}.lora_A.weight" in low:
            a, b = low[f"{stem}.lora_A.weight"], low[f"{stem}.lora_B.weight"]
            assert a.shape[0] == b.shape[1] == 3
            want = want + config["lora_alpha"] / config["r"] * (b.astype(np.float64) @ a)
            used |= {f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"}
        np.testing.assert_allclose(merged[name], want, rtol=1e-6, atol=1e-6, err_msg=name)
    assert used == set(low) and len(low) == 2 * 3 * MODEL.layers


def write_peft_folder(folder: Path) -> dict[str, np.ndarray]:
    """A folder as PEFT writes it for LORA on MODEL: lora_A [r, in] and lora_B [out, r] of each adapted module."""
    width, heads = MODEL.width, MODEL.heads * MODEL.head_width
    sizes = {
        "self_attn.q_proj": (width, heads),
        "self_attn.o_proj": (heads, width),
        "mlp.down_proj": (MODEL.mlp_width, width),
    }
    random, tensors = np.random.default_rng(5), {}
    for layer in range(MODEL.layers):
        for module, (inputs, outputs) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            for name, shape in (("lora_A", (3, inputs)), ("lora_B", (outputs, 3))):
                tensors[f"{stem}.{name}.weight"] = random.normal(0, 0.3, shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["down_proj", "q_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def test_adapters_of_a_peft_folder_add_their_product_to_the_weights(tmp_path: Path) -> None:
    learner, base = make()
    policy, low = learner.policy, write_peft_folder(tmp_path / "peft")
    source = PolicySource(architecture=MODEL, lora=replace(LORA, pretrained=str(tmp_path / "peft")))
    adapters = source.params(source.policy(policy.partitioner), jax.random.key(0))
    hf_weights.save(policy.plain, base, tmp_path / "base")
    hf_weights.save(policy.plain, policy.merged(adapters, base), tmp_path / "merged")
    start, merged = (load_file(tmp_path / n / "model.safetensors") for n in ("base", "merged"))
    changed = 0
    for name, x in start.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        want = x.astype(np.float64)
        if f"{stem}.lora_A.weight" in low:
            want = want + 2.0 * (low[f"{stem}.lora_B.weight"].astype(np.float64) @ low[f"{stem}.lora_A.weight"])
            changed += 1
        np.testing.assert_allclose(merged[name], want, rtol=1e-5, atol=1e-5, err_msg=name)
    assert changed == 3 * MODEL.layers


def test_adapters_of_another_kind_are_refused(tmp_path: Path) -> None:
    policy = make()[0].policy
    write_peft_folder(tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    changes = {"r": r"set lora.LoRA.rank = 5", "lora_alpha": r"set lora.LoRA.alpha = 5", "use_dora": "plain LoRA"}
    for name, message in changes.items():
        changed = config | {name: 5 if name != "use_dora" else True}
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            hf_weights.load_adapters(policy, tmp_path / "peft")
    with pytest.raises(FileNotFoundError, match=r"set lora.LoRA.pretrained"):
        hf_weights.load_adapters(policy, tmp_path / "none")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, r"lora.LoRA.rank must be >= 1 \(got 0\)"),
        ({"alpha": 0.0}, r"lora.LoRA.alpha must be > 0"),
        ({"targets": ("q_proj", "c_attn")}, r"lora.LoRA.targets .* of q_proj, .*\(got \['q_proj', 'c_attn'\]\)"),
        ({"targets": ()}, r"lora.LoRA.targets"),
        ({"base_dtype": "int8"}, r"lora.LoRA.base_dtype"),
    ],
)
def test_bad_adapters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRA(**fields)


def test_a_source_gives_the_same_base_again_and_adapters_apart() -> None:
    source = PolicySource(architecture=MODEL, lora=LORA)
    policy = source.policy(make_learner(SFT_CASE).partitioner)
    plain = PolicySource(architecture=MODEL)
    want = plain.params(plain.policy(policy.partitioner), jax.random.key(4))
    for _ in range(2):
        base = source.base(policy, jax.random.key(4))
        assert all((x == y).all() for x, y in zip(jax.tree.leaves(base), jax.tree.leaves(want), strict=True))
    assert leaves(source.params(policy, jax.random.key(4))).keys() == leaves(policy.abstract()).keys()
    assert plain.base(plain.policy(policy.partitioner), jax.random.key(4)) is None


def test_a_publication_holds_one_sum_of_base_and_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the version before is given back before the next is made; what no adapter changes is the base's own."""
    learner, base = make()
    policy = learner.policy
    sampler = EmbeddedSampler().start(policy.plain, Words(), max_length=16)
    run: Any = SimpleNamespace(sampler=sampler, policy=policy, bases={"policy": base})
    versions = [SimpleNamespace(policy=noisy(policy)) for _ in range(2)]
    held = lambda: sum(x.nbytes for x in jax.live_arrays())  # noqa: E731
    whole = lora._sum
    most: list[int] = []

    def counted(*given: Any) -> jax.Array:
        made = whole(*given)
        most.append(held())
        return made

    asyncio.run(Trainer._serve(run, versions[0], 0))
    monkeypatch.setattr(lora, "_sum", counted)
    before = held()
    asyncio.run(Trainer._serve(run, versions[1], 1))
    adapted = 4 * 2 * (32 * 32 + 32 * 32 + 48 * 32)  # bytes of q_proj, o_proj and down_proj of two layers in float32
    assert len(most) == 3 and max(most) <= before == held()
    sampler.retire()
    assert before - held() == adapted


@pytest.mark.xdist_group("whole_run")
def test_a_run_on_adapters_resumes_bit_for_bit_and_is_exported_whole_and_alone(tmp_path: Path) -> None:
    gin_file = tmp_path / "lora.gin"
    gin_file.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/adapters/lora.gin'\n")
    sizes = {
        "STEPS": 2,
        "SAVE_EVERY": 1,
        "EVALUATE_EVERY": 10,
        "lora.LoRA.rank": 2,
        "LEARNING_RATE": 3e-3,
        "WARMUP_STEPS": 0,
    }
    sizes |= tiny_run.RL_ALONE
    run_dir = tmp_path / "run"
    done = tiny_run.launch(run_dir, str(gin_file), **sizes)
    assert done.returncode == 0, done.stderr
    rows = tiny_run.rows(run_dir)
    assert rows[-1]["gap/max"] < 1e-4 and rows[-1]["grad_norm/policy"] > 0  # the sampler has the adapters merged
    assert export.main([str(run_dir), "--out", str(tmp_path / "model")]) == 0
    assert export.main([str(run_dir), "--out", str(tmp_path / "adapters"), "--adapters"]) == 0
    low = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert any(x.any() for name, x in low.items() if "lora_B" in name)
    found = load.saved(run_dir)
    params = found.merged()
    again = hf_weights.load(found.policy.plain, tmp_path / "model")
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    import shutil

    shutil.rmtree(run_dir / "checkpoints" / "2")
    done = tiny_run.launch(run_dir, str(gin_file), **sizes)
    assert "resuming from step 1" in done.stdout and tiny_run.rows(run_dir) == rows, done.stderr
