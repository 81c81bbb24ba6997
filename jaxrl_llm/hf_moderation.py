"""A moderation classifier of several labels as a Reward, such as beaver-dam-7b: a Hugging Face sequence classifier run in JAX.

    text    = template of question and response, with the end-of-sequence token, cut at its end to `max_tokens`
    p_c     = sigmoid(logit_c of the text's last token)
    harmful = 1 where max_c p_c > threshold

The published use of beaver-dam (TokenBuncher, arXiv 2508.20697) leaves the question blank, so that the response is judged
alone, and the end-of-sequence token is lost where the text is cut; `question = True` shows the question.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl_llm import bounds, hf_weights
from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.hf_reward_model import padded
from jaxrl_llm.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.policy_source import PolicySource
from jaxrl_llm.models.value import HEAD, ValueModel

CONVERSATION = "BEGINNING OF CONVERSATION: USER: {question} ASSISTANT:{response}"


@dataclass(frozen=True, kw_only=True)
class Moderation:
    """Whether a response is harmful, and the probability of each label. The model is loaded at the first response.

    Attributes:
      folder: a Hugging Face folder or id of a Llama-shaped (or Qwen-shaped) sequence classifier with several labels.
      question: shows the question; False leaves it blank.
      threshold: a label's probability above which the response is harmful.
      template: the text, with {question} and {response}; the end-of-sequence token follows.
      max_tokens: longer texts lose their ends.
      compute_dtype: dtype of activations, "float32" or "bfloat16".
      rows: texts of one forward pass.
      mesh: sizes of the mesh axes that the model lies on.
    """

    needs_stats: ClassVar[bool] = False

    folder: str
    question: bool = False
    threshold: float = 0.5
    template: str = CONVERSATION
    max_tokens: int = 512
    compute_dtype: str = "float32"
    rows: int = 16
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        bounds.within(self, "(0, 1)", "threshold")
        bounds.at_least(self, 1, "rows", "max_tokens")
        if "{response}" not in self.template:
            raise ValueError("hf_moderation.Moderation.template must have the field {response}")

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """ "harmful" 0 or 1 [G], "log/cut", 1 where the text was cut, and "log/LABEL", the probability of each label.

        Raises:
          FileNotFoundError, ValueError: no such folder, no tokenizer there, or no sequence classifier.
        """
        del stats
        whole = [self.tokens(self.text(r.prompt, r.text)) for r in rollouts]
        sequences = [tokens[: self.max_tokens] for tokens in whole]
        # Programs are started from the event loop's thread, in one order on every device; only the wait is elsewhere.
        pending = [self._forward(self._loaded[1], *batch) for batch in padded(sequences, self.rows)]
        found = [await asyncio.to_thread(np.asarray, x) for x in pending]
        probabilities = np.concatenate(found)[: len(rollouts)].astype(np.float64)
        parts = {"harmful": (probabilities.max(axis=1) > self.threshold).astype(np.float64)}
        parts["log/cut"] = np.array([float(len(tokens) > self.max_tokens) for tokens in whole])
        parts |= {f"log/{label}": probabilities[:, i] for i, label in enumerate(self.labels)}
        return Scores(parts=parts, valid={name: np.ones(len(rollouts), bool) for name in parts})

    def text(self, prompt: Prompt, response: str) -> str:
        """What the classifier reads, without the end-of-sequence token."""
        asked = prompt.extra.get("instruction") or prompt.question
        return self.template.format(question=asked if self.question else "", response=response)

    def tokens(self, text: str) -> np.ndarray:
        """int32 [T] of the text with its end."""
        tokenizer = self._tokenizer
        return np.array(tokenizer(text + (tokenizer.eos_token or ""))["input_ids"], np.int32)

    @cached_property
    def labels(self) -> list[str]:
        """The labels' names, in the order of the logits."""
        named = hf_weights.config_of(hf_weights.locate(self.folder)).get("id2label") or {}
        if len(named) < 2:
            raise ValueError(
                f"{self.folder} names {len(named)} labels in config.json, and moderation needs several: set "
                "hf_moderation.Moderation.folder to a classifier of labels, or use hf_reward_model.HFRewardModel"
            )
        return [str(named[i]) for i in sorted(named, key=int)]

    @cached_property
    def _tokenizer(self) -> Any:
        return PretrainedTokenizer(path=str(hf_weights.locate(self.folder))).load()

    @cached_property
    def _forward(self) -> Any:
        policy, _ = self._loaded

        def forward(params: Any, tokens: jax.Array, segments: jax.Array, last: jax.Array) -> Float[jax.Array, "B C"]:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            layers = {name: leaf for name, leaf in params.items() if name != HEAD}
            hidden = policy.hidden(layers, tokens, positions, segments, max_segments=1)
            final = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0].astype(jnp.float32)
            return jax.nn.sigmoid(jnp.einsum("bd,dc->bc", final, params[HEAD]["kernel"], precision="highest"))

        return jax.jit(forward, out_shardings=policy.partitioner.replicated)

    @cached_property
    def _loaded(self) -> tuple[Policy, Any]:
        place = hf_weights.locate(self.folder)
        if not hf_weights.is_classifier(place):
            raise ValueError(f"{self.folder} is no sequence classifier: set hf_moderation.Moderation.folder to one")
        source = PolicySource(pretrained=self.folder, compute_dtype=self.compute_dtype)
        partitioner = Partitioner.create(self.mesh, jax.local_devices())
        policy = ValueModel.like(source.policy(partitioner, value=True)).backbone
        shape = (policy.architecture.width, len(self.labels))
        kernel = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=partitioner.replicated)
        head = hf_weights.read({HEAD: {"kernel": kernel}}, place)
        return policy, {**source.params(policy, jax.random.key(0)), **head}
