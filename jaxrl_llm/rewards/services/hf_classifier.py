"""A Hugging Face sequence classifier or scalar reward model in PyTorch, loaded at its first use."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm import components

# A text, a pair of texts, or chat messages that the tokenizer's template renders.
Text = str | Sequence[str] | Sequence[Mapping[str, str]]

# The padding id of models such as Llama, which find a row's last token by the padding: an id that no token has.
NO_PADDING = -1
# Names in checkpoints of the head that transformers calls "score": Athene-RM's.
NAMES = ("v_head",)
HEADS = {rf"^{name}\.": "score." for name in NAMES}


class Classified(NamedTuple):
    """The outputs of a classifier for N texts and K labels.

    Attributes:
      logits: raw outputs [N, K].
      probs: probabilities [N, K]: the softmax, or the sigmoid of a single output.
      tokens: tokens read of each text, after truncation [N].
    """

    logits: Float[np.ndarray, "N K"]
    probs: Float[np.ndarray, "N K"]
    tokens: Int[np.ndarray, "N"]


@dataclass(frozen=True, kw_only=True)
class HfClassifier:
    """Any model of AutoModelForSequenceClassification; needs the extra `serve`. Code of a model's folder is never run.

    Attributes:
      model: folder or Hugging Face id.
      label: the label whose output is the score, by name or index; may be empty where there is one label. A name that
        the model's configuration lacks is an error, so a flipped model cannot pass unseen.
      output: the score is that label's raw "logit" or its "probability".
      sign: factor of the score, 1 or -1.
      max_tokens: largest number of tokens read of a text.
      keep: which end of a longer text is read.
      cls: token that is added to the end of every text, at which the model's head reads, such as
        "<|reserved_special_token_1|>" of Athene-RM; empty for none.
      batch: number of texts in one forward pass.
      device: PyTorch device.
      dtype: PyTorch dtype of the weights.
    """

    model: str
    label: str = ""
    output: Literal["logit", "probability"] = "logit"
    sign: float = 1.0
    max_tokens: int = 1024
    keep: Literal["start", "end"] = "start"
    cls: str = ""
    batch: int = 16
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    _loaded: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components.choices(self)
        components.one_of(self, (1, -1), "sign")
        components.at_least(self, 2 if self.cls else 1, "max_tokens")
        components.at_least(self, 1, "batch")
        object.__setattr__(self, "_loaded", _Loaded(self))

    async def scores(self, texts: Sequence[Text]) -> list[float | None]:
        """Returns the score of each text, computed in a thread."""
        return list(await asyncio.to_thread(self.score_now, texts))

    async def similar(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Returns the probability of the last label for each pair of texts: the class "similar" of a partition classifier."""
        found = await asyncio.to_thread(self.classify, pairs)
        return [float(p) for p in found.probs[:, -1]]

    def score_now(self, texts: Sequence[Text]) -> list[float]:
        """Returns the score of each text."""
        return self.read(self.classify(texts))

    def read(self, found: Classified) -> list[float]:
        """Returns the scores that `label`, `output` and `sign` choose from the outputs."""
        values = found.logits if self.output == "logit" else found.probs
        return [self.sign * float(v) for v in values[:, self.index()]]

    def index(self) -> int:
        """Returns the index of the label's output.

        Raises:
          ValueError: the model has no such label, or several and none is named.
        """
        labels: dict[int, str] = {int(i): str(name) for i, name in self._loaded.model.config.id2label.items()}
        if not self.label and len(labels) == 1:
            return 0
        for i, name in labels.items():
            if self.label in (name, str(i)):
                return i
        raise ValueError(
            f"HfClassifier.label must be one of {labels} of {self.model}, name or index (got {self.label!r})"
        )

    def classify(self, texts: Sequence[Text]) -> Classified:
        """Returns raw outputs and probabilities of each text."""
        return self._loaded.classify(texts)

    def load(self) -> None:
        """Loads the model now, and checks `label`."""
        self.index()

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._loaded.there


class _Loaded:
    """The tokenizer and the model, loaded once something asks for them; one thread at a time uses them."""

    def __init__(self, config: HfClassifier) -> None:
        self.config = config
        self.lock = threading.RLock()
        self._parts: tuple[Any, Any] | None = None

    @property
    def there(self) -> bool:
        return self._parts is not None

    @property
    def tokenizer(self) -> Any:
        return self._both()[0]

    @property
    def model(self) -> Any:
        return self._both()[1]

    def _both(self) -> tuple[Any, Any]:
        with self.lock:
            if self._parts is None:
                self._parts = self._load()
            return self._parts

    def _load(self) -> tuple[Any, Any]:
        try:
            import torch
        except ImportError as error:
            raise ImportError("a classifier needs PyTorch: pip install 'jaxrl-llm[serve]'") from error
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        config = self.config
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            config.model,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=False,
            key_mapping=HEADS,
            output_loading_info=True,
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"{config.model} has no weights {missing}, which would be random: name a trained sequence classifier or reward model "
                f"(of heads under other names, {', '.join(NAMES)} are read)"
            )
        if config.cls and tokenizer.convert_tokens_to_ids(config.cls) in (None, tokenizer.unk_token_id):
            raise ValueError(f"HfClassifier.cls must be a token of {config.model} (got {config.cls!r})")
        tokenizer.truncation_side = "right" if config.keep == "start" else "left"
        tokenizer.padding_side = "right"
        if model.config.pad_token_id is None:
            model.config.pad_token_id = NO_PADDING
        return tokenizer, model.to(config.device).eval()

    def classify(self, texts: Sequence[Text]) -> Classified:
        with self.lock:
            rows = [self._encode(text) for text in texts]
            lengths = np.array([len(row["input_ids"]) for row in rows], np.int64)
            logits = np.zeros((len(rows), self.model.config.num_labels))
            for chosen in self._batches(lengths):
                logits[chosen] = self._forward([rows[i] for i in chosen])
        return Classified(logits=logits, probs=probabilities(logits), tokens=lengths)

    def _batches(self, lengths: Int[np.ndarray, "N"]) -> Iterator[Int[np.ndarray, "n"]]:
        """Yields the numbers of rows to forward together: of similar length, or of the same where the model knows no padding."""
        order = np.argsort(lengths, kind="stable")
        changes = np.flatnonzero(np.diff(lengths[order])) + 1
        unpadded = self.model.config.pad_token_id == NO_PADDING
        for alike in np.split(order, changes) if unpadded else [order]:
            for start in range(0, len(alike), self.config.batch):
                yield alike[start : start + self.config.batch]

    def _encode(self, text: Text) -> Mapping[str, Any]:
        """Encodes a text within the limit, with the token `cls` after it."""
        if not self.config.cls:
            return self._tokens(text, self.config.max_tokens)
        row = self._tokens(text, self.config.max_tokens - 1)
        last = {"input_ids": self.tokenizer.convert_tokens_to_ids(self.config.cls), "attention_mask": 1}
        return {name: [*values, last.get(name, values[-1])] for name, values in row.items()}

    def _tokens(self, text: Text, most: int) -> Mapping[str, Any]:
        limits = {"truncation": True, "max_length": most}
        if isinstance(text, str):
            return self.tokenizer(text, **limits)
        if all(isinstance(one, str) for one in text) and len(text) == 2:
            first, second = text
            return self.tokenizer(first, second, **limits)
        rendered = self.tokenizer.apply_chat_template(list(text), tokenize=False)
        return self.tokenizer(rendered, add_special_tokens=False, **limits)

    def _forward(self, rows: Sequence[Mapping[str, Any]]) -> Float[np.ndarray, "N K"]:
        import torch

        if len({len(row["input_ids"]) for row in rows}) == 1:
            given = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        else:
            given = self.tokenizer.pad(list(rows), return_tensors="pt")
        with torch.inference_mode():
            placed = {name: values.to(self.config.device) for name, values in given.items()}
            return self.model(**placed).logits.double().cpu().numpy()


def probabilities(logits: Float[np.ndarray, "N K"]) -> Float[np.ndarray, "N K"]:
    """Returns the softmax over K labels, or the sigmoid of a single one."""
    if logits.shape[1] == 1:
        return 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)
