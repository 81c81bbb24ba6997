"""The policy and an environment talk: exact ids, masks and versions of every turn, limits, and what the environment hears."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from agents.chat_tokenizers import ADD, TEMPLATES, chat_tokenizer
from agents.scripted import Scripted, check_branches

from jaxrl_llm.agents.dialogue import Dialogue
from jaxrl_llm.agents.plain_text import PlainText
from jaxrl_llm.agents.rendering import Rendering
from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.agents.session import Ended, Session
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.experience import Action, Ending, Limits, Observation, Prompt, SamplingParams, Task

ASKED = [{"role": "user", "content": "Add up."}]
CALL = '<think>\nNext.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Speaker(Scripted):
    """A sampler that says a list of texts or ids one after the other, each as one version more; an end token stops it."""

    def __init__(self, tokenizer: Any, said: list[Any], finish: str = "") -> None:
        self.said = [
            tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text for text in said
        ]
        self.finish = finish  # of the last one
        super().__init__(script=lambda prefix, seed, settings: self.said[len(self.asked)], version=0)

    async def sample(self, prefixes, n, settings, seeds):
        self.version += 1
        async for index, (made,) in super().sample(prefixes, n, settings, seeds):
            last = self.finish and len(self.asked) == len(self.said)
            yield index, [replace(made, finish=self.finish) if last else made]

    @property
    def prompts(self) -> list[list[int]]:
        return [prefix.tolist() for prefix, _ in self.asked]


@dataclass
class Echo:
    """An environment that answers each call by its number, and ends after some turns."""

    turns: int
    first: Observation = field(default_factory=Observation)
    text: str = "Result {}"
    role: str = "tool"
    reward: float | None = None
    heard: list[Action] = field(default_factory=list)

    async def reset(self, task: Task) -> Observation:
        return self.first

    async def step(self, action: Action) -> Observation:
        self.heard.append(action)
        said = {"role": self.role, "content": self.text.format(len(self.heard)), "tool_call_id": "c"}
        return Observation(
            messages=[said], done=len(self.heard) == self.turns, reward=self.reward, info={"step": len(self.heard)}
        )

    async def close(self) -> None:
        pass


def task(**limits) -> Task:
    return Task(prompt=Prompt(id="p", text="Add up."), messages=ASKED, tools=[ADD], limits=Limits(**limits))


def play(sampler: Speaker, rendering, environment, about, **session) -> tuple[Ending, Session]:
    async def played():
        service = TokenService(sampler=sampler, settings=SamplingParams(max_tokens=200))
        opened = service.open(seed=5, **session)
        return await Dialogue(service, rendering).play(environment, about, opened), opened

    return asyncio.run(played())


def qwen3(**settings) -> Rendering:
    return Rendering(chat_tokenizer(TEMPLATES["qwen3"]), **settings)


def text_of(tokenizer, messages) -> str:
    return tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False, add_generation_prompt=True)


def test_six_turns_are_one_branch_of_exact_ids():
    rendering = qwen3()
    tokenizer = rendering.tokenizer

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    # The fourth turn is ids that no text has, the fifth is cut off.
    odd = [*tokenizer.convert_tokens_to_ids(list("assistant")), tokenizer.eos_token_id]
    assert ids(tokenizer.decode(odd)) != odd
    said = [*[ids(f"{CALL}<|im_end|>")] * 3, odd, ids(CALL), ids("Done.<|im_end|>")]
    sampler, environment = Speaker(tokenizer, said), Echo(turns=6)
    ending, session = play(sampler, rendering, environment, task(max_turns=10))
    assert ending.stop == "done"
    markup = "\n<|im_start|>user\n<tool_response>\nResult {}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    between = [ids(("<|im_end|>" if turn == 4 else "") + markup.format(turn + 1)) for turn in range(5)]

    first, wanted, mask, versions = ids(text_of(tokenizer, ASKED)), [], [], []
    for turn, sampled in enumerate(said):
        assert sampler.prompts[turn] == first + wanted
        heard = between[turn] if turn < 5 else []
        wanted += sampled + heard
        mask += [True] * len(sampled) + [False] * len(heard)
        versions += [turn + 1] * len(sampled) + [turn + 1] * len(heard)
    (branch,) = session.branches()
    assert branch.prefix.tolist() == first and branch.tokens.tolist() == wanted and branch.mask.tolist() == mask
    own = np.asarray(mask)
    assert branch.versions[own].tolist() == np.asarray(versions)[own].tolist()
    assert (branch.sampler_logprobs[own] < 0).all() and not branch.sampler_logprobs[~own].any()
    assert [turn.end - turn.start for turn in branch.turns] == [len(sampled) for sampled in said]
    assert session.metrics()["branches"] == 1 and branch.finish == "stop"
    check_branches(session.branches(), sampler)


def test_the_environment_hears_thoughts_calls_and_text_apart():
    rendering, environment = qwen3(), Echo(turns=2)
    ending, _ = play(
        Speaker(rendering.tokenizer, [f"{CALL}<|im_end|>", "<tool_call>{"], "length"), rendering, environment, task()
    )
    first, second = environment.heard
    assert (first.text, first.reasoning, first.finish) == ("", "Next.", "stop")
    assert [(c.name, c.arguments, c.status) for c in first.calls] == [("add", {"a": 1, "b": 2}, "ok")]
    assert (second.text, second.finish, second.calls[0].status) == ("<tool_call>{", "length", "unclosed")
    assert ending.info == {"step": 2, "turns": 2, "calls": {"ok": 1, "unclosed": 1}, "text/left_out": 0}


@pytest.mark.parametrize(("reward", "rewards"), [(None, {}), (0.25, {"reward": 0.5}), (0.0, {"reward": 0.0})])
def test_rewards_are_summed_and_none_is_no_reward(reward, rewards):
    rendering = qwen3()
    sampler = Speaker(rendering.tokenizer, ["a<|im_end|>"] * 2)
    assert play(sampler, rendering, Echo(turns=2, reward=reward), task())[0].rewards == rewards


def test_limits_end_the_dialogue_by_their_names():
    rendering = qwen3()
    start, turn = len(rendering.prompt(ASKED, [ADD])), len(rendering.tokenizer("a b c<|im_end|>")["input_ids"])

    def ended(session=None, **limits):
        sampler, environment = Speaker(rendering.tokenizer, ["a b c<|im_end|>"] * 9), Echo(turns=9)
        ending, _ = play(sampler, rendering, environment, task(**limits), **(session or {}))
        return ending.stop, [settings.max_tokens for settings in sampler.settings], len(environment.heard)

    assert ended(max_turns=3) == ("max_turns", [200, 200, 200], 3)
    # The second turn is cut off by the budget; the environment hears it, and nothing is sampled after it.
    assert ended(max_tokens=turn + 2) == ("max_tokens", [turn + 2, 2], 2)
    assert ended(max_length=start + 3) == ("max_length", [3], 1)
    assert ended(max_length=start) == ("max_length", [], 0)
    assert ended(max_response=3) == ("max_response", [3], 1)
    assert ended(max_response=3, max_length=start + 2) == ("max_length", [2], 1)
    # So do the limits of the session.
    assert ended({"max_tokens": turn}) == ("max_tokens", [turn], 1)
    assert ended({"max_calls": 2}) == ("max_calls", [200, 200], 2)
    assert ended({"max_length": start + 3}) == ("max_length", [3], 1)


def test_a_closed_session_is_an_error():
    rendering = qwen3()

    class Closing(Echo):
        async def step(self, action):
            self.session.close()
            return await super().step(action)

    async def played():
        service = TokenService(sampler=Speaker(rendering.tokenizer, ["a<|im_end|>"] * 2), settings=SamplingParams())
        environment = Closing(turns=9)
        environment.session = service.open(seed=1)
        await Dialogue(service, rendering).play(environment, task(), environment.session)

    with pytest.raises(Ended, match="is closed"):
        asyncio.run(played())


def test_an_aborted_completion_ends_the_dialogue_unheard():
    rendering, environment = qwen3(), Echo(turns=9)
    ending, _ = play(
        Speaker(rendering.tokenizer, ["a<|im_end|>", "b"], finish="aborted"), rendering, environment, task()
    )
    assert (ending.stop, [action.text for action in environment.heard]) == ("aborted", ["a"])


def test_a_reset_that_is_done_samples_nothing():
    rendering = qwen3()
    sampler = Speaker(rendering.tokenizer, [])
    ending, _ = play(sampler, rendering, Echo(turns=9, first=Observation(done=True, reward=1.0)), task())
    assert (ending.stop, ending.rewards, sampler.asked) == ("done", {"reward": 1.0}, [])


def test_long_texts_are_cut_in_their_middle_and_marked():
    rendering, environment = qwen3(), Echo(turns=2, text="a" * 60 + "b" * 100 + "c" * 60)
    sampler = Speaker(rendering.tokenizer, ["x<|im_end|>"] * 2)
    ending, _ = play(sampler, rendering, environment, task(most_text=120))
    heard = rendering.tokenizer.decode(sampler.prompts[1])
    assert f"<tool_response>\n{'a' * 60}\n[... 100 characters left out ...]\n{'c' * 60}\n</tool_response>" in heard
    assert ending.info["text/left_out"] == 200  # of the second result too, which no turn follows


@pytest.mark.parametrize("history", ["keep", "template"])
def test_thoughts_are_kept_or_dropped_as_the_run_says(history):
    rendering = qwen3(history=history)
    tokenizer = rendering.tokenizer
    sampler = Speaker(tokenizer, [f"{CALL}<|im_end|>", "<think>\nMore.\n</think>\n\nb<|im_end|>", "c<|im_end|>"])
    go = Observation(messages=[{"role": "user", "content": "Go."}])
    _, session = play(sampler, rendering, Echo(turns=3, role="user", first=go), task())
    shown = tokenizer.decode(sampler.prompts[2])
    check_branches(session.branches(), sampler)
    if history == "keep":
        assert len(session.branches()) == 1 and "Next." in shown and "More." in shown
    else:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        messages = [
            *ASKED, {"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", "content": "Result 1"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "Result 2"},
        ]  # fmt: skip
        assert len(session.branches()) == 3 and shown == text_of(tokenizer, messages)


def test_plain_text_has_no_marks():
    tokenizer = CharTokenizer(alphabet="0123456789+=[];").load()
    prompt = Prompt(id="p", text="47+85=", tokens=np.asarray(tokenizer("47+85=")["input_ids"], np.int32))
    about = Task(prompt=prompt, messages=[{"role": "user", "content": "47+85="}])
    sampler = Speaker(tokenizer, ["[47+85]", "132"])
    environment = Echo(turns=2, text="13{}2;", role="user")
    play(sampler, PlainText(tokenizer), environment, about)
    assert [tokenizer.decode(ids) for ids in sampler.prompts] == ["47+85=", "47+85=[47+85]1312;"]
    assert [action.text for action in environment.heard] == ["[47+85]", "132"]


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_error_of_the_environment_goes_to_the_caller(where):
    async def fail(*_):
        raise RuntimeError("no luck")

    rendering, environment = qwen3(), Echo(turns=2)
    setattr(environment, where, fail)
    with pytest.raises(RuntimeError, match="no luck"):
        play(Speaker(rendering.tokenizer, ["a"]), rendering, environment, task())
