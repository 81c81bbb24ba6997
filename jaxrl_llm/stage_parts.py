"""What a stage is made of: its learner, teacher, companions, and the feed that it learns from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm import teaching
from jaxrl_llm.ahead import AheadFeed
from jaxrl_llm.collect import Collector
from jaxrl_llm.companions import Companions
from jaxrl_llm.data.pipeline import Encoder, NoRows, PromptStream
from jaxrl_llm.experience import Prompt, SamplingSettings, ScoredGroup
from jaxrl_llm.feeds import Feed, GivenFeed, LedFeed, SampleFeed, SharedStream, given
from jaxrl_llm.hosts import Processes
from jaxrl_llm.learner import Learner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.parts import parts
from jaxrl_llm.protocols import Companion, Params
from jaxrl_llm.rollouts import Asking
from jaxrl_llm.stages import Stage


def companions_of(config: Stage, training: Any) -> Companions:
    """The companions of the rewards that the stage asks, started."""
    asked = config.samples or any(e.reward is None for e in config.evaluations)
    rewards = [config.reward if asked else None, *(e.reward for e in config.evaluations)]
    members = list(parts(rewards, Companion))
    if members and training.processes.count > 1:
        raise ValueError(
            f"a reward of stage {config.name!r} asks a model beside the policy ({type(members[0]).__name__}), and its run has "
            f"{training.processes.count} processes: run it on one host, or give REWARD a service"
        )
    for i, member in enumerate(members):
        member.start(training.policy.plain, training.tokenizer, training.run_dir / f"{config.name}_companion_{i}")
    training.companions.extend(members)
    return Companions(members=members, policy=training.policy, base=training.bases.get("policy"))


def learner_of(config: Stage, policy: Policy, seed: int) -> Learner:
    """The learner of a stage, with the value models that its algorithm asks for."""
    models: dict[str, Any] = {"policy": policy}
    models |= {name: source.model(policy) for name, source in config.value_models.items()}
    optimizers = {"reward_model" if "reward_model" in models else "policy": config.optimizer}
    warmup = 0
    if "critic" in models:
        assert config.critic_optimizer is not None  # by Stage
        optimizers["critic"] = config.critic_optimizer
        warmup = config.critic_warmup_steps * config.minibatches * config.epochs
    return Learner(
        models=models, algorithm=config.algorithm, optimizers=optimizers, updates=config.updates, warmup=warmup, seed=seed,
        temperature=config.settings.temperature if config.samples else 1.0, max_segments=config.packing.sequences_per_row,
    )  # fmt: skip


def teacher_of(config: Stage, training: Any, learner: Learner) -> teaching.Teacher | None:
    """The teacher that the algorithm asks for, which speaks the policy's tokens."""
    if "teacher" not in config.algorithm.needs:
        return None
    assert config.teacher is not None  # by Stage
    return teaching.Teacher.open(teaching.found(config.teacher, training.tokenizer, learner.partitioner), learner)


def value_bases(config: Stage, learner: Learner, key: jax.Array) -> dict[str, Params]:
    """What lies frozen under the adapters of the value models that have these."""
    bases = {name: source.base(learner.models[name], key) for name, source in config.value_models.items()}
    return {name: base for name, base in bases.items() if base is not None}


def new_key(seed: int, number: int) -> jax.Array:
    """The key of the new parameters of stage `number`."""
    return jax.random.fold_in(jax.random.key(seed), number)


def feed_of(
    config: Stage, encoder: Encoder, rows: Sequence[Prompt], asking: Asking, settings: SamplingSettings, training: Any
) -> Feed:
    """The feed that the algorithm learns from.

    Each process encodes its part of the rows; where process 0 alone asks the sampler, it encodes all of them.
    """
    count, seed, processes = config.prompts_per_step, training.config.seed, training.processes
    if not config.samples:
        groups = part_of(
            processes, lambda: given_groups(config, encoder, processes.part(rows, whole=joins(config)), seed)
        )
        if joins(config):
            groups = processes.part(groups)
        return GivenFeed(stream=SharedStream(groups, processes, seed=seed), rows=count)
    assert config.reward is not None
    collector = Collector(
        asking=asking, reward=config.reward, settings=settings, group_size=config.group_size,
        greedy="greedy" in config.algorithm.needs, filter=config.filter, seed=seed,
    )  # fmt: skip
    if processes.count == asking.processes.count and not config.max_staleness:
        prompts = part_of(processes, lambda: encoder.prompts(processes.part(rows)))
        return SampleFeed(stream=SharedStream(prompts, processes, seed=seed), collector=collector, prompts=count)
    if not processes.main:
        return LedFeed(feed=None, notice=training.notice)
    feed: SampleFeed | AheadFeed
    stream = PromptStream(encoder.prompts(rows), seed=seed)
    if config.max_staleness:
        feed = AheadFeed(
            stream=stream, collector=collector, prompts=count, max_staleness=config.max_staleness, batches=config.steps,
            least=config.algorithm.group_size_at_least,
        )  # fmt: skip
    else:
        feed = SampleFeed(stream=stream, collector=collector, prompts=count)
    return feed if processes.count == 1 else LedFeed(feed=feed, notice=training.notice)


def joins(config: Stage) -> bool:
    """Whether what the dataset gives joins rows, so that each process needs all of them."""
    return config.algorithm.learns_from == "documents"


def part_of(processes: Processes, encode: Callable[[], list[Any]]) -> list[Any]:
    """This process's part of the encoded rows, which may be none of them where other processes have some."""
    try:
        return encode()
    except NoRows:
        if processes.count == 1:
            raise
        return []


def given_groups(config: Stage, encoder: Encoder, rows: Sequence[Prompt], seed: int) -> list[ScoredGroup]:
    """What the rows of a dataset give to learn from."""
    return given(encoder, rows, config.algorithm, row_tokens=config.packing.row_tokens, seed=seed)


def say(what: str, counts: Mapping[str, int]) -> None:
    """Prints what the encoder cut or dropped, where it did."""
    lost = {n: c for n, c in counts.items() if c and n not in ("rows", "kept")}
    print(what + (f" ({', '.join(f'{n} {c}' for n, c in lost.items())})" if lost else ""), flush=True)
