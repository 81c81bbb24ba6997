"""A reward model learns preferences at the last token, is exported as a classifier, and rewards a later run; folders agree with
transformers."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
import transformers
from builders import make_prompt, make_rollout
from learner_cases import MODEL, PACKING, make_learner

from jaxrl_llm.algorithms.reward_model import RewardModel
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import unscored
from jaxrl_llm.learner.batch import Batch
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.reward_models import HFRewardModel
from jaxrl_llm.models.sources import PolicySource, ValueSource
from jaxrl_llm.models.value import ValueModel
from jaxrl_llm.rollouts.offline import ended
from jaxrl_llm.tools import export
from jaxrl_llm.train.stage import Stage

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=8),
}


def random_classifier(name: str, folder: Path) -> Any:
    """transformers' model with every tensor random, biases and norms too; saved in `folder`."""
    torch.manual_seed(0)
    CONFIGS[name]._attn_implementation = "eager"
    model = transformers.AutoModelForSequenceClassification.from_config(CONFIGS[name]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def rollouts_of(lengths: tuple[int, ...] = (1, 4, 6)) -> list[Any]:
    random = np.random.default_rng(0)
    prompt = make_prompt("p", random.integers(1, 61, 5))
    return [make_rollout(prompt, random.integers(1, 61, n)) for n in lengths]


def their_scores(model: Any) -> list[float]:
    """transformers' logit of each sequence alone."""
    found = []
    for rollout in rollouts_of():
        tokens = torch.tensor(np.concatenate([rollout.prompt.tokens, rollout.tokens])[None].astype(np.int64))
        with torch.no_grad():
            found.append(float(model(input_ids=tokens).logits[0, 0]))
    return found


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_classifiers_folder_scores_as_in_transformers(name: str, tmp_path: Path) -> None:
    want = their_scores(random_classifier(name, tmp_path / "in"))
    reward = HFRewardModel(folder=str(tmp_path / "in"), rows=2, mesh=MeshConfig(fsdp=4, tensor=2))
    scores = asyncio.run(reward.score(rollouts_of()))
    np.testing.assert_allclose(scores.parts["reward_model"], want, atol=1e-4)
    assert np.ptp(want) > 0.1 and scores.valid["reward_model"].all()
    model, params = reward._loaded
    hf_weights.save(model, params, tmp_path / "out")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == CONFIGS[name].architectures[0] or again.config.num_labels == 1
    np.testing.assert_allclose(their_scores(again), want, atol=1e-5)


def test_only_a_classifier_is_a_reward_and_only_a_language_model_a_policy(tmp_path: Path) -> None:
    random_classifier("llama", tmp_path / "classifier")
    mesh = Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is not supported"):
        PolicySource(pretrained=str(tmp_path / "classifier")).policy(mesh)
    policy = make_learner(RewardModel()).policy
    hf_weights.save(policy, policy.init(jax.random.key(0)), tmp_path / "language")
    with pytest.raises(ValueError, match=r"no sequence classifier.*--model reward_model"):
        asyncio.run(HFRewardModel(folder=str(tmp_path / "language")).score(rollouts_of()))
    with pytest.raises(ValueError, match="token 80 is not in the vocabulary of 61"):
        far = [make_rollout(make_prompt("p", [1]), [80])]
        asyncio.run(HFRewardModel(folder=str(tmp_path / "classifier"), mesh=MeshConfig(fsdp=8)).score(far))
    source = ValueSource(backbone=PolicySource(pretrained=str(tmp_path / "language")))
    params = source.params(source.on(mesh), {}, jax.random.key(0))
    assert not params["value"]["kernel"].any() and params["embedding"].any()


def pairs_of() -> list[list[Any]]:
    """Six pairs; a preferred answer ends in 7, and every rejected answer in another token."""
    random, rows = np.random.default_rng(1), []
    for i in range(6):
        prompt = make_prompt(f"p{i}", random.integers(8, 32, 3), source="s")
        tokens = [random.integers(8, 32, n) for n in random.integers(1, 5, 2)]
        rows.append([make_rollout(prompt, [*t, end]) for t, end in zip(tokens, (7, 9))])
    return rows


def test_the_loss_is_bradley_terry_on_values_after_the_last_token_and_is_learned() -> None:
    learner = make_learner(RewardModel())
    model = ValueModel.like(learner.policy)
    learner = replace(
        learner, models={"policy": learner.policy, "reward_model": model},
        optimizers={"reward_model": Optimizer(learning_rate=1e-2)}, algorithm=RewardModel(center_coef=0.3),
    )  # fmt: skip
    rows, policy = pairs_of(), learner.policy.init(jax.random.key(0))
    params = ValueSource().params(model, policy, jax.random.key(1))
    kernel = np.random.default_rng(2).normal(0, 0.2, MODEL.width).astype(np.float32)
    params["value"] = jax.device_put({"kernel": kernel}, learner.partitioner.replicated)
    hidden_of, scores = jax.jit(learner.policy.hidden), []
    for rollout in (r for pair in rows for r in pair):
        whole = np.concatenate([rollout.prompt.tokens, rollout.tokens])
        tokens = jnp.asarray(np.pad(whole, (0, 8 - len(whole)))[None], jnp.int32)
        places = jnp.arange(8, dtype=jnp.int32)[None]
        hidden = hidden_of(policy, tokens, places, jnp.ones_like(tokens))
        scores.append(np.asarray(hidden[0, len(whole) - 1], np.float64) @ kernel)
    chosen, rejected = np.array(scores).reshape(-1, 2).T
    want = np.mean(np.log1p(np.exp(rejected - chosen)) + 0.3 * (chosen + rejected) ** 2)
    groups = [unscored([ended(r) for r in pair], (1, -1)) for pair in rows]
    batch = Batch.build(groups, PACKING, minibatches=1, sources=["s"], response_tokens=6, capacity=12)
    view = batch.sequences({}, {}, len(groups))
    (mini,) = batch.micro_batches(view, jax.device_get(learner.advantages(view)), 1.0, learner.partitioner)
    state = learner.init({"policy": policy, "reward_model": params})
    before = jax.tree.map(np.array, policy)
    state, metrics = learner.update(state, mini)
    np.testing.assert_allclose(metrics["loss/total"], want, rtol=1e-5)
    np.testing.assert_allclose(metrics["pairs/accuracy"], np.mean(chosen > rejected), atol=1e-6)
    for _ in range(20):
        state, metrics = learner.update(state, mini)
    assert metrics["pairs/accuracy"] == 1 and metrics["loss/total"] < 0.5 * want
    assert set(state.moments) == {"reward_model"}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.policy), before)


def test_a_stage_without_the_reward_model_it_trains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Stage.reward_model of stage 'rm' is not set: .*reward_model.gin"):
        Stage(name="rm", algorithm=RewardModel(), data=Sorting(), optimizer=Optimizer(), steps=1)
    with pytest.raises(ValueError, match=r"center_coef must be >= 0"):
        RewardModel(center_coef=-1.0)


@pytest.mark.xdist_group("whole_run")
def test_a_run_trains_a_reward_model_that_rewards_the_next_run(tmp_path: Path) -> None:
    """Pairs of sorted and reversed strings; the exported folder scores in transformers as it does in the second run."""
    gin_file = tmp_path / "rm.gin"
    gin_file.write_text(
        "from __gin__ import dynamic_registration\nfrom jaxrl_llm import train\nimport tiny_reward\n"
        f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/algorithms/reward_model.gin'\n"
        "rl/train.Stage.data = @tiny_reward.SortedPairs()\nrl/train.Stage.evaluations = ()\n"
    )
    sizes = {"STEPS": 30, "SAVE_EVERY": 100, "LEARNING_RATE": 3e-3, "PROMPTS_PER_STEP": 16, **tiny_run.RL_ALONE}
    done = tiny_run.launch(tmp_path / "rm", str(gin_file), **sizes)
    assert done.returncode == 0, done.stderr
    rows = tiny_run.rows(tmp_path / "rm")
    assert rows[1]["loss/reward_model"] == pytest.approx(np.log(2), abs=1e-3) and rows[-1]["pairs/accuracy"] >= 0.9
    out = tmp_path / "folder"
    assert export.main([str(tmp_path / "rm"), "--out", str(out), "--model", "reward_model"]) == 0
    assert export.main([str(tmp_path / "rm"), "--out", str(tmp_path / "none"), "--model", "critic"]) == 1
    rl = tmp_path / "rl.gin"
    rl.write_text(f"include '{tiny_run.GIN_FILE}'\ninclude 'gin/rewards/reward_model.gin'\n")
    more = {"STEPS": 1, "EVALUATE_EVERY": 10, "REWARD_MODEL_FOLDER": repr(str(out)), **tiny_run.RL_ALONE}
    done = tiny_run.launch(tmp_path / "rl", str(rl), **more)
    assert done.returncode == 0, done.stderr
    assert tiny_run.rows(tmp_path / "rl")[-1]["reward/std"] > 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    eos = tokenizer.eos_token_id
    texts = [[*tokenizer("s:cba=")["input_ids"], *tokenizer(a)["input_ids"], eos] for a in ("abc", "cba")]
    with torch.no_grad():
        want = [float(theirs(input_ids=torch.tensor([t])).logits[0, 0]) for t in texts]
    ours = asyncio.run(
        HFRewardModel(folder=str(out)).score([make_rollout(make_prompt("p", t[:3]), t[3:]) for t in texts])
    )
    np.testing.assert_allclose(ours.parts["reward_model"], want, atol=1e-4)
