"""Demonstrations as one stream of documents, cut into rows of equal length: packed instruction tuning, as CS336 asks for it.

    stream = <bos> prompt response <eos> <bos> prompt response <eos> ...        row i = tokens i L .. (i + 1) L

Every token but a row's first is learned, prompts too; the labels of a row reach one token into the next, and the last,
incomplete row is left out. A document sees those before it in its row. (The packing of ordinary stages, packing.Packing,
keeps sequences apart and learns responses alone.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxrl_llm.experience import Prompt
from jaxrl_llm.protocols import Source


@dataclass(frozen=True, kw_only=True)
class PackedSFT:
    """Rows of `seq_length` positions out of another dataset's demonstrations; stages need packing.Packing.row_tokens >= it.

    Attributes:
      source: prompts as text (a template such as "alpaca"), with responses.
      tokenizer: the policy's tokenizer.
      seq_length: positions of a row.
      shuffle: whether the documents are shuffled before they are joined.
      seed: names their order.
    """

    source: Source
    tokenizer: Any
    seq_length: int = 512
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise ValueError(f"packed_sft.PackedSFT.seq_length must be >= 1 (got {self.seq_length})")

    def rows(self) -> Sequence[Prompt]:
        """All rows, as demonstrations whose prompt is their first token.

        Raises:
          ValueError: a row that is no text with a response, or too little text for one row.
        """
        found = self.source.rows()
        order = np.random.default_rng(self.seed).permutation(len(found)) if self.shuffle else np.arange(len(found))
        stream = joined(self.tokenizer.load(), (self._text(found[int(i)]) for i in order), self.seq_length)
        return [self._row(i, stream) for i in range((len(stream) - 1) // self.seq_length)]

    def _text(self, prompt: Prompt) -> str:
        if prompt.text is None or prompt.response is None:
            raise ValueError(
                f"row {prompt.id!r} is no text with a response: set the source's `template` to a text template of "
                "data/templates.py, such as 'alpaca'"
            )
        return prompt.text + prompt.response

    def _row(self, i: int, stream: Int[np.ndarray, " N"]) -> Prompt:
        tokens = stream[i * self.seq_length : (i + 1) * self.seq_length + 1]
        return Prompt(
            id=f"packed/{i}", tokens=tokens[:1], response="", source="packed", extra={"response_tokens": tokens[1:]}
        )


def joined(tokenizer: Any, documents: Iterable[str], seq_length: int) -> Int[np.ndarray, " N"]:
    """The documents' tokens, each between its end tokens, as many as whole rows need: a multiple of `seq_length`, and one.

    Raises:
      ValueError: fewer tokens than one row needs.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens: list[int] = []
    for text in documents:
        tokens += [*begin, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    whole = (len(tokens) - 1) // seq_length
    if whole < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for a row of {seq_length}, which needs {seq_length + 1}")
    return np.array(tokens[: whole * seq_length + 1], np.int32)
