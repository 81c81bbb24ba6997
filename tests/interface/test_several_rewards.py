"""Several rewards with weights, from Python, from one word of a shell and from gin, are the same run."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxrl_llm as rl
from jaxrl_llm import command_line
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.interface import several_rewards
from jaxrl_llm.interface.commands import _flags as flags
from jaxrl_llm.interface.python_run import judged_by
from jaxrl_llm.interface.several_rewards import Part
from jaxrl_llm.rewards.exact import Exact
from jaxrl_llm.rewards.format import Format
from jaxrl_llm.rewards.function import Function
from jaxrl_llm.rewards.maths import Maths
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.train.run import Run

FUNCTIONS = """
def right(prompt, text, answer):
    return text == answer


def short(prompt, text):
    return -len(text)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, in which graders.py and my.jsonl lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("graders.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(20)]
    Path("my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    sys.modules.pop("graders", None)


def scores(reward: Weighted, *texts: str) -> Scores:
    prompt, none = (
        Prompt(id="p", messages=[{"role": "user", "content": "3 + 1 ="}], reference="4", extra={"answer": "4"}),
        np.zeros(0),
    )
    made = [
        Rollout(prompt=prompt, tokens=none, sampler_logprobs=none, mask=none, versions=none, finish="stop", text=text)
        for text in texts
    ]
    return asyncio.run(reward.score(made))


def built(files: list[str], bindings: list[str]) -> Run:
    return command_line.build(files, bindings)[0]


def of_shell(word: str) -> Run:
    given = flags(["model=tiny", "data=my.jsonl", "steps=2", "run_dir=runs/x", word], cpu=True)
    files = [flag.partition("=")[2] for flag in given if flag.startswith("--gin_file=")]
    return built(files, [flag.partition("=")[2] for flag in given if flag.startswith("--gin=")])


def test_python_a_shell_and_the_config_build_the_same_run(folder):
    import graders

    settings = {"model": "tiny", "data": "my.jsonl", "steps": 2, "run_dir": "runs/x"}
    ways = [
        {"right": graders.right, "short": (graders.short, 0.1)},
        [graders.right, (graders.short, 0.1)],
        {"right": "graders.py:right", "short": ("graders.py:short", 0.1)},
    ]
    runs = [rl.grpo(reward=way, **settings) for way in ways]
    shells = [
        "reward=graders.py:right*1.0,graders.py:short*0.1",
        "reward=graders.py:right, short=graders.py:short*1e-1",
        "reward={'right': 'graders.py:right', 'short': ('graders.py:short', 0.1)}",
    ]
    wanted = Weighted(
        parts={
            "right": Function(function=graders.right, name="right"),
            "short": Function(function=graders.short, name="short"),
        },
        weights={"right": 1.0, "short": 0.1},
    )
    Path("config.gin").write_text(runs[0].config)
    for run in [*(run.run for run in runs), *map(of_shell, shells), built(["config.gin"], [])]:
        (stage,) = run.stages
        assert stage.reward == wanted and run == runs[0].run
        assert [evaluation.name for evaluation in stage.evaluations] == ["heldout"]
        found = scores(stage.reward, "4", "four")
        assert {name: values.tolist() for name, values in found.parts.items()} == {"right": [1, 0], "short": [-1, -4]}
        assert found.weights == {"right": 1.0, "short": 0.1}


def test_the_packages_rewards_are_parts_too_and_may_be_sums_themselves(folder):
    (stage,) = of_shell("reward=exact,graders.py:short*0.5,form=r1_zero*2").stages
    assert stage.reward.parts["exact"] == Exact() and stage.reward.weights == {"exact": 1.0, "short": 0.5, "form": 2.0}
    assert stage.reward.parts["form"] == Weighted(
        parts={"maths": Maths(), "format": Format(pattern=r".*</think>\s*<answer>.*</answer>")},
        weights={"maths": 1.0, "format": 0.1},
    )


def test_a_gin_file_of_the_users_and_a_reference_are_parts(folder):
    Path("brief.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom jaxrl_llm.rewards import function\n"
        "REWARD = @function.Function()\nfunction.Function.function = 'graders.py:short'\n"
    )
    (stage,) = of_shell("reward=brief.gin,same=@exact.Exact()*0").stages
    assert stage.reward.weights == {"brief": 1.0, "same": 0.0} and stage.reward.parts["same"] == Exact()
    assert scores(stage.reward, "four").parts["brief"].tolist() == [-4]


def test_a_single_reward_stays_what_it_is(folder):
    import graders

    assert not any(map(several_rewards.parts, ("exact", "graders.py:short", "@exact.Exact()", graders.short)))
    Path("a,b.gin").write_text("")
    assert several_rewards.parts("a,b.gin") == []
    assert several_rewards.parts("graders.py:short*0.5") == [Part(name="short", reward="graders.py:short", weight=0.5)]
    assert several_rewards.parts((graders.short, 0.5)) == [Part(name="short", reward=graders.short, weight=0.5)]


def test_functions_of_a_script_are_kept_together(folder, monkeypatch):
    import graders

    for function in (graders.right, graders.short):
        monkeypatch.setattr(function, "__module__", "__main__")
    monkeypatch.setattr(graders, "__name__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", graders)
    run = rl.grpo(
        model="tiny", data="my.jsonl", steps=2, run_dir="runs/y",
        reward={"a": graders.right, "b": (graders.short, 0.25), "c": "exact"},
    )  # fmt: skip
    (stage,) = run.run.stages
    assert [path.name for path in Path("runs/y").glob("*.py")] == ["rewards.py"]
    assert {name: values.tolist() for name, values in scores(stage.reward, "4").parts.items()} == {
        "a": [1],
        "b": [-1],
        "c": [1],
    }


WRONG = {
    "a.py:f,b.py:f": "two parts are named 'f'",
    "a.py:f*x": "'x' in 'a.py:f\\*x' is no weight",
    "a.py:f*nan": "a weight must be finite",
    "a.py:f,": "'' is no reward with a weight",
    "log=a.py:f,exact": "'log' cannot name a part",
    "exact,mathz": "mathz is no gin file.*near it are maths",
    "{'a': 0.5}": "0.5 is no function",
    "{'a': ('exact', 'much')}": "'much' is no weight",
    "{}": "there is no part",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_sum_of_rewards_is_refused_with_the_forms(wrong, folder):
    with pytest.raises(ValueError, match=WRONG[wrong]) as refused:
        of_shell(f"reward={wrong}")
    assert "reward=FILE.py:NAME,FILE.py:OTHER*0.1" in str(refused.value) or "mathz" in wrong


def test_an_evaluation_takes_several_rewards(folder):
    reward = judged_by({"right": "graders.py:right", "long": ("graders.py:short", -1)})
    assert scores(reward, "four").weights == {"right": 1.0, "long": -1.0}
    with pytest.raises(ValueError, match="'exact' is no function"):
        judged_by({"right": "exact"})
