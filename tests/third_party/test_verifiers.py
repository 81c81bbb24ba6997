"""verifiers' train client against the generate route: its traces hold the sampler's own tokens, log-probs and branches."""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agents.chat_tokenizers import QWEN3, chat_tokenizer
from agents.gateways import rendering, speaks, talking
from agents.scripted import check_branches

pytest.importorskip("verifiers", reason="verifiers is not installed: see tests/third_party/requirements.txt")

CALL = '<think>\nUse the tool.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 47, "b": 85}}\n</tool_call>'
KEY = "KEY_OF_THE_SESSION_OF_A_TEST"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer(QWEN3).save_pretrained(folder)
    return folder


@asynccontextmanager
async def episodes(talk, folder: Path, config: dict, *, retention: str | None = None, **sampling):
    """A coroutine that plays a task of an environment of verifiers by the session's endpoint, and its tasks."""
    from renderers.configs import Qwen3RendererConfig
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.types import SamplingConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    point = talk.gateway.endpoint(talk.session)
    os.environ[KEY] = point.key
    kept = {} if retention is None else {"thinking_retention": retention}
    client = TrainClientConfig(
        base_url=point.base_url, api_key_var=KEY, renderer=Qwen3RendererConfig(**kept), renderer_model_name=str(folder)
    )  # fmt: skip
    environment = load_environment(resolve_env_config(config))
    context = ModelContext(model=point.model, client=client, sampling=SamplingConfig(temperature=1.0, **sampling))
    try:
        async with environment.serving():
            yield lambda task: environment.run_episode(task, context), environment.taskset
    finally:
        del os.environ[KEY]


def roles(**more) -> dict:
    harness = {"harness": {"id": "addition_taskset"}, "runtime": {"type": "subprocess"}}
    return {"taskset": {"id": "addition_taskset", **more}, "agent": harness}


def compare(trace, session, asked) -> None:
    """Asserts that a trace's branches are the session's, with the sampler's log-probs in all digits."""
    found = session.branches()
    assert len(trace.branches) == len(found)
    for theirs, ours in zip(trace.branches, found, strict=True):
        begin = len(ours.prefix)
        assert theirs.token_ids == [*ours.prefix, *ours.tokens]
        given = np.asarray(theirs.logprobs[begin:], np.float32)
        assert given[ours.mask].tobytes() == ours.sampler_logprobs[ours.mask].tobytes()
    sampled = [mask for branch in found for mask in branch.mask]
    assert sum(sampled) == sum(len(done.tokens) for _, done in asked)


def test_an_episode_with_a_tool_is_one_branch(tokenizer_folder):
    made = rendering()

    async def main():
        sampler = speaks(made, [CALL, "<think>\nDone.\n</think>\n\nIt is 132."])
        async with (
            talking(sampler, made) as talk,
            episodes(talk, tokenizer_folder, roles(), max_tokens=90, seed=5, cache_salt="7") as (play, tasks),
        ):
            episode = await play(next(iter(tasks)))
            (trace,) = episode.traces
            assert trace.ok and trace.reward == 1.0, trace.errors
            assert list(trace.rewards) == ["right"]
            compare(trace, talk.session, sampler.asked)
            check_branches(talk.session.branches(), sampler)
            (branch,) = talk.session.branches()
            assert trace.branches[0].sampled_mask[len(branch.prefix) :] == branch.mask.tolist()
            assert len(branch.turns) == 2 and set(talk.session.ignored) == {"cache_salt"}
            assert all(settings.max_tokens == 90 for settings in sampler.settings)

    asyncio.run(main())


@pytest.fixture(scope="module")
def policy():
    """A tiny random policy over the tokenizer's vocabulary, and its parameters."""
    import jax

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.models.qwen3 import Qwen3

    vocabulary = len(chat_tokenizer(QWEN3))
    sizes = Qwen3(
        vocabulary_size=vocabulary,
        width=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=8,
        mlp_width=32,
        max_positions=2048,
    )
    made = Policy(sizes, Partitioner.create(MeshConfig(), jax.devices()[:1]), "float32")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(0.1, 0.5, leaf.shape).astype(leaf.dtype), leaf.sharding), made.abstract()
    )
    return made, params


def test_the_embedded_samplers_tokens_and_log_probs_reach_the_trace(tokenizer_folder, policy):
    from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

    made = rendering()
    own, params = policy

    async def main():
        engine = EmbeddedSampler(decode_chunk=8).start(own, made.tokenizer, max_length=1024)
        await engine.publish(params, 6)
        settings = replace(settings_of(made), max_tokens=12)
        try:
            async with (
                talking(engine, made, settings=settings) as talk,
                episodes(talk, tokenizer_folder, roles(), max_tokens=12) as (play, tasks),
            ):
                episode = await play(next(iter(tasks)))
                (trace,) = episode.traces
                assert trace.ok and set(trace.rewards) == {"right"}, trace.errors
                asked = [(call.prompt, call.completion) for call in talk.session.calls]
                assert asked
                compare(trace, talk.session, asked)
                for branch in talk.session.branches():
                    assert set(branch.versions[branch.mask]) == {6}
        finally:
            await engine.close()

    asyncio.run(main())


def settings_of(made):
    from jaxrl_llm.experience import SamplingParams

    return SamplingParams(max_tokens=400, stop_token_ids=made.stop_token_ids)


@pytest.fixture
def words(tmp_path, monkeypatch) -> Path:
    """A folder of NLTK's with a few words, all of them nouns."""
    import json

    folder = tmp_path / "nltk_data"
    for corpus in ("en", "en-basic"):
        (folder / "corpora" / "words").mkdir(parents=True, exist_ok=True)
        (folder / "corpora" / "words" / corpus).write_text("\n".join(WORDS) + "\n")
    (folder / "corpora" / "words" / "README").write_text("")
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    tagger.mkdir(parents=True)
    for name, held in (("weights", {}), ("tagdict", dict.fromkeys(WORDS, "NN")), ("classes", ["NN"])):
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(held))
    monkeypatch.setenv("NLTK_DATA", str(folder))
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(folder)])
    return folder


WORDS = ("crane", "slate", "pious", "minty", "brood", "gawky", "fudge", "vixen")


@pytest.mark.parametrize(("retention", "branches"), [("all", 1), (None, 6)])
def test_six_turns_of_wordle_are_one_branch_or_one_a_turn(tokenizer_folder, words, retention, branches):
    pytest.importorskip("textarena", reason="textarena is not installed: see tests/third_party/requirements.txt")
    made = rendering()
    # Six guesses of one word, which is wrong for most seeds, and repeats do not end a game.
    texts = [f"<think>\nGuess {i}.\n</think>\n\n[{word}]" for i, word in enumerate(WORDS[:6])]
    config = {
        "taskset": {"id": "textarena", "game": "Wordle-v0"},
        "player": {"harness": {"id": "addition_taskset"}, "runtime": {"type": "subprocess"}},
    }

    async def main():
        sampler = speaks(made, texts)
        async with (
            talking(sampler, made) as talk,
            episodes(talk, tokenizer_folder, config, retention=retention, max_tokens=60) as (play, tasks),
        ):
            episode = await play(next(iter(tasks)))
            assert not episode.errors, episode.errors
            (trace,) = episode.traces
            assert trace.ok, trace.errors
            assert "game_reward" in trace.rewards
            found = talk.session.branches()
            assert len(sampler.asked) == 6 and len(found) == branches
            compare(trace, talk.session, sampler.asked)
            check_branches(found, sampler)

    asyncio.run(main())
