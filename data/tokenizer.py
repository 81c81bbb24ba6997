"""Tokenizers as components: by character, by byte, or pretrained; all of them load as transformers tokenizers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.experience import SamplingParams

# Every folder with a tokenizer has one of these files; without any, transformers creates an empty tokenizer of the model's kind.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")

# Ids 0, 1 and 2 of the character and byte tokenizers.
SPECIAL = ("<pad>", "<bos>", "<eos>")

# Writes each turn on one line, for tokenizers without role tokens.
PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class CharTokenizer:
    """Uses one token for each character of a fixed alphabet; text with other characters is an error.

    Attributes:
      alphabet: the characters, each once; their ids follow those of <pad>, <bos> and <eos>.
      add_bos: whether text prompts begin with <bos>.
      chat_template: Jinja template of chat messages; empty for none.
    """

    alphabet: str
    add_bos: bool = False
    chat_template: str = ""

    def __post_init__(self) -> None:
        twice = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if not self.alphabet or twice:
            raise ValueError(
                f"CharTokenizer.alphabet must hold each character once (got {self.alphabet!r}, repeated: {twice})"
            )

    def load(self) -> Any:
        """Returns a transformers fast tokenizer; `save_pretrained` writes it in Hugging Face's format."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *self.alphabet])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))  # type: ignore[call-arg]
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return _wrap(tokenizer, vocabulary, self.add_bos, self.chat_template)


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """Uses one token for each byte of UTF-8 text: ids 3 to 258, after <pad>, <bos> and <eos>.

    Attributes:
      add_bos: whether text prompts begin with <bos>.
      chat_template: Jinja template of chat messages; empty for none.
    """

    add_bos: bool = False
    chat_template: str = PLAIN_CHAT

    def load(self) -> Any:
        """Returns a transformers fast tokenizer; `save_pretrained` writes it in Hugging Face's format."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *_byte_characters()])}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return _wrap(tokenizer, vocabulary, self.add_bos, self.chat_template)


@dataclass(frozen=True, kw_only=True)
class PretrainedTokenizer:
    """The tokenizer of a model folder or of a Hugging Face model.

    Attributes:
      path: a folder with tokenizer files, or a model id, "owner/name" or "owner/name@COMMIT".
      chat_template: Jinja template that replaces the tokenizer's own; empty keeps it.
    """

    path: str
    chat_template: str = ""

    def load(self) -> Any:
        """Returns the transformers tokenizer.

        Raises:
          FileNotFoundError: `path` is neither a folder with a tokenizer nor an id from which one can be downloaded.
        """
        from transformers import AutoTokenizer

        folder = Path(self.path).expanduser()
        name, _, revision = (str(folder), "", "") if folder.is_dir() else self.path.partition("@")
        try:
            if folder.is_dir() and not any((folder / file).is_file() for file in FILES):
                raise OSError(f"It has none of {', '.join(FILES)}.")
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
        except (OSError, ValueError) as error:
            where = f"{sorted(p.name for p in folder.iterdir())}" if folder.is_dir() else "no such folder here"
            raise FileNotFoundError(
                f"PretrainedTokenizer.path={self.path!r} has no tokenizer ({where}): name a folder with tokenizer.json"
                f" and tokenizer_config.json, or a model id that can be downloaded. {error}"
            ) from error
        if self.chat_template:
            tokenizer.chat_template = self.chat_template
        tokenizer.stop_ids = _stop_ids(tokenizer, name, revision)
        return tokenizer


def ids(tokenizer: Any, text: str, *, special: bool) -> np.ndarray:
    """Returns the token ids int32 [T] of a text; `special` adds the tokenizer's own, such as one that begins a text.

    Raises:
      ValueError: the tokenizer cannot encode the text, such as a character outside the alphabet of a CharTokenizer.
    """
    try:
        found = tokenizer(text, add_special_tokens=special)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare Exception
        vocabulary = tokenizer.get_vocab()
        other = sorted({c for c in text if c not in vocabulary}) if len(vocabulary) < 1000 else []
        why = f"it has no token for {', '.join(map(repr, other[:10]))}" if other else str(error)
        raise ValueError(f"the tokenizer cannot encode {text[:80]!r} ({why})") from error
    return np.asarray(found, np.int32)


def stop_ids(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids that end a response: the tokenizer's end of sequence, and those of the model's generation_config.json."""
    end = getattr(tokenizer, "eos_token_id", None)
    return getattr(tokenizer, "stop_ids", () if end is None else (end,))


def _stop_ids(tokenizer: Any, name: str, revision: str) -> tuple[int, ...]:
    from transformers import GenerationConfig

    folder, found = Path(name), None
    try:
        if not folder.is_dir() or (folder / "generation_config.json").is_file():
            found = GenerationConfig.from_pretrained(name, revision=revision or "main").eos_token_id
    except OSError:  # a model on the hub lacks that file, or a folder's file cannot be read
        if folder.is_dir():
            raise
    more = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(i for i in (tokenizer.eos_token_id, *more) if i is not None))


def _wrap(tokenizer: Any, vocabulary: Mapping[str, int], add_bos: bool, chat_template: str) -> Any:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos = SPECIAL
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    if chat_template:
        wrapped.chat_template = chat_template
    return wrapped


def _byte_characters() -> list[str]:
    """Returns the printable character for each byte in the byte-level form of the tokenizers library."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def with_stop_ids(settings: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Adds the ids that end the model's responses to the settings' stop ids."""
    ends = stop_ids(tokenizer)
    if not ends and not settings.stop_token_ids and not settings.stop_strings:
        raise ValueError(
            "the tokenizer has no end-of-sequence token: set SamplingParams.stop_token_ids or stop_strings"
        )
    return replace(settings, stop_token_ids=tuple(dict.fromkeys((*settings.stop_token_ids, *ends))))
