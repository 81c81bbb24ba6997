"""Recorded experts on the host: parses and checks the records of vLLM servers (NumPy alone).

A record has a row for each token that the model read: the prompt's and all but the last that was drawn. vLLM's record has all layers of
the model, with zeros for those without experts; ours has only the layers with experts. vLLM's forms:

    0.21          "prompt_routed_experts" and "routed_experts", nested lists
    from 0.22     "routed_experts", the file of a NumPy array in base64, from the token that the request named on
    from 0.33     the same, of uint8 where there are at most 256 experts, else uint16
"""

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# The option with which vLLM records, and the field of a request that skips the record of the first tokens.
FLAG, START = "--enable-return-routed-experts", "routed_experts_prompt_start"
RECORD, PROMPT = "routed_experts", "prompt_routed_experts"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The shape of a model's records.

    Attributes:
      experts: number of experts of a layer.
      chosen: number of experts that a token goes to.
      sparse: whether each layer has experts.
      dtype: dtype of our records, "uint8" or "uint16".
    """

    experts: int
    chosen: int
    sparse: tuple[bool, ...]
    dtype: str

    @classmethod
    def of(cls, architecture: Any) -> "Recording | None":
        """Returns the shape of a model's records; None for a model without experts."""
        size = architecture.experts
        if size is None:
            return None
        return cls(experts=size.count, chosen=size.chosen, sparse=architecture.sparse, dtype=size.record_dtype)

    def read(self, choice: Mapping[str, Any], start: int, end: int) -> np.ndarray:
        """Returns the experts of tokens `start` to `end` of a prompt and its sample, uint [end - start, L, k].

        Args:
          choice: the sample, as a server returned it.
          start: the number of tokens whose record the request asked to skip; a server that cannot skip returns those too.
          end: the number of tokens that the model read.

        Raises:
          ValueError: there is no record, or it is not one of these tokens and this model; the message says which.
        """
        found = choice.get(RECORD)
        if found is None:
            raise ValueError(f"there is no {RECORD!r} in the answer: start the server with {FLAG}")
        rows = _unpacked(found)
        if choice.get(PROMPT) is not None:
            rows = np.concatenate([_unpacked(choice[PROMPT]), rows])
        if rows.ndim != 3 or rows.shape[1:] != (len(self.sparse), self.chosen):
            raise ValueError(f"a record of shape {rows.shape}, not [tokens, {len(self.sparse)}, {self.chosen}]")
        # Lists also have a row for the last token, which the model did not read.
        whole = {end: rows, end + 1: rows[:-1]}.get(len(rows))
        rows = whole[start:] if whole is not None and len(rows) != end - start else rows
        if len(rows) != end - start:
            raise ValueError(f"a record of {len(rows)} tokens, not of the {end - start} that were asked for")
        kept = rows[:, list(self.sparse)]
        if not np.issubdtype(kept.dtype, np.integer) or (
            kept.size and not 0 <= kept.min() <= kept.max() < self.experts
        ):
            raise ValueError(f"a record of {kept.dtype} outside 0..{self.experts - 1}")
        ordered = np.sort(kept, axis=-1)
        if np.any(ordered[..., 1:] == ordered[..., :-1]):
            raise ValueError("a record that names an expert twice for one token and layer")
        return kept.astype(self.dtype)


def _unpacked(said: Any) -> np.ndarray:
    """Decodes an array that was written as nested lists or as a NumPy file in base64."""
    try:
        if isinstance(said, str):
            return np.load(io.BytesIO(base64.b64decode(said, validate=True)), allow_pickle=False)
        return np.asarray(said)
    except (ValueError, TypeError, EOFError, binascii.Error) as wrong:
        raise ValueError(f"a record that is no array ({wrong})") from wrong
