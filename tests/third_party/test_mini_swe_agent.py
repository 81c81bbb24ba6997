"""mini-swe-agent's DefaultAgent with its bash tool: two turns are one branch of the very tokens."""

import asyncio

import pytest
from agents.gateways import rendering, speaks, talking
from agents.scripted import check_branches

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: see tests/third_party/requirements.txt")

FIRST = 'I run it.\n<tool_call>\n{"name": "bash", "arguments": {"command": "echo hi"}}\n</tool_call>'
LAST = (
    "Done.\n<tool_call>\n"
    '{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo yes"}}\n</tool_call>'
)


def test_two_turns_are_one_branch(tmp_path, monkeypatch):
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    made = rendering()

    async def main():
        sampler = speaks(made, [FIRST, LAST])
        async with talking(sampler, made) as talk:
            point = talk.gateway.endpoint(talk.session)
            model = LitellmModel(
                model_name=f"openai/{point.model}", cost_tracking="ignore_errors",
                model_kwargs={"api_base": point.base_url, "api_key": point.key},
            )  # fmt: skip
            agent = DefaultAgent(
                model, LocalEnvironment(cwd=str(tmp_path)), system_template="You solve tasks.", instance_template="Task: {{ task }}",
                step_limit=4,
            )  # fmt: skip
            ended = await asyncio.to_thread(agent.run, "Say hi.")
            assert ended["exit_status"] == "Submitted" and ended["submission"].strip() == "yes"
            assert len(sampler.asked) == 2
            (prompt, done), (again, _) = sampler.asked
            assert again[: len(prompt) + len(done.tokens)].tolist() == [*prompt, *done.tokens]
            branches = talk.session.branches()
            check_branches(branches, sampler)
            assert len(branches) == 1 and len(branches[0].turns) == 2 and not talk.session.counters
            assert "<tool_response>\n" in made.tokenizer.decode(branches[0].tokens)

    asyncio.run(main())
