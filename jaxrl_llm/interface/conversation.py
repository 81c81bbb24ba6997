"""A trained model that answers single questions from Python."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler
from jaxrl_llm.tools import chat
from jaxrl_llm.train.run import Run

LENGTH = 2048  # most tokens of a question and its answer


class Conversation:
    """A model on the embedded sampler, which runs in its own thread and event loop.

    Args:
      policy: the policy.
      params: the policy's parameters.
      tokenizer: the policy's tokenizer.
    """

    def __init__(self, policy: Any, params: Any, tokenizer: Any) -> None:
        self.tokenizer, self._params = tokenizer, params
        longest = min(LENGTH, policy.architecture.max_positions)
        self._engine = EmbeddedSampler(slots=1).start(policy, tokenizer, max_length=longest)
        self._thread, self._loop = ThreadPoolExecutor(1, "conversation"), asyncio.Runner()

    @classmethod
    def of_folder(cls, folder: Path) -> "Conversation":
        """Loads the last checkpoint of a run folder, or a Hugging Face folder."""
        return cls(*chat.load(folder))

    @classmethod
    def of_start(cls, run: Run) -> "Conversation":
        """Loads the model that a run begins with."""
        import jax

        policy = run.policy.policy(Partitioner.create(MeshConfig()))
        key = jax.random.key(run.seed)
        params = policy.merged(run.policy.params(policy, key), run.policy.base(policy, key))
        return cls(policy.plain, params, run.tokenizer.load())

    def ask(self, question: str, settings: SamplingParams, seed: int = 0) -> str:
        """Returns the answer to a question, which goes through the tokenizer's chat template where it has one."""
        return self._thread.submit(lambda: self._loop.run(self._answer(question, settings, seed))).result()

    async def _answer(self, question: str, settings: SamplingParams, seed: int) -> str:
        if self._engine.version < 0:
            await self._engine.publish(self._params, 0)
        tokens = chat.prefix(self.tokenizer, [{"role": "user", "content": question}])
        found = await chat.answer(self._engine, tokens, with_stop_ids(settings, self.tokenizer), seed)
        return self.tokenizer.decode(found, skip_special_tokens=True)

    def close(self) -> None:
        """Frees the sampler."""
        self._thread.submit(lambda: self._loop.run(self._engine.close())).result()
        self._thread.shutdown()
        self._loop.close()
