"""A call is answered, its answer is masked, and a turn without a call ends the talk."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.sums import Sums
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.data.tool_sums import ToolSums
from jaxrl_llm.environments.calculator import Calculator
from jaxrl_llm.experience import Completion, Limits, Prompt, SamplingParams
from jaxrl_llm.rollouts.collect import RolloutGenerator
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.rollouts.player import Player

TOKENIZER = CharTokenizer(alphabet="0123456789+-*=[];?").load()


def ids(text: str, *, end: bool = False) -> list[int]:
    return TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] * end


class Scripted:
    """Says its lines in turn, whatever it is asked; -1.5 nats a token."""

    version = 3

    def __init__(self, *lines: list[int]) -> None:
        self.lines, self.heard = list(lines), []

    async def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        assert n == 1
        for i, prefix in enumerate(prefixes):
            self.heard.append(TOKENIZER.decode(prefix))
            line = self.lines.pop(0)[: settings.max_tokens]
            tokens = np.array(line, np.int32)
            logprobs = np.full(len(line), -1.5, np.float32)
            yield (
                i,
                [Completion(tokens=tokens, logprobs=logprobs, versions=np.full(len(line), 3, np.int32), finish="stop")],
            )

    async def publish(self, params: object, version: int) -> None:
        raise AssertionError("not asked")

    async def close(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


def talk(sampler: Scripted, max_tokens: int = 24, max_turns: int = 8):
    prompt = Prompt(id="p", text="47+85=", tokens=np.array(ids("47+85="), np.int32))
    settings = SamplingParams(max_tokens=max_tokens)
    player = Player(
        service=TokenService(sampler, settings), tokenizer=TOKENIZER, environment=Calculator(),
        config=Episodes(limits=Limits(max_turns=max_turns)),
    )  # fmt: skip
    generator = RolloutGenerator(sampler=sampler, tokenizer=TOKENIZER, player=player)

    async def all_groups():
        return [g async for g in generator.groups([prompt], 1, settings, [0])]

    ((index, (rollout,)),) = asyncio.run(all_groups())
    assert index == 0
    return rollout


def test_the_answer_to_a_call_is_heard_and_masked():
    sampler = Scripted(ids("[47+85]"), ids("132", end=True))
    rollout = talk(sampler)
    assert rollout.text == "[47+85]132;132"
    assert sampler.heard == ["47+85=", "47+85=[47+85]132;"]
    assert rollout.mask.tolist() == [True] * 7 + [False] * 4 + [True] * 4
    assert rollout.sampler_logprobs.tolist() == [-1.5] * 7 + [0.0] * 4 + [-1.5] * 4
    assert rollout.finish == "stop"


def test_a_turn_without_a_call_is_the_last():
    sampler = Scripted(ids("132", end=True))
    assert talk(sampler).text == "132"
    assert len(sampler.heard) == 1


def test_the_token_limit_ends_the_talk():
    rollout = talk(Scripted(ids("[47+85]")), max_tokens=10)  # the environment's 4 tokens do not fit
    assert rollout.finish == "length" and rollout.mask.tolist() == [True] * 7


def test_the_number_of_turns_is_limited():
    sampler = Scripted(*[ids("[1+1]")] * 9)
    talk(sampler, max_tokens=100, max_turns=3)
    assert len(sampler.heard) == 3


@pytest.mark.parametrize(
    ("call", "answer"),
    [("47+85", "132"), ("7*8", "56"), ("3-10", "-7"), ("1/2", "?"), ("", "?"), ("1" * 10 + "+1", "?")],
)
def test_calls_are_calculated_or_refused(call: str, answer: str):
    assert Calculator().answer(call) == answer


def test_demonstrations_mask_what_the_calculator_says():
    source = ToolSums(sums=Sums(low=10, high=99, size=100), called_share=0.5)
    encoder = Encoder(tokenizer=TOKENIZER, max_prompt_tokens=12)
    rollouts = encoder.demonstrations(source.rows())
    called = [r for r in rollouts if not r.mask.all()]
    assert len(called) == 50
    for r in called:
        masked = TOKENIZER.decode(r.tokens[~r.mask])
        assert masked == r.prompt.reference + ";"
        assert TOKENIZER.decode(r.tokens[r.mask], skip_special_tokens=True).endswith("]" + r.prompt.reference)
