"""A teacher scores the policy's samples with its own weights; held-out rows are measured and never learned from."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import EchoSampler, Words, make_prompt, make_rollout, slow_but
from learner_cases import (
    PACKING,
    TEMPERATURE,
    expected_streams,
    fresh_state,
    leaves,
    logits_of,
    make_batch,
    make_learner,
    padded,
)

from jaxrl_llm import command_line
from jaxrl_llm.algorithms.distill import Distill
from jaxrl_llm.algorithms.dpo import DPO
from jaxrl_llm.algorithms.gkd import GKD
from jaxrl_llm.algorithms.grpo import GRPO
from jaxrl_llm.algorithms.otb import OTB
from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.data.sorting import Sorting
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.distributed.preemption import Preemption
from jaxrl_llm.experience import unscored
from jaxrl_llm.learner import score
from jaxrl_llm.learner.batch import bare, to_device
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.architecture import Capture
from jaxrl_llm.models.sources import Opened
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rollouts.collect import RolloutGenerator
from jaxrl_llm.rollouts.offline import OfflineGroups
from jaxrl_llm.train.evaluation import HeldOut
from jaxrl_llm.train.frozen_models import FrozenModels
from jaxrl_llm.train.load import TrainedModel
from jaxrl_llm.train.phases import Phase
from jaxrl_llm.train.progress import Progress
from jaxrl_llm.train.stage import Stage
from jaxrl_llm.train.step import StageTrainer

TOKENIZER = CharTokenizer(alphabet="abcdefghijs:=")


def stage(algorithm: Any, **fields: Any) -> Stage:
    known = {"reward": Exact(), "group_size": 2, "max_prompt_tokens": 8, "packing": replace(PACKING, row_tokens=600)}
    return Stage(name="rl", algorithm=algorithm, data=Sorting(), optimizer=Optimizer(), steps=1, **known | fields)


def test_a_teachers_log_probs_are_its_own_softmax(tmp_path: Path) -> None:
    learner = make_learner(Distill())
    hf_weights.save(learner.policy, fresh_state(learner).policy, tmp_path / "teacher", TOKENIZER.load())
    opened = score.found(TrainedModel(path=str(tmp_path / "teacher")), TOKENIZER.load(), learner.partitioner)
    teacher = score.Teacher.open(opened, learner)
    (rows,) = make_batch().rows
    got = make_batch().unpack([np.asarray(teacher.logprobs(to_device(bare(rows), learner.partitioner)))])
    want, _ = expected_streams()
    np.testing.assert_allclose(got[: len(want)], want, rtol=1e-5, atol=1e-5)


def test_a_teacher_of_other_tokens_or_none_at_all_is_refused_at_the_start(tmp_path: Path) -> None:
    learner = make_learner(Distill())

    class Other:
        def open(self, partitioner: Any) -> Opened:
            other = CharTokenizer(alphabet="abcxyz").load()
            return Opened(policy=learner.policy, tokenizer=other, params=dict, name="other")

    with pytest.raises(ValueError, match=r"the teacher other has other tokens than the policy \(.*set TEACHER_PATH"):
        score.found(Other(), TOKENIZER.load(), learner.partitioner)
    with pytest.raises(ValueError, match=r"Distill learns from a teacher and Stage.teacher .* set TEACHER_PATH"):
        stage(Distill())
    with pytest.raises(ValueError, match=r"GKD learns from a teacher and Stage.teacher"):
        stage(GKD())
    with pytest.raises(ValueError, match="set MODEL_PATH, or TEACHER_PATH"):
        TrainedModel(path="")
    gin_file = tmp_path / "run.gin"
    gin_file.write_text("include 'gin/quickstart.gin'\ninclude 'gin/algorithms/distill.gin'\n")
    with pytest.raises(ValueError, match="set MODEL_PATH, or TEACHER_PATH"):
        command_line.build([str(gin_file)], ["TRAIN_ROWS = 8"])


@pytest.mark.parametrize("mixture", slow_but((0.4,), (0.0, 0.4, 1.0)))
def test_an_update_draws_the_policy_to_its_teachers_whole_distribution(mixture: float) -> None:
    """The loss is the mean divergence of the two softmaxes at the learned tokens, and falls as the policy learns."""
    algorithm = GKD(mixture=mixture)
    learner = make_learner(algorithm)
    teacher = learner.policy.init(jax.random.key(7))
    learner = replace(learner, teacher=learner.policy)
    state, batch = fresh_state(learner), make_batch()
    data = padded()
    read = jax.jit(lambda params: jax.lax.map(partial(logits_of, params), jnp.asarray(data["tokens"])))
    at = data["place"][:, :, None] - 1
    q, p = (np.take_along_axis(np.asarray(read(x), np.float64), at, 1) / TEMPERATURE for x in (state.policy, teacher))
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (p, q))
    m = mixture * p + (1 - mixture) * q
    kl = lambda a, b: (a * np.log(a / b)).sum(-1)  # noqa: E731
    each = {0.0: kl(p, q), 1.0: kl(q, p)}.get(mixture, mixture * kl(p, m) + (1 - mixture) * kl(q, m))
    sequences = batch.sequences({}, {}, 4)
    found = each[np.asarray(sequences.learned)[: len(each)]]
    advantages = jax.tree.map(np.asarray, learner.advantages(sequences))
    losses: list[float] = []
    for _ in range(8):
        (minibatch,) = batch.micro_batches(sequences, advantages, 1.0, learner.partitioner)
        state, metrics = learner.update(state, minibatch, {"teacher": teacher})
        losses.append(float(metrics["loss/policy"]))
    assert losses[0] == pytest.approx(np.mean(found), rel=1e-4) and losses[0] > 1e-2
    assert losses[-1] < 0.9 * losses[0] and all(np.diff(losses) < 0)


def test_held_out_rows_are_refused_where_samples_are_learned_from() -> None:
    with pytest.raises(ValueError, match="set HELD_OUT = None"):
        stage(GRPO(), held_out=Sorting(split="heldout", size=4))


def test_a_ratio_that_is_1_everywhere_selects_no_tokens() -> None:
    from jaxrl_llm.algorithms.correction import Correction, Rejection

    assert stage(GRPO(), old_logprobs="sampler").samples
    for fields in ({"rejections": (Rejection(),)}, {"correction": Correction(mode="mask")}):
        assert stage(GRPO(**fields)).samples
        with pytest.raises(ValueError, match=r"set Stage.old_logprobs = 'learner'"):
            stage(GRPO(**fields), old_logprobs="sampler")


def running(config: Stage, learner: Any, given: Any = (), frozen: Any = None) -> StageTrainer:
    generator = RolloutGenerator(sampler=EchoSampler(), tokenizer=Words())
    return StageTrainer(
        config=config, learner=learner, loader=OfflineGroups(stream=PromptStream(pairs_of(1)), rows=1), sources=["s"],
        held_out=HeldOut(config=config, given=given, generator=generator, preemption=Mock(spec=Preemption)),
        frozen=FrozenModels(policy=learner.policy, params=frozen or {}), preemption=Mock(spec=Preemption), progress=Mock(spec=Progress),
    )  # fmt: skip


def pairs_of(n: int) -> list[Any]:
    random = np.random.default_rng(2)
    groups = []
    for i in range(n):
        prompt = make_prompt(f"p{i}", random.integers(1, 32, 3), source="s")
        answers = [make_rollout(prompt, random.integers(1, 32, size)) for size in random.integers(1, 6, 2)]
        groups.append(unscored(answers, (1, -1)))
    return groups


def test_the_measure_of_held_out_pairs_is_the_losss_and_leaves_the_state_alone() -> None:
    learner, config = replace(make_learner(DPO(beta=0.5)), temperature=1.0), stage(DPO(beta=0.5), prompts_per_step=2)
    config = replace(config, packing=replace(PACKING, rows=2))  # several micro-batches
    groups, policy = pairs_of(7), learner.policy
    run = running(config, learner, given=groups, frozen={"reference": policy.init(jax.random.key(9))})
    state = fresh_state(learner)
    before = leaves(state)
    found = run.measure(state)
    assert all((x == before[path]).all() for path, x in leaves(state).items())

    logits = jax.jit(logits_of)

    def total(params: Any, rollout: Any) -> float:
        tokens = np.concatenate([rollout.prompt.tokens, rollout.tokens])
        found = jax.nn.log_softmax(logits(params, np.pad(tokens, (0, 10 - len(tokens)))))
        return float(np.asarray(found)[np.arange(2, len(tokens) - 1), rollout.tokens].sum())

    margins = []
    for group in groups:
        w, other = (total(state.policy, r) - total(run.frozen.params["reference"], r) for r in group.rollouts)
        margins.append(0.5 * (w - other))
    assert 0 < np.mean(np.array(margins) > 0) < 1
    np.testing.assert_allclose(found["eval/pairs/accuracy"], np.mean(np.array(margins) > 0), rtol=1e-6)
    np.testing.assert_allclose(found["eval/loss/policy"], np.mean(np.log1p(np.exp(-np.array(margins)))), rtol=1e-4)


def test_a_phase_inside_the_model_leaves_the_measure_of_held_out_pairs_as_it_is() -> None:
    learner, config = replace(make_learner(DPO(beta=0.5)), temperature=1.0), stage(DPO(beta=0.5), prompts_per_step=2)
    run = running(config, learner, given=pairs_of(3), frozen={"reference": learner.policy.init(jax.random.key(9))})
    state = fresh_state(learner)
    before = run.measure(state)
    run.phase = Phase(name="layer", view=Capture(layer=0))
    run.learners = {"layer": replace(learner, capture=Capture(layer=0))}
    assert run.measure(state) == before


def test_the_policy_is_scored_where_the_phases_own_loss_reads_what_the_algorithm_does_not() -> None:
    config = replace(stage(GRPO()), old_logprobs="sampler", score_every=3)
    run = running(config, make_learner(GRPO()))
    assert [run.scores_policy(step) for step in (1, 2, 3)] == [False, False, True]
    run.learners = {run.phase.name: replace(run.learner, algorithm=OTB())}
    assert all(run.scores_policy(step) for step in (1, 2, 3)), "its baseline is made of sum_p2"


def test_nothing_is_measured_where_no_rows_are_held_out() -> None:
    run = running(stage(SFT()), make_learner(SFT()))
    assert run.measure(fresh_state(run.learner)) == {}
