"""A whole evaluation of a tiny random model through its gin file: resumed, guarded, planned."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import write_model, write_sums

from jaxrl_llm import command_line
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.eval.harness import Harness
from jaxrl_llm.eval.results import apart, described
from jaxrl_llm.experience import Rollout, Scores
from jaxrl_llm.protocols import Down
from jaxrl_llm.rewards.endpoint import ChatEndpoint
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.tools.planning.run_plan import plan

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for the end of the process: nothing in the harness may catch it."""


@dataclass(frozen=True, kw_only=True)
class Graded:
    """1 where the response has an "e"; may end the process, or fail, at its `stop`-th group, or be down from `down` on."""

    needs_stats = False

    stop: int = -1
    fails: bool = False
    down: int = -1
    calls: list[int] = field(default_factory=list, repr=False, compare=False)
    together: list[int] = field(default_factory=list, repr=False, compare=False)

    async def score(self, rollouts: Sequence[Rollout], stats: Any = None) -> Scores:
        self.calls.append(len(rollouts))
        begun = len(self.calls)
        await asyncio.sleep(0)
        self.together.append(len(self.calls) - begun)  # others that began meanwhile
        if begun == self.stop:
            raise Killed
        if 0 < self.down <= begun:
            raise Down("no judge")
        values = np.array(["e" in r.text for r in rollouts], np.float64)
        return Scores(parts={"has_e": values}, valid={"has_e": np.full(len(rollouts), not self.fails)})

    def __repr__(self) -> str:
        return "Graded()"


class Waiting(Graded):
    """Wants statistics that only a learner has."""

    needs_stats = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the model and six questions."""
    place = tmp_path_factory.mktemp("evaluation")
    write_model(place / "model")
    write_sums(place / "sums.jsonl")
    return place


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Eight simulated devices would spend the test's time on collectives."""
    create = Partitioner.create.__func__
    monkeypatch.setattr(
        Partitioner, "create", classmethod(lambda cls, *_: create(cls, MeshConfig(), jax.devices()[:1]))
    )


def built(folder, out, reward=None, *more):
    values = {
        "MODEL_PATH": str(folder / "model"),
        "DATA_PATH": str(folder / "sums.jsonl"),
        "OUT_DIR": str(out),
        "NAME": "sums",
        "SAMPLES": 4,
        "RESPONSE_LIMIT": 8,
        "PROMPT_LIMIT": 128,
    }
    bindings = [*(f"{n} = {v!r}" for n, v in values.items()), *more]
    harness, config = command_line.build([str(ROOT / "gin" / "eval" / "maths.gin")], bindings)
    assert isinstance(harness, Harness)
    if reward is not None:
        harness = replace(harness, evaluation=replace(harness.evaluation, reward=reward))
    return harness, config


def lines(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def summary(out):
    found = json.loads((out / "summary.json").read_text())
    return {n: v for n, v in found.items() if n not in ("throughput", "gin")}


def test_a_killed_evaluation_goes_on_without_duplicates_to_the_same_summary(folder, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    harness, config = built(folder, whole, Graded())
    harness.run(config)
    assert len(lines(whole)) == 6 * (1 + 4)

    harness, config = built(folder, out, Graded(stop=9))
    with pytest.raises(Killed):
        harness.run(config)
    before = lines(out)
    assert 0 < len(before) < 30 and not (out / "summary.json").exists()
    # What a kill in the middle of a write leaves: a group short of a sample, and half a line.
    missing = next(r for r in lines(whole) if (r["id"], r["kind"]) not in {(b["id"], b["kind"]) for b in before})
    with (out / "samples.jsonl").open("a") as file:
        file.write(json.dumps(missing) + "\n" + json.dumps(before[0])[:40])

    again = Graded()
    harness, config = built(folder, out, again)
    harness.run(config)
    after = lines(out)
    assert after[: len(before)] == before
    assert len({(r["id"], r["kind"], r["sample"]) for r in after}) == len(after) == 30
    assert sum(again.calls) == 30 - len(before)
    key = lambda r: (r["id"], r["kind"], r["sample"])  # noqa: E731
    assert sorted(after, key=key) == sorted(lines(whole), key=key)
    assert summary(out) == summary(whole)
    printed = capsys.readouterr().out
    assert f"{len(before)} of them here already" in printed and "sums 30/30, score 0." in printed

    once_more = Graded()
    built(folder, out, once_more)[0].run(config)
    assert not once_more.calls and lines(out) == after


def test_the_summary_holds_what_the_records_say_and_what_made_them(folder, tmp_path):
    harness, config = built(folder, tmp_path, Graded())
    harness.run(config)
    found, rows = json.loads((tmp_path / "summary.json").read_text()), lines(tmp_path)
    greedy = np.array([r["score"] for r in rows if r["kind"] == "greedy"])
    sampled = {i: [r["score"] for r in rows if r["kind"] == "sampled" and r["id"] == f"sums/{i}"] for i in range(6)}
    metrics = found["metrics"]
    assert metrics["greedy"] == pytest.approx(greedy.mean())
    assert found["ci95"]["greedy"] == pytest.approx(1.96 * greedy.std(ddof=1) / 6**0.5)
    assert metrics["avg@4"] == metrics["sampled"] == metrics["pass@1"] == pytest.approx(np.mean(list(sampled.values())))
    assert metrics["pass@4"] == pytest.approx(np.mean([max(group) for group in sampled.values()]))
    assert found["n"]["maj@4"] == 6
    assert sum(c["count"] for c in found["category_breakdown"].values()) == found["total_examples"] == 6
    assert found["aggregate_metrics"]["answer_reward"] == pytest.approx(greedy.mean())
    assert found["sampling"]["settings"]["max_tokens"] == 8 and found["sampling"]["sampled"] == 4
    assert "questions.Questions.path" in found["gin"] and len(found["model"]["hash"]) == 64
    assert found["throughput"]["responses"] == 30 and found["throughput"]["tokens"] == sum(r["tokens"] for r in rows)
    assert [r["reference"] for r in rows if r["kind"] == "greedy" and r["id"] == "sums/3"] == ["6"]


def test_invalid_grades_are_graded_again_from_the_recorded_texts(folder, tmp_path):
    harness, config = built(folder, tmp_path, Graded(fails=True))
    harness.run(config)
    assert summary(tmp_path)["metrics"] | {"greedy": None, "sampled_invalid": 24.0} == summary(tmp_path)["metrics"]
    before = lines(tmp_path)
    harness, config = built(folder, tmp_path, Graded(down=4))
    with pytest.raises(Down, match="no judge"):
        harness.run(config)
    assert sum(r["score"] is not None for r in lines(tmp_path)) == sum(harness.evaluation.reward.calls[:3]), (
        "they are kept"
    )
    harness, config = built(folder, tmp_path, Graded())
    harness.run(config)
    assert max(harness.evaluation.reward.together) > 3, "several at a time"
    after = lines(tmp_path)
    assert [r["score"] for r in after] == [float("e" in r["response"]) for r in before]
    assert [(r["response"], r["tokens"]) for r in after] == [(r["response"], r["tokens"]) for r in before]
    assert "sampled_invalid" not in summary(tmp_path)["metrics"]


def test_responses_outlive_a_judge_that_is_down_and_are_graded_later(folder, tmp_path):
    harness, config = built(folder, tmp_path, Graded(down=3), "SAMPLES = 0")
    with pytest.raises(Down, match="no judge"):
        harness.run(config)
    before = lines(tmp_path)
    assert [bool(r["scores"]) for r in before][:3] == [True, True, False] and not (tmp_path / "summary.json").exists()
    harness, config = built(folder, tmp_path, Graded(), "SAMPLES = 0")
    harness.run(config)
    after = lines(tmp_path)
    assert [(r["id"], r["response"], r["tokens"], r["streams"]) for r in after][: len(before)] == [
        (r["id"], r["response"], r["tokens"], r["streams"]) for r in before
    ]
    assert len(after) == 6 and all(r["score"] == float("e" in r["response"]) for r in after)
    assert all("".join(r["streams"]["token"]).startswith(r["response"][:1]) for r in after)
    assert [len(r["streams"]["sampler_logprob"]) for r in after] == [r["tokens"] for r in after]


def test_results_of_another_configuration_are_refused_and_kept(folder, tmp_path):
    harness, config = built(folder, tmp_path, Graded())
    harness.run(config)
    before = (tmp_path / "samples.jsonl").read_bytes()
    harness, config = built(folder, tmp_path, Graded(), "TEMPERATURE = 0.5")
    with pytest.raises(ValueError, match=r"another configuration \(settings was .*set OUT_DIR"):
        harness.run(config)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_results_depend_on_the_judge_and_not_on_where_it_is():
    def judge(url, model="judge", cache="", **limits):
        asked = ChatEndpoint(service=Service(urls=(url,), **limits), model=model, cache=cache)
        return Weighted(parts={"quality": Judge(endpoint=asked)})

    here = described(judge("http://127.0.0.1:1"))
    assert here == described(judge("http://10.0.0.1:2", cache="elsewhere", limit_s=5.0)) and "judge" in here
    assert here != described(judge("http://127.0.0.1:1", model="another"))
    assert described(object()) == "<object object>"


def test_what_differs_of_long_texts_is_shown_alone():
    one, two = apart("a" * 900 + "x" + "b" * 900, "a" * 900 + "y" + "b" * 900)
    assert one == "..." + "a" * 30 + "x" + "b" * 89 and two == "..." + "a" * 30 + "y" + "b" * 89
    assert apart("short", "other") == ("short", "other")


def test_bad_input_is_named(folder, tmp_path):
    harness, _ = built(folder, tmp_path / "a", None, "MODEL_PATH = 'nowhere'")
    with pytest.raises(FileNotFoundError, match="'nowhere' is no folder"):
        harness.run("")
    harness, _ = built(folder, tmp_path / "b", None, "questions.Questions.question = ('ask',)")
    with pytest.raises(ValueError, match=r"sums.jsonl:1: none of the columns \['ask'\].*\['answer', 'problem'\]"):
        harness.run("")
    harness, _ = built(folder, tmp_path / "c", Graded(), "PROMPT_LIMIT = 4")
    with pytest.raises(ValueError, match="none of 6 prompts fits in 4 tokens"):
        harness.run("")
    harness, _ = built(folder, tmp_path / "long", None, "RESPONSE_LIMIT = 2000")
    for refuses in (harness.run, lambda: plan(harness)):
        with pytest.raises(
            ValueError, match=r"128 tokens with a response of 2000 is more than the .* lower PROMPT_LIMIT or R"
        ):
            refuses()
    assert not (tmp_path / "long" / "samples.jsonl").exists()
    harness, _ = built(folder, tmp_path / "c", Waiting())
    with pytest.raises(ValueError, match="no learner to give Waiting its statistics"):
        harness.run("")
    harness, _ = built(folder, tmp_path / "d", None, "STEP = 3")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        harness.run("")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / "model" / name).read_bytes())
    harness, _ = built(folder, tmp_path / "e", None, f"MODEL_PATH = {str(bare)!r}")
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        harness.run("")


def test_the_plan_says_what_would_be_asked(folder, tmp_path):
    text = plan(built(folder, tmp_path / "out")[0])
    assert "sampled    4 a prompt = 24 responses" in text and "sums: 6 prompts by Questions" in text
    assert "prompt <= 128, response <= 8 tokens" in text and "Qwen3, 0.0" in text
    # Keys and values of 1 layer and 1 head of 8, and 4 copies of the logits of 260 tokens, in float32, on the one device of the mesh.
    gib = 32 * (2 * 136 * 8 * 4 + 4 * 260 * 4) / 2**30
    assert "fsdp 1 x expert 1 x tensor 1" in text and f"slots      32 of 136 tokens take {gib:.3g} GiB a device" in text
    assert not (tmp_path / "out").exists()
