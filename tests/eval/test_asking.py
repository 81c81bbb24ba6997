"""Several answers to one prompt: each to its own paraphrase, one after the other in a conversation, and after a system message."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.eval.asking import Asking, InContext, Paraphrases, SystemMessage
from jaxrl_llm.eval.evaluate import Evaluation
from jaxrl_llm.eval.harness import Evaluating, Harness
from jaxrl_llm.eval.instructions import Instructions
from jaxrl_llm.experience import Completion, Prompt, SamplingParams
from jaxrl_llm.models.sources import Opened
from jaxrl_llm.protocols import Params
from jaxrl_llm.samplers.embedded import EmbeddedSampler
from jaxrl_llm.train import TrainedModel

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOKENIZER = ByteTokenizer().load()
TOKENIZER.chat_template = CHATML
ASKED = Prompt(
    id="p", messages=[{"role": "user", "content": "Name a colour."}], extra={"prompt_paraphrases": ["A?", "B?"]}
)


def said(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in prompt.messages or ()]


def test_forms_are_those_of_noveltybenchs_modes() -> None:
    again = InContext().form(ASKED, ["red", "blue"])
    assert said(again) == [
        ("user", "Name a colour."), ("assistant", "red"), ("user", "Can you generate a different answer?"),
        ("assistant", "blue"), ("user", "Can you generate a different answer?"),
    ]  # fmt: skip
    assert said(InContext().form(ASKED, [])) == said(ASKED) == [("user", "Name a colour.")]
    assert [said(Paraphrases().form(ASKED, ["x"] * k)) for k in (0, 1)] == [[("user", "A?")], [("user", "B?")]]
    assert said(SystemMessage(text="Be new.").form(ASKED, ["x"])) == [("system", "Be new."), ("user", "Name a colour.")]


def test_what_cannot_be_asked_is_named() -> None:
    with pytest.raises(ValueError, match=r"'p' has 2 texts in column 'prompt_paraphrases'.*lower SAMPLES"):
        Paraphrases().form(ASKED, ["x", "y"])
    text = Prompt(id="t", text="Name a colour.")
    for asking in (InContext(), SystemMessage()):
        with pytest.raises(ValueError, match=r"'t' is a text.*template"):
            asking.form(text, [])


@dataclass
class Numbering:
    """A sampler whose answers are the numbers of its calls; it keeps what it was asked, and the seeds."""

    asked: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    version: int = 0

    async def publish(self, params: Params, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self.asked.clear()

    def metrics(self) -> Mapping[str, float]:
        return {}

    async def sample(
        self, prefixes: Sequence[np.ndarray], n: int, settings: SamplingParams, seeds: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Completion]]]:
        assert n == 1
        self.seeds += seeds
        for i in reversed(range(len(prefixes))):  # answers come in any order
            self.asked.append(TOKENIZER.decode(prefixes[i]))
            ids = np.array(TOKENIZER.encode(str(len(self.asked)), add_special_tokens=False), np.int32)
            logprobs, versions = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
            yield i, [Completion(tokens=ids, logprobs=logprobs, versions=versions, finish="stop")]


def evaluating(asking: Asking, names: Sequence[str], limit: int = 400) -> tuple[Evaluating, Numbering]:
    """An evaluation of prompts that ask for their own names, with a sampler in place of a model."""
    rows = [Prompt(id=name, messages=[{"role": "user", "content": name}]) for name in names]
    evaluation = Evaluation(name="e", data=Listed(prompts=rows), greedy=False, samples=3)
    harness = Harness(
        out_dir="", model=TrainedModel(path="m"), sampler=EmbeddedSampler(), evaluation=evaluation, max_prompt_tokens=limit, asking=asking
    )  # fmt: skip
    policy = SimpleNamespace(architecture=SimpleNamespace(vocabulary_size=10**6))
    made = Evaluating(harness, Path(), rows, Opened(policy=policy, tokenizer=TOKENIZER, params=dict, name="m"))
    made.sampler = Numbering()
    return made, made.sampler


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Prompts as they are."""

    prompts: Sequence[Prompt]

    def rows(self) -> Sequence[Prompt]:
        return self.prompts


def answers(made: Evaluating) -> dict[str, list[str]]:
    async def all_of() -> dict[str, list[str]]:
        prompts = list(made.prompts.values())
        return {
            g[0].prompt.id: [r.text for r in g] async for g in made._each(made.harness.asking, prompts, "sampled", 3)
        }

    return asyncio.run(all_of())


def test_each_answer_follows_those_before_it_and_is_a_record_of_its_own_prompt() -> None:
    made, sampler = evaluating(InContext(request="More?"), ["x", "yy"])
    # The second prompt is answered first in every round: its answers are 1, 3 and 5.
    assert answers(made) == {"x": ["2", "4", "6"], "yy": ["1", "3", "5"]}
    assert sampler.asked == [
        "<user>yy<assistant>", "<user>x<assistant>",
        "<user>yy<assistant>1<user>More?<assistant>", "<user>x<assistant>2<user>More?<assistant>",
        "<user>yy<assistant>1<user>More?<assistant>3<user>More?<assistant>",
        "<user>x<assistant>2<user>More?<assistant>4<user>More?<assistant>",
    ]  # fmt: skip
    assert len(set(sampler.seeds)) == 6  # every answer draws anew
    assert made.encoder.counts()["rows"] == 2  # the forms are no rows of the data set


def test_a_conversation_that_outgrows_the_prompt_is_an_error() -> None:
    made, _ = evaluating(InContext(request="More?" * 10), ["x"], limit=60)
    with pytest.raises(ValueError, match="'x' is longer than 60 tokens after 1 answers: raise PROMPT_LIMIT"):
        answers(made)


def test_the_real_prompts_have_ten_paraphrases_each(real_data) -> None:
    path = str(real_data / "novelty_bench" / "curated.jsonl")
    prompts = Instructions(path=path, split="curated", keep=("prompt_paraphrases",)).rows()
    assert len(prompts) == 100
    row = json.loads((real_data / "novelty_bench" / "curated.jsonl").read_text().splitlines()[0])
    assert [said(Paraphrases().form(prompts[0], ["x"] * k))[0][1] for k in range(10)] == row["prompt_paraphrases"]
    with pytest.raises(ValueError, match=r"Instructions\.keep"):
        Instructions(path=path, split="curated", keep=("absent",)).rows()
