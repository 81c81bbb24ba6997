"""A chat with a calculator by the gateway is the same to the learner as the dialogue that the run itself holds."""

import numpy as np
import pytest
from environments import calculator_agent
from environments.players import asked, call, played

from jaxrl_llm.data.chat_sums import CALCULATOR
from jaxrl_llm.environments.calculator_tool import CalculatorTool
from jaxrl_llm.environments.coroutine import Coroutine

SAID = {
    "a call and an answer": [call("calc", '{"of": "47+85"}'), "132"],
    "two calls, one of them wrong": [call("calc", '{"of": 3}'), call("calc", '{"of": "47+85"}'), "It is 132."],
    "a call that cannot be read": ['<tool_call>{"name": "calc", "arg</tool_call>', "132"],
    "a call that does not end": ['<tool_call>{"name": "calc", "arguments": {"of": "47+', "132"],
    "no call": ["132"],
}


@pytest.mark.parametrize("name", SAID)
def test_an_agent_by_the_gateway_and_the_dialogue_leave_the_same_tokens_and_masks(name: str) -> None:
    prompt = asked("47+85", extra={"tools": [CALCULATOR]})
    dialogue = played(prompt, SAID[name], environment=CalculatorTool())
    outside = played(prompt, SAID[name], agent=Coroutine(function=calculator_agent.play))
    assert dialogue.valid and outside.valid and ("132" in dialogue.text.rpartition("tool_response")[2])
    ((mine,), (other,)) = dialogue.branches, outside.branches  # one each: its prompt has the tool's schema
    assert mine.finish == other.finish == "stop" and mine.mask.all() == (name == "no call")
    for part in ("prefix", "tokens", "mask", "sampler_logprobs", "versions"):
        np.testing.assert_array_equal(getattr(mine, part), getattr(other, part), err_msg=part)
    assert dialogue.text == outside.text
