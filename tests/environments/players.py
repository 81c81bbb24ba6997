"""Plays rollouts of agents and environments over a scripted policy."""

import asyncio
from collections.abc import Sequence
from typing import Any

from agents.gateways import rendering, speaks

from jaxrl_llm.agents.service import TokenService
from jaxrl_llm.experience import Limits, Prompt, Rollout, SamplingParams
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.rollouts.player import Player

SETTINGS = SamplingParams(max_tokens=2000)
MADE = rendering()


def asked(text: str, **more: Any) -> Prompt:
    """A prompt of one message, encoded."""
    messages = [{"role": "user", "content": text}]
    return Prompt(id="p", messages=messages, tokens=MADE.prompt(messages), **more)


def call(name: str, arguments: str) -> str:
    """What the policy says to call a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def play(
    prompt: Prompt, texts: Sequence[str], count: int = 1, limits: Limits | None = None, settings: SamplingParams = SETTINGS, **built: Any
) -> list[Rollout]:  # fmt: skip
    """Plays `count` rollouts of a prompt at a time, of an `environment` or an `agent`; the policy says the texts, one after the other."""
    service = TokenService(speaks(MADE, texts), settings)
    config = Episodes(limits=limits or Limits())
    player = Player(service=service, tokenizer=MADE.tokenizer, config=config, max_prompt_tokens=4000, **built)
    try:
        return await asyncio.gather(*(player.play(prompt, i, settings, seed=100 + i) for i in range(count)))
    finally:
        await player.close()


def played(prompt: Prompt, texts: Sequence[str], **more: Any) -> Rollout:
    """One rollout, played by itself."""
    (found,) = asyncio.run(play(prompt, texts, **more))
    return found
