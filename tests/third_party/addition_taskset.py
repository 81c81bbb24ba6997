"""A taskset of verifiers: additions, played by a harness within this process that has one tool."""

import json
from collections.abc import Iterator

import openai
import verifiers.v1 as vf
from verifiers.v1.clients.train import message_to_wire
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["AdditionHarness", "AdditionTaskset"]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class AdditionData(vf.TaskData):
    answer: int


class AdditionTask(vf.Task[AdditionData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, task: AdditionData, trace: vf.Trace) -> float:
        said = [node.message.content or "" for node in trace.nodes if node.sampled]
        return float(bool(said) and str(task.answer) in said[-1])


class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self) -> Iterator[AdditionTask]:
        for a, b in ((47, 85), (3, 4)):
            yield AdditionTask(AdditionData(prompt=f"What is {a}+{b}?", answer=a + b), self.config.task)


class AdditionHarness(vf.Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
        )
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(3):
                done = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[ADD])
                said = done.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or ():
                    given = json.loads(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
                if not said.tool_calls:
                    break
        return ProgramResult(0, "", "")
