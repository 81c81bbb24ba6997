"""Packed instruction tuning: next-token prediction on documents that are joined and cut into chunks of one length.

    L = -log pi(token | the tokens before it in its chunk)                     mean over all tokens

Each demonstration is a document, its prompt (with what the tokenizer puts first) and its response with the end-of-sequence
id; documents follow each other in an order drawn once, chunks predict across the border of two documents, and the tokens
that fill no chunk are dropped, as in the packed data of Stanford's CS336, assignment 5 (supplement). A chunk is
train.Packing.row_tokens long. Prompts are learned from as responses are, and a document attends to the one before it;
`sft.SFT` learns from responses alone, and sequences in a row do not attend to each other.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.protocols import Learns


@dataclass(frozen=True, kw_only=True)
class PackedSFT(SFT):
    """Imitation of whole documents."""

    learns_from: ClassVar[Learns] = "documents"
