"""Fenced blocks of Python are run in one interpreter of the rollout, and what they print is told until there is an answer."""

import asyncio
import sys
from dataclasses import replace

import numpy as np
import pytest
from builders import make_group
from environments.players import MADE, SETTINGS, asked, played
from environments.test_tools import PROMPT, contents

from jaxrl_llm import command_line
from jaxrl_llm.data.templates import named
from jaxrl_llm.environments.code_blocks import BLOCK, CodeBlocks
from jaxrl_llm.environments.python_tool import Python
from jaxrl_llm.experience import Action, Observation
from jaxrl_llm.metrics.trajectories import of_groups
from jaxrl_llm.samplers.requests import stop_length

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone")


def turns(*texts: str, **settings) -> list[Observation]:
    """The observations of one rollout that takes these turns."""

    async def play() -> list[Observation]:
        environment = CodeBlocks(python=Python(cell_s=20.0), **settings).build(PROMPT, 0, 1)
        try:
            return [await environment.step(Action(text=text)) for text in texts]
        finally:
            await environment.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("So:\n```python\nx = 1\nprint(x)\n```\nDone.", ["x = 1\nprint(x)\n"]),
        ("```py\n1\n```\n```python \n2\n```  \n```\n3\n```\n```js\n4\n```", ["1\n", "2\n"]),
        ("```python\nprint('```')\n```", ["print('```')\n"]),
        ("```python\nx = 1", []),
        ("Write ```python x``` or ```python\n", []),
    ],
)
def test_whole_blocks_of_python_are_found(text: str, blocks: list[str]):
    assert [found[1] for found in BLOCK.finditer(text)] == blocks


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_blocks_share_an_interpreter_and_errors_are_told():
    first, second, third = turns(
        "```python\ncows = 3\n```\nand\n```python\ncows + 4\n```",
        "```python\nprint(cows * 2)\n```\n" * 2 + "```python\n1/0\n```",
        "It is \\boxed{7}.",
        most_blocks=2,
    )
    assert contents(first) == ["Output:\n(no output)\n7"] and not first.done
    assert contents(second) == ["Output:\n6\n6\nerror: at most 2 blocks of one turn are run"]
    assert second.messages[0]["role"] == "user" and third.done and not third.messages
    (failed,) = turns("```python\n1/0\n```")
    assert contents(failed)[0].endswith("division by zero") and failed.info == {"blocks": 1, "failed_blocks": 1}


def test_a_turn_with_its_answer_after_its_blocks_is_the_last_and_runs_nothing():
    answered, bare = turns("```python\nraise SystemExit\n```\nso \\boxed{7}", "7")
    assert answered.done and bare.done and answered.info == {"blocks": 0, "failed_blocks": 0}


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_a_dialogue_goes_on_from_what_a_block_printed():
    factory = CodeBlocks(python=Python(cell_s=20.0))
    texts = ["```python\nprint(47 + 85)\n```", "So it is \\boxed{132}."]
    found = played(asked("47 + 85?"), texts, environment=factory)
    assert found.valid, found.error
    assert "Output:\n132" in found.text and found.text.rstrip().endswith("\\boxed{132}.") and found.finish == "stop"
    told = found.tokens[~found.mask]
    assert len(found.turns) == 2 and len(told) > 0


RECIPE = ["gin/agents/gsm8k_python_blocks.gin"]
TALK = "I compute it.\n```python\nprint(47 + 85)\n```\nThe output is 131, so \\boxed{131}."


def recipe(folder):
    """The stage of the recipe, on one row."""
    (folder / "train.jsonl").write_text('{"question": "47 + 85?", "answer": "#### 132"}\n')
    (folder / "test.jsonl").write_text('{"question": "47 + 85?", "answer": "#### 132"}\n')
    given = [f"PRETRAINED={str(folder)!r}", f"GSM8K_PATH={str(folder)!r}", "SANDBOX='http://127.0.0.1:8001'"]
    (stage,) = command_line.build(RECIPE, given)[0].stages
    return stage


@LINUX
@pytest.mark.xdist_group("sandbox")
def test_the_recipe_stops_at_the_end_of_a_block_and_goes_on_from_what_it_printed(tmp_path):
    """A policy that says an answer right after its block: with the recipe's stop string it hears the output first."""
    factory, stops = CodeBlocks(python=Python(cell_s=20.0)), recipe(tmp_path).settings.stop_strings
    texts = [TALK, "So it is \\boxed{132}."]
    without = played(asked("47 + 85?"), texts, environment=factory)
    assert len(without.turns) == 1 and without.info["blocks"] == 0
    found = played(asked("47 + 85?"), texts, environment=factory, settings=replace(SETTINGS, stop_strings=stops))
    assert found.valid, found.error
    first, last = (MADE.tokenizer.decode(found.tokens[turn.start : turn.end]) for turn in found.turns)
    assert first == TALK[: TALK.index("The output")] and last.startswith("So it is")
    assert (found.info["blocks"], found.info["failed_blocks"]) == (1, 0) and "Output:\n132" in found.text


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (["Hm:", "\n```", "python\n", "1\n", "```", "\n", "So", " 1"], 6),
        (["```python\n", "1", "\n```\n\n", "So"], 3),  # a token that holds more than the stop string
        (["```python\n", "print('```')", "\n", "```"], None),  # the model ends its turn itself
        (["a\n", "```python", "\n", "```x", "\n"], None),
    ],
)
def test_the_stop_string_of_the_recipe_is_the_end_of_a_block_alone(tokens, kept, tmp_path):
    """By the rule of the samplers, which keep the tokens of a stop string; what is kept holds a whole block."""
    settings = recipe(tmp_path).settings
    decode = lambda ids: "".join(tokens[i] for i in ids)  # noqa: E731
    assert stop_length(np.arange(len(tokens)), 0, settings.stop_strings, 0, decode) == kept
    assert kept is None or len(BLOCK.findall("".join(tokens[:kept]))) == 1


def test_evaluation_stops_as_training_does(tmp_path):
    stage = recipe(tmp_path)
    evaluated = stage.evaluations[0].settings
    assert evaluated.stop_strings == stage.settings.stop_strings == ("\n```\n",)
    assert stage.settings.greedy().stop_strings == stage.settings.stop_strings


def test_blocks_are_counted_a_rollout():
    group = [
        replace(r, info={**r.info, "blocks": n, "failed_blocks": 1}) for n, r in ((1, _rollout()), (4, _rollout()))
    ]
    metrics = of_groups([make_group(group, {"x": [0, 1]})])
    assert (metrics["trajectory/blocks"], metrics["trajectory/failed_blocks"]) == (2.5, 1.0)


def _rollout():
    return played(asked("7?"), ["7"], environment=CodeBlocks(answer=""))


def test_wrong_settings_are_refused_and_the_template_says_what_is_run():
    with pytest.raises(ValueError, match="told"):
        CodeBlocks(told="Output")
    with pytest.raises(ValueError, match="most_blocks"):
        CodeBlocks(most_blocks=0)
    (message,) = named("chat_boxed_blocks", "test")("How many?")
    assert message["content"].startswith("How many?\n") and "```python" in message["content"]


def test_the_recipe_asks_for_blocks_and_runs_them(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    given = [f"PRETRAINED={str(tmp_path)!r}", f"GSM8K_PATH={str(tmp_path)!r}", "SANDBOX='http://127.0.0.1:8001'"]
    run, _ = command_line.build(["gin/agents/gsm8k_python_blocks.gin"], given)
    (stage,) = run.stages
    assert stage.environment.python.url == "http://127.0.0.1:8001" and stage.max_turns == 4
    assert "```python" in stage.data.rows()[0].messages[0]["content"]
