"""The calculator as a tool of a chat: calls are answered by the template, and demonstrations are what a dialogue makes."""

import asyncio
import json
from pathlib import Path

import gin
import numpy as np
import pytest
from agents.scripted import Scripted, check_branches

from jaxrl_llm.agents.dialogue import Dialogue
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.data.chat_sums import CALCULATOR, ChatSums
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.sums import Sums
from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.environments.calculator_tool import CalculatorTool
from jaxrl_llm.experience import Action, Observation, Prompt, SamplingParams, Task, ToolCall
from jaxrl_llm.rollouts.player import Player

GIN = Path(__file__).parent.parent.parent / "gin" / "environments" / "calculator_tool.gin"


@pytest.fixture
def tokenizer():
    """The tokenizer of the run, with its chat template."""
    gin.parse_config_files_and_bindings([str(GIN)], [])
    return gin.query_parameter("%TOKENIZER").scoped_configurable_fn().load()


def answers(*calls: ToolCall) -> tuple[list[str], bool]:
    async def stepped():
        environment = CalculatorTool().build(Prompt(id="p", text="x"), 0, 0)
        return await environment.step(Action(text="", calls=calls))

    observation = asyncio.run(stepped())
    assert all(m["role"] == "tool" and m["tool_call_id"] == c.id for m, c in zip(observation.messages, calls))
    return [m["content"] for m in observation.messages], observation.done


def test_calls_are_answered_and_a_turn_without_one_is_the_last():
    def call(arguments, status="ok"):
        return ToolCall(id="c7", name="calc", arguments=arguments, status=status)

    assert answers(call({"of": "47+85"}), call({"of": "9*8"})) == (["132", "72"], False)
    assert answers() == ([], True)
    wrong = [
        call({"of": "47"}),
        call({"of": 3}),
        call({}),
        call(None, "bad_json"),
        call({"of": "1+1"}, "unclosed"),
        call({"of": "1+1"}, "unknown_tool"),
    ]
    assert answers(*wrong) == (["?"] * 6, False)


def test_the_schema_names_what_is_called():
    function = CALCULATOR["function"]
    (name,) = function["parameters"]["properties"]
    call = json.loads(ChatSums().call.format(sum="1+2").removeprefix("<tool_call>").removesuffix("</tool_call><eos>"))
    assert call == {"name": function["name"], "arguments": {name: "1+2"}}
    environment = CalculatorTool().build(Prompt(id="p", text="x"), 0, 0)
    assert environment.tools(Prompt(id="p", text="x")) == (CALCULATOR,)


def test_a_part_of_the_demonstrations_calls():
    rows = ChatSums(sums=Sums(size=200, noise=0.5), called_share=0.25).rows()
    assert sum("turns" in row.extra for row in rows) == 50
    assert all(
        row.messages == [{"role": "user", "content": Sums(size=200).rows()[i].text[:-1]}] for i, row in enumerate(rows)
    )
    assert rows[0].response.endswith(rows[0].reference) and rows[0].extra["turns"][1] == (
        "environment",
        f">{rows[0].reference};:",
    )


def test_a_demonstration_is_the_dialogue_token_by_token(tokenizer):
    """What supervised training imitates has the ids and the mask of an episode in which the policy says the same."""
    (row, *_) = ChatSums(sums=Sums(low=100, high=999, size=10)).rows()
    shown = Encoder(tokenizer=tokenizer, max_prompt_tokens=50).demonstration(row)
    said = [text for speaker, text in row.extra["turns"] if speaker == "policy"]
    drawn = [
        tokenizer(text if text.endswith("<eos>") else text + "<eos>", add_special_tokens=False)["input_ids"]
        for text in said
    ]
    sampler = Scripted(script=lambda prefix, seed, settings: drawn[len(sampler.asked)])

    async def played():
        service = TokenService(sampler=sampler, settings=SamplingParams())
        environment, session = CalculatorTool().build(row, 0, 0), service.open(seed=0)
        task = Task(prompt=row, messages=row.messages, tools=environment.tools(row))
        return await Dialogue(service, Rendering(tokenizer)).play(environment, task, session), session

    ending, session = asyncio.run(played())
    (branch,) = session.branches()
    check_branches(session.branches(), sampler)
    assert ending.stop == "done" and ending.info["calls"] == {"ok": 1}
    np.testing.assert_array_equal(branch.prefix, shown.prompt.tokens)
    np.testing.assert_array_equal(branch.tokens, shown.tokens)
    np.testing.assert_array_equal(branch.mask, shown.mask)
    assert tokenizer.decode(branch.prefix) == f"calc {row.messages[0]['content']}:"


def test_an_environment_without_tools_offers_those_of_the_row(tokenizer):
    heard = []

    class Bare:
        def build(self, prompt, sample, seed):
            return self

        async def reset(self, task):
            heard.append(task.tools)
            return Observation()

        async def step(self, action):
            return Observation(done=True)

        async def close(self):
            pass

    row = Encoder(tokenizer=tokenizer, max_prompt_tokens=50).prompt(ChatSums(sums=Sums(size=1)).rows()[0])
    sampler = Scripted(script=lambda prefix, seed, settings: [7, tokenizer.eos_token_id])
    player = Player(
        service=TokenService(sampler=sampler, settings=SamplingParams()), tokenizer=tokenizer, environment=Bare()
    )
    rollout = asyncio.run(player.play(row, 0, SamplingParams(), 1))
    assert heard == [(CALCULATOR,)]
    # The session continues the prompt as the data was encoded.
    assert rollout.valid and rollout.branches == () and rollout.tokens.tolist() == [7, tokenizer.eos_token_id]


def test_the_tools_of_a_row_are_in_its_prompt():
    tokenizer = ByteTokenizer(
        chat_template="{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    ).load()
    row = Prompt(id="p", messages=[{"role": "user", "content": "1+2"}], extra={"tools": [CALCULATOR]})
    encoder = Encoder(tokenizer=tokenizer, max_prompt_tokens=50)
    assert tokenizer.decode(encoder.prompt(row).tokens) == "calc 1+2"
    assert tokenizer.decode(encoder.prompt(Prompt(id="p", messages=row.messages)).tokens) == "1+2"
