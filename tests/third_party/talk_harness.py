"""A harness of verifiers within its own process and without tools, for machines where `uv` cannot fetch what the harness `null` runs."""

import openai
import verifiers.v1 as vf
from verifiers.v1.clients.train import message_to_wire
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TalkHarness"]


class TalkHarness(vf.Harness[HarnessConfig]):
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
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(0, "", "")
