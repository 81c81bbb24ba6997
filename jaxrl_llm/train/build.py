"""Builds a StageTrainer from a Stage: reads and encodes its data, and makes its learner and its frozen models."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax

from jaxrl_llm import components
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.data.pipeline import Encoder, NoRows, PromptStream
from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed import ahead
from jaxrl_llm.distributed.mesh import Partitioner
from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.experience import Group, Prompt
from jaxrl_llm.learner import example, score
from jaxrl_llm.learner.ahead import first_programs
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.router import Router
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.protocols import GroupLoader, Params
from jaxrl_llm.rollouts.buffer import RolloutBuffer
from jaxrl_llm.rollouts.collect import Collector, RolloutGenerator, SampledGroups
from jaxrl_llm.rollouts.curriculum import CurriculumStream
from jaxrl_llm.rollouts.multihost import BroadcastGroups, SharedStream
from jaxrl_llm.rollouts.offline import OfflineGroups, given
from jaxrl_llm.rollouts.pairs import PairedGroups
from jaxrl_llm.rollouts.player import Player
from jaxrl_llm.rollouts.schedule import Slots
from jaxrl_llm.train.evaluation import HeldOut
from jaxrl_llm.train.frozen_models import FrozenModels, auxiliary_models
from jaxrl_llm.train.stage import Stage
from jaxrl_llm.train.step import StageTrainer


def sampled_policy(sampler: Any, policy: Policy) -> Policy:
    """Returns the policy that a sampler is started with: with its adapters where it serves them apart from their base, else `plain`.

    Raises:
      ValueError: the sampler is set to serve adapters, and the run trains none.
    """
    if not getattr(sampler, "adapters", False):
        return policy.plain
    if policy is policy.plain:
        raise ValueError(
            f"{components.selector(type(sampler))}.adapters = True serves LoRA adapters apart from their base, and this run trains all "
            "weights: set it to False, or include gin/adapters/lora.gin"
        )
    return policy


def check_tokens(run: Any, policy: Policy, tokenizer: Any, partitioner: Partitioner) -> None:
    """Raises ValueError where a tokenizer has more tokens than the policy, or a teacher that `run` asks is not there or has others."""
    size = policy.architecture.vocabulary_size
    if len(tokenizer) > size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's vocabulary {size}: set TOKENIZER and MODEL to a matching pair"
        )
    for stage in run.stages:
        if stage.teacher is not None and stage.taught:
            score.found(stage.teacher, tokenizer, partitioner)


def open_stage(config: Stage, trainer: Any, number: int) -> StageTrainer:
    """Reads and encodes the data of a stage and prepares its learner; nothing is compiled yet.

    Args:
      config: the stage.
      trainer: the run in progress: its policy, tokenizer, sampler and processes.
      number: the stage's number in the run, from 0.

    Raises:
      ValueError: the sampler cannot sample ahead, the model does not go with the stage, or the processes of the run have different rows.
    """
    if config.max_staleness and not (config.plays or getattr(trainer.sampler, "overlaps", False)):
        raise ValueError(
            f"Stage.max_staleness={config.max_staleness} of stage {config.name!r} samples while the learner updates, which a sampler "
            "on the learner's own devices cannot: set embedded.EmbeddedSampler.devices, include gin/samplers/vllm.gin, or set MAX_STALENESS = 0"
        )
    if trainer.policy.bitwise:
        check_bitwise(config, trainer.sampler)
    experts = trainer.policy.architecture.experts is not None
    if experts and config.router.replay == "R3" and config.samples and not getattr(trainer.sampler, "record", False):
        raise ValueError(
            f"train.Router.replay of stage {config.name!r} is 'R3' and the sampler records no experts: set record_routes = True of "
            "embedded.EmbeddedSampler or vllm.VllmSampler, or replay = 'R2' or 'off'"
        )
    if experts and config.skip_silent and (config.router.balance or config.router.bias_rate):
        raise ValueError(
            f"Stage.skip_silent of stage {config.name!r} is not for experts whose loads are balanced, to which every token adds: set it to "
            "False, or train.Router.balance and bias_rate to 0"
        )
    check_bias(config.name, config.router, trainer.policy)
    encoder = Encoder(
        tokenizer=trainer.tokenizer, max_prompt_tokens=config.max_prompt_tokens, max_response_tokens=config.settings.max_tokens,
        truncation=config.truncation, template_kwargs=config.template_kwargs,
    )  # fmt: skip
    rows = config.data.rows()
    content = content_of(rows)
    trainer.processes.same(f"the rows of stage {config.name!r}", [len(rows), content])
    generator = generator_of(config, trainer, extra=0)  # for evaluations, whose counts are not the step's
    collector = collector_of(config, generator_of(config, trainer, extra=config.episodes.extra), trainer)
    last = trainer.config.starts[number] + config.steps
    loader = loader_of(config, encoder, rows, collector, trainer, last)
    if config.pairing is not None:
        loader = PairedGroups(loader=loader, pairing=config.pairing, encoder=encoder)
    say(f"stage {config.name}: {len(rows)} rows", trainer.processes.summed(encoder.counts()))
    unseen = [] if config.held_out is None else list(config.held_out.rows())
    held_out = held_out_of(config, encoder, unseen, generator, trainer)
    learner = learner_of(config, trainer.policy, trainer.config.seed)
    return StageTrainer(
        config=config, number=number, offset=trainer.config.starts[number], learner=learner, loader=loader, collector=collector,
        frozen=frozen_of(config, learner, trainer), held_out=held_out, sources=sorted({r.source for r in (*rows, *unseen)}),
        bases=dict(trainer.bases) | value_bases(config, learner, new_key(trainer.config.seed, number)) | teacher_base(config, learner),
        preemption=trainer.preemption, progress=trainer.progress, controls=config.controls,
        contents={"data": content, "tokenizer": hashed(sorted(trainer.tokenizer.get_vocab().items()))},
    )  # fmt: skip


def compiling(stage: StageTrainer, step: int) -> ahead.Background | None:
    """Begins to compile what the stage's learner runs from `step` on; None where that is not worthwhile, or only the samples decide what it is."""
    config, learner = stage.config, stage.learner
    known = config.samples and config.schedule is None and step <= stage.offset + config.steps
    known &= learner.policy.architecture.experts is None  # those that are recorded have shapes of their own
    count = example.foreseen(config) if known else 0
    if not count or not ahead.worthwhile():
        return None
    scores = any(stage.scores_policy(at) for at in range(step, stage.offset + config.steps + 1))
    programs = partial(
        first_programs, learner, lambda: [example.batch_of(config, learner, rows) for rows in config.packing.sizes],
        count, stage.bases, scores=scores,
    )  # fmt: skip
    return ahead.Background(programs)


def check_bitwise(config: Stage, sampler: Any) -> None:
    """Raises ValueError where a stage has log-probs that are not both the sampler's and the learner's in the bitwise mode."""
    if any(phase.view is not None for phase in config.phases):
        raise ValueError(
            f"stage {config.name!r} reads log-probs inside the model, which no sampler has: set BITWISE = False, or SCHEDULE = None"
        )
    if config.plays and getattr(sampler, "keep", False):
        raise ValueError(
            f"the turns of stage {config.name!r} go on in kept slots, whose new tokens are not prefilled in the order of the learner's rows: "
            "set embedded.EmbeddedSampler.keep_turns = False, or BITWISE = False"
        )


def check_bias(stage: str, router: Router, policy: Any) -> None:
    """Raises ValueError where a stage's router is to move the biases of experts, and there are none or they are frozen under adapters."""
    experts = policy.architecture.experts
    if not router.bias_rate or experts is None:
        return
    if not experts.choice_bias:
        raise ValueError(
            f"train.Router.bias_rate of stage {stage!r} moves biases by which experts are chosen, and the model has none: set "
            "sources.PolicySource.choice_bias = True, or bias_rate = 0"
        )
    if policy is not policy.plain:
        raise ValueError(
            f"train.Router.bias_rate of stage {stage!r} moves biases of the model, which adapters leave as it is: set "
            "sources.PolicySource.lora = None, or bias_rate = 0"
        )


# -- where groups come from --------------------------------------------------------------------------------------------


def generator_of(config: Stage, trainer: Any, extra: int = 0) -> RolloutGenerator:
    """Makes the rollout generator of a stage, with `extra` rollouts a group; where the sampler runs on the devices of all processes, all call it."""
    together = trainer.processes if getattr(trainer.sampler, "everywhere", False) else Processes()
    generator = RolloutGenerator(
        sampler=trainer.sampler, tokenizer=trainer.tokenizer, marker=config.marker, processes=together
    )
    if not config.plays:
        return generator
    if together.count > 1:
        raise ValueError(
            f"stage {config.name!r} has an {'agent' if config.environment is None else 'environment'}, whose rollouts end at times of their "
            f"own, and {type(trainer.sampler).__name__} samples on all {together.count} processes at once: include gin/samplers/vllm.gin, "
            "or run one process"
        )
    episodes = config.episodes
    limits = replace(episodes.limits, max_turns=min(episodes.limits.max_turns, config.max_turns))
    service = TokenService(
        trainer.sampler, with_stop_ids(config.settings, trainer.tokenizer), max_length=trainer.config.max_length,
        at_once=min(episodes.concurrency, config.sequences),
    )  # fmt: skip
    player = Player(
        service=service, tokenizer=trainer.tokenizer, environment=config.environment, agent=config.agent,
        config=replace(episodes, limits=limits), template_kwargs=config.template_kwargs,
        max_prompt_tokens=config.max_prompt_tokens,
    )  # fmt: skip
    trainer.players.append(player)
    slots = Slots(concurrency=episodes.concurrency, extra=extra)
    return replace(generator, player=player, slots=slots)


def collector_of(config: Stage, generator: RolloutGenerator, trainer: Any) -> Collector | None:
    """Makes the collector of a stage's sampled groups; None for an algorithm that learns from given responses."""
    if not config.samples:
        return None
    return Collector(
        generator=generator, reward=config.reward,
        settings=with_stop_ids(config.settings, trainer.tokenizer), group_size=config.group_size,
        greedy="greedy" in config.algorithm.needs, filter=config.filter, seed=trainer.config.seed,
        least=config.least_samples, weights=config.episodes.weights,
    )  # fmt: skip


def loader_of(
    config: Stage, encoder: Encoder, rows: Sequence[Prompt], collector: Collector | None, trainer: Any, last: int
) -> GroupLoader:
    """Makes the group loader of a stage whose last step is `last`, for the data that its algorithm learns from.

    Each process encodes its part of the rows; where process 0 alone calls the sampler, it encodes all of them.
    """
    count, seed, processes = config.prompts_per_step, trainer.config.seed, trainer.processes
    chosen = lambda stream: stream if config.curriculum is None else CurriculumStream(stream, config.curriculum)  # noqa: E731
    if collector is None:
        if config.curriculum is not None:
            raise ValueError(
                f"Stage.curriculum of stage {config.name!r} draws by the rewards of samples, and {type(config.algorithm).__name__} learns from "
                f"{config.algorithm.learns_from}: set it to None"
            )
        whole = config.algorithm.learns_from == "documents"  # their chunks join rows, so that each process needs all
        groups = part_of(processes, lambda: given_groups(config, encoder, processes.part(rows, whole=whole), seed))
        groups = processes.part(groups) if whole else groups
        return OfflineGroups(stream=stream_of(groups, processes, seed), rows=count)
    if processes.count == collector.generator.processes.count and not config.max_staleness:
        prompts = part_of(processes, lambda: encoder.prompts(processes.part(rows)))
        return SampledGroups(stream=chosen(stream_of(prompts, processes, seed)), collector=collector, prompts=count)
    if not processes.main:
        return BroadcastGroups(loader=None, preemption=trainer.preemption)
    loader: GroupLoader
    stream = chosen(PromptStream(encoder.prompts(rows), seed=seed))
    if config.max_staleness:
        loader = RolloutBuffer(
            stream=stream, collector=collector, prompts=count, max_staleness=config.max_staleness, last=last,
            least=config.least_samples,
        )  # fmt: skip
    else:
        loader = SampledGroups(stream=stream, collector=collector, prompts=count)
    return loader if processes.count == 1 else BroadcastGroups(loader=loader, preemption=trainer.preemption)


def stream_of(part: Sequence[Any], processes: Processes, seed: int) -> PromptStream[Any]:
    """Returns the stream of all rows, of which this process holds a part; a single process holds them all."""
    return SharedStream(part, processes, seed=seed) if processes.count > 1 else PromptStream(part, seed=seed)


def part_of(processes: Processes, encode: Callable[[], list[Any]]) -> list[Any]:
    """Returns this process's part of the encoded rows, which may be empty where there are several processes."""
    try:
        return encode()
    except NoRows:
        if processes.count == 1:
            raise
        return []


def given_groups(config: Stage, encoder: Encoder, rows: Sequence[Prompt], seed: int) -> list[Group]:
    """Returns the groups of given responses that the rows of a dataset hold."""
    return given(encoder, rows, config.algorithm, row_tokens=config.packing.row_tokens, seed=seed)


def held_out_of(
    config: Stage, encoder: Encoder, unseen: Sequence[Prompt], generator: RolloutGenerator, trainer: Any
) -> HeldOut:
    """Encodes the held-out data of a stage: the prompts of its evaluations, and its held-out responses."""
    prompts = []
    for evaluation in config.evaluations:
        other = replace(encoder, max_response_tokens=None)
        prompts.append(other.prompts(list(evaluation.data.rows())[: evaluation.limit]))
        say(f"evaluation {evaluation.name}: {len(prompts[-1])} prompts", other.counts())
    responses = given_groups(config, encoder, unseen, trainer.config.seed) if unseen else []
    return HeldOut(config=config, prompts=prompts, given=responses, generator=generator, preemption=trainer.preemption)


def content_of(rows: Sequence[Prompt]) -> str:
    """Returns a hash of everything that rows hold and of their order."""
    return hashed([[x for f in fields(row) if (x := getattr(row, f.name)) is not None] for row in rows])


def hashed(value: Any) -> str:
    """Returns the BLAKE2b hash of a JSON-like value, as hexadecimal text."""
    digest = hashlib.blake2b(digest_size=16)
    for item in value:
        digest.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


LIMITED = {"dropped/too_long": ", longer than PROMPT_LIMIT", "dropped/long_response": ", longer than RESPONSE_LIMIT"}


def say(what: str, counts: Mapping[str, int]) -> None:
    """Prints `what`, and how many texts the encoder cut or dropped, of how many (a pair has two), and by which limit, where it did."""
    lost = [
        f"{n} {c} of {counts['rows']}{LIMITED.get(n, '')}" for n, c in counts.items() if c and n not in ("rows", "kept")
    ]
    print(what + (f" ({', '.join(lost)})" if lost else ""), flush=True)


# -- models ------------------------------------------------------------------------------------------------------------


def learner_of(config: Stage, policy: Policy, seed: int) -> Learner:
    """Makes the learner of a stage, with the value models that its algorithm needs."""
    models: dict[str, Any] = {"policy": policy}
    models |= {name: source.model(policy) for name, source in config.value_models.items()}
    optimizers = {"reward_model" if "reward_model" in models else "policy": config.optimizer}
    warmup = 0
    if "critic" in models:
        assert config.critic_optimizer is not None  # by Stage
        optimizers["critic"] = config.critic_optimizer
        warmup = config.critic_warmup_steps * config.minibatches * config.epochs
    algorithm: Any = config.algorithm
    own: dict[str, Any] = {}
    if config.samples and config.old_from == "update":  # the update weighs tokens itself
        own = {"own_old": True, "correction": algorithm.correction}
        algorithm = replace(algorithm, correction=None)
    return Learner(
        models=models, algorithm=algorithm, optimizers=optimizers, updates=config.updates, warmup=warmup, seed=seed,
        temperature=config.settings.temperature if config.samples else 1.0, max_segments=config.packing.sequences_per_row,
        router=config.router, teacher=opened_teacher(config, policy), **own,
    )  # fmt: skip


def opened_teacher(config: Stage, policy: Policy) -> Policy | None:
    """Opens the teacher whose distribution an update reads, without its parameters; None where the algorithm has none."""
    if config.teacher is None or "teacher_divergence" not in config.algorithm.needs:
        return None
    opened: Policy = config.teacher.open(policy.partitioner).policy
    return opened


def teacher_base(config: Stage, learner: Learner) -> dict[str, Params]:
    """Returns {"teacher": parameters} of the teacher whose distribution an update reads; {} where the algorithm has none."""
    if config.teacher is None or learner.teacher is None:
        return {}
    return {score.TEACHER: config.teacher.open(learner.partitioner).params()}


def frozen_of(config: Stage, learner: Learner, trainer: Any) -> FrozenModels:
    """Makes the frozen models that the algorithm and the rewards of a stage need; the teacher has the policy's tokens."""
    teacher = None
    if "teacher" in config.algorithm.needs:
        assert config.teacher is not None  # by Stage
        opened = score.found(config.teacher, trainer.tokenizer, learner.partitioner)
        teacher = score.Teacher.open(opened, learner)
    return FrozenModels(
        policy=trainer.policy, base=trainer.bases.get("policy"), refers="reference" in config.needs,
        offloads=config.offload_reference, every=config.reference_every, dtype=config.reference_dtype or trainer.policy.compute_dtype, teacher=teacher, auxiliary=auxiliary_models(config, trainer),
    )  # fmt: skip


def value_bases(config: Stage, learner: Learner, key: jax.Array) -> dict[str, Params]:
    """Returns the frozen parameters under the adapters of value models."""
    bases = {name: source.base(learner.models[name], key) for name, source in config.value_models.items()}
    return {name: base for name, base in bases.items() if base is not None}


def new_key(seed: int, number: int) -> jax.Array:
    """Returns the random key for the new parameters of stage `number`."""
    return jax.random.fold_in(jax.random.key(seed), number)
