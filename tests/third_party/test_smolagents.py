"""smolagents: its agents finish; the history that one rewrites forks, and each sampled token is learned from once."""

import asyncio

import pytest
from agents.gateways import rendering, speaks, talking
from agents.scripted import check_branches

smolagents = pytest.importorskip(
    "smolagents", reason="smolagents is not installed: see tests/third_party/requirements.txt"
)

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3"}}\n</tool_call>'
CODE = ["Thought: I add.\n<code>\nx = 1 + 2\nprint(x)\n</code>", "Thought: I know.\n<code>\nfinal_answer(x)\n</code>"]


def played(texts, build, stream=False):
    """What an agent answers, and its session."""
    made = rendering()

    async def main():
        sampler = speaks(made, texts)
        async with talking(sampler, made) as talk:
            point = talk.gateway.endpoint(talk.session)
            model = smolagents.OpenAIModel(model_id=point.model, api_base=point.base_url, api_key=point.key)
            agent = build(model, stream_outputs=stream)
            answer = await asyncio.to_thread(agent.run, "What is 1 + 2?")
            branches = talk.session.branches()
            check_branches(branches, sampler)
            assert sum(int(b.mask.sum()) for b in branches) == sum(len(done.tokens) for _, done in sampler.asked)
            return answer, talk.session, branches

    return asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_calling_agent_forks_where_it_rewrites_the_history(stream):
    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    answer, session, branches = played(
        [ADD, ANSWER],
        lambda model, **more: smolagents.ToolCallingAgent([add], model, max_steps=4, verbosity_level=0, **more),
        stream,
    )
    assert answer == "3" and len(session.calls) == len(branches) == 2
    assert session.ignored == {"tool_choice": 2} and session.counters == {"fork/answer": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_code_agent_adds_its_calls_to_the_answer_and_forks(stream):
    answer, session, branches = played(
        CODE, lambda model, **more: smolagents.CodeAgent([], model, max_steps=4, verbosity_level=0, **more), stream
    )
    assert answer == 3 and len(session.calls) == 2
    assert len(branches) == 2 and session.counters == {"fork/answer": 1}
