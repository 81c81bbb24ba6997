"""A classmate gets the thought's own ids where both have one vocabulary, and its text where they do not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import EchoSampler, make_prompt
from jaxtyping import TypeCheckError

from jaxrl_llm.components import parts
from jaxrl_llm.data.tokenizer import ByteTokenizer, CharTokenizer
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Prompt
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sources import PolicySource
from jaxrl_llm.rewards.classmate import Asked, ClassmateCoT
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.samplers.sampled_classmate import SampledClassmate
from jaxrl_llm.train.frozen_models import AuxiliaryModel, FrozenModels

CHARACTERS = CharTokenizer(alphabet="<>/think0123456789?")
POLICY = CHARACTERS.load()
TINY = Qwen3(
    vocabulary_size=32, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=16, tied=True, max_positions=64
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return PolicySource(architecture=TINY).policy(Partitioner.create(MeshConfig()))


class Started:
    """A factory of an echoing sampler, which is kept."""

    def __init__(self) -> None:
        self.sampler = EchoSampler()

    def start(self, policy: Any, tokenizer: Any, *, max_length: int, run_dir: Path) -> EchoSampler:
        return self.sampler


def asked(text: str, seed: int = 5) -> Asked:
    prompt = Prompt(id="p", text="1?", tokens=np.array(POLICY.encode("1?"), np.int32))
    return Asked(prompt, np.array(POLICY.encode(text), np.int32), text, seed)


def served(policy: Policy, tmp_path: Path, **fields: Any) -> tuple[SampledClassmate, EchoSampler]:
    factory = Started()
    mate = SampledClassmate(weights="served", sampler=factory, closing="</think>", max_length=40, **fields)
    mate.start(policy, POLICY, tmp_path)
    return mate, factory.sampler


def test_ids_are_passed_on_as_they_are(policy: Policy, tmp_path: Path) -> None:
    mate, _ = served(policy, tmp_path)
    assert POLICY.decode(mate.prefix(asked("23"))) == "1?<think>23</think>"
    assert POLICY.decode(served(policy, tmp_path, opened=True)[0].prefix(asked("23"))) == "1?23</think>"


def test_another_vocabulary_gets_the_text_and_answers_in_the_policys(policy: Policy, tmp_path: Path) -> None:
    mate, _ = served(policy, tmp_path, tokenizer=CharTokenizer(alphabet="?9876543210kniht/><"))
    own = mate.tokenizer.load()
    ids = mate.prefix(asked("23"))
    assert own.decode(ids) == "1?<think>23</think>" and list(ids) != POLICY.encode("1?<think>23</think>")
    ((answer,),) = asyncio.run(mate.answers([asked("23")], 1))
    assert POLICY.decode(answer.tokens) == answer.text


def test_calls_that_come_together_are_sampled_together_and_a_long_thought_is_left_out(
    policy: Policy, tmp_path: Path
) -> None:
    mate, sampler = served(policy, tmp_path)

    async def both() -> Any:
        return await asyncio.gather(mate.answers([asked("1", 3), asked("2" * 30)], 2), mate.answers([asked("4", 9)], 2))

    (first, long), (second,) = asyncio.run(both())
    assert len(sampler.calls) == 1 and long is None
    prefixes, n, _, seeds = sampler.calls[0]
    assert (n, seeds) == (2, [3, 9])
    sums = [int(p.sum()) + 1 for p in prefixes]  # what an EchoSampler says first
    assert [a.tokens[0] for a in (*first, *second)] == [sums[0]] * 2 + [sums[1]] * 2


def test_a_sampler_that_fails_fails_every_call(policy: Policy, tmp_path: Path) -> None:
    mate, sampler = served(policy, tmp_path)
    sampler.sample = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        asyncio.run(mate.answers([asked("1")], 1))


def test_random_weights_of_its_own_answer_and_greedy_draws_repeat(policy: Policy, tmp_path: Path) -> None:
    source = PolicySource(architecture=TINY)
    mate = SampledClassmate(
        weights="own", source=source, sampler=EmbeddedSampler(slots=8, decode_chunk=4), closing="</think>", max_length=24
    )  # fmt: skip
    mate.start(policy, POLICY, tmp_path)

    async def twice() -> list[Any]:
        found = [await mate.answers([asked("12"), asked("3")], 1) for _ in range(2)]
        await mate.stop()
        return found

    first, second = asyncio.run(twice())
    assert [[a.text for a in one] for one in first] == [[a.text for a in one] for one in second]
    with pytest.raises(ValueError, match="before it was started"):
        mate.prefix(asked("1"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "own"}, "SampledClassmate.source is the model"),
        ({"weights": "served", "source": PolicySource(architecture=TINY)}, "SampledClassmate.source is the model"),
        ({"weights": "served", "refresh_every": 2}, "refresh_every"),
        ({"weights": "policy", "tokenizer": CHARACTERS}, "it is the policy's"),
        ({"weights": "mine"}, "weights"),
    ],
)
def test_contradictory_classmates_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeCheckError), match=words):
        SampledClassmate(sampler=Started(), **fields)


def test_a_model_too_small_for_its_tokenizer_is_refused(policy: Policy, tmp_path: Path) -> None:
    mate = SampledClassmate(
        weights="own", source=PolicySource(architecture=TINY), tokenizer=ByteTokenizer(), sampler=Started()
    )
    with pytest.raises(ValueError, match="259 tokens and its model 32"):
        mate.start(policy, POLICY, tmp_path)


def test_companions_are_found_in_the_fields_of_rewards() -> None:
    mate = SampledClassmate(weights="served", sampler=Started())
    reward = Weighted(parts={"cot": ClassmateCoT(behaviour=Exact(), sign=1, classmates=[mate]), "exact": Exact()})
    assert list(parts([reward, None], AuxiliaryModel)) == [mate]


@pytest.mark.parametrize(
    ("every", "versions", "values"), [(0, [0], [1.0]), (1, [0, 1, 2, 3], [1, 11, 12, 13]), (2, [0, 2], [1.0, 12])]
)
def test_self_play_is_frozen_live_or_lagged(every: int, versions: list[int], values: list[float]) -> None:
    seen: list[tuple[float, int]] = []

    class Mate:
        follows, refresh_every = True, every

        def start(self, policy: Any, tokenizer: Any, run_dir: Path) -> None: ...

        async def publish(self, params: Any, version: int) -> None:
            seen.append((float(params["w"]), version))

        async def stop(self) -> None: ...

    scalar = {"w": jax.ShapeDtypeStruct((), jnp.float32)}
    policy: Any = Mock(spec=Policy, merged=lambda params, base: params, abstract=lambda: scalar)
    frozen = FrozenModels(policy=policy, auxiliary=[Mate()])
    frozen.begin({"w": jnp.float32(1)})

    async def run(after: range) -> None:
        for steps in after:
            await frozen.refresh({"w": jnp.float32(10 + steps)}, steps)

    asyncio.run(run(range(4)))
    assert [v for _, v in seen] == versions and [x for x, _ in seen] == values
    frozen = FrozenModels(policy=policy, auxiliary=[Mate()], params=frozen.params)
    before = float(frozen.params["companion_0"]["w"])
    asyncio.run(run(range(4, 5)))  # a run that goes on from a checkpoint publishes the copy it holds
    assert seen[len(versions)][0] == (before if every == 0 else 14)


def test_a_prompt_of_messages_is_rendered_by_the_classmates_own_template(policy: Policy, tmp_path: Path) -> None:
    mate, _ = served(policy, tmp_path, tokenizer=ByteTokenizer())
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "1?"}], tokens=np.array([3], np.int32))
    ids = mate.prefix(Asked(prompt, np.array(POLICY.encode("2"), np.int32), "2", 0))
    assert mate.tokenizer.load().decode(ids) == "user: 1?\nassistant: <think>2</think>"


def test_it_runs_beside_any_prompt(policy: Policy, tmp_path: Path) -> None:
    mate, _ = served(policy, tmp_path)
    assert mate.decode(np.array(POLICY.encode("12"), np.int32)) == "12"
    make: Callable[..., Prompt] = make_prompt
    assert len(mate.prefix(Asked(make(tokens=(4, 5)), np.zeros(0, np.int32), "", 0))) == 2 + 7 + 8
