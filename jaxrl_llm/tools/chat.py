"""Chats with a model on the terminal: python -m jaxrl_llm.tools.chat DIR, where DIR is a Hugging Face folder or a run folder."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.data.tokenizer import ids, with_stop_ids
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.train.load import TrainedModel


def load(folder: Path) -> tuple[Any, Any, Any]:
    """Loads the policy, its parameters and the tokenizer of a run folder or a Hugging Face folder."""
    opened = TrainedModel(path=str(folder)).open(Partitioner.create(MeshConfig()))
    return opened.policy, opened.params(), opened.tokenizer


def prefix(tokenizer: Any, turns: list[dict[str, str]]) -> np.ndarray:
    """Returns token ids int32 [T] of the conversation so far; without a chat template, of the last line only."""
    if tokenizer.chat_template is None:
        return ids(tokenizer, turns[-1]["content"], special=True)
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return ids(tokenizer, text, special=False)


async def answer(sampler: Any, tokens: np.ndarray, settings: SamplingParams, seed: int) -> np.ndarray:
    """Samples a response, int32 [T]."""
    async with contextlib.aclosing(sampler.sample([tokens], 1, settings, [seed])) as groups:
        async for _, (completion,) in groups:
            return completion.tokens
    raise RuntimeError("the sampler gave no answer")


async def talk(folder: Path, settings: SamplingParams, max_length: int) -> None:
    """Reads lines until the end of the input, and prints an answer to each."""
    policy, params, tokenizer = load(folder)
    longest = min(max_length, policy.architecture.max_positions)
    sampler = EmbeddedSampler(slots=1).start(policy, tokenizer, max_length=longest)
    await sampler.publish(params, 0)
    turns: list[dict[str, str]] = []
    for number, line in enumerate(iter(_line, None)):
        turns.append({"role": "user", "content": line})
        try:
            tokens = prefix(tokenizer, turns)
            response = await answer(sampler, tokens, with_stop_ids(settings, tokenizer), number)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            turns.clear()
            continue
        text = tokenizer.decode(response, skip_special_tokens=True)
        turns.append({"role": "assistant", "content": text})
        print(text, flush=True)
    await sampler.close()


def _line() -> str | None:
    """Returns the next non-empty line, or None at the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            return line


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.chat", __doc__)
    parser.add_argument("folder", type=Path, help="Hugging Face folder or run folder")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--max_tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--max_length", type=int, default=2048, help="most tokens of the talk")
    arguments = parser.parse_args(argv)
    compilation_cache.keep()
    if not arguments.folder.is_dir():
        raise FileNotFoundError(f"{arguments.folder} is no folder: give a Hugging Face folder or a run folder")
    settings = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    asyncio.run(talk(arguments.folder, settings, arguments.max_length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
