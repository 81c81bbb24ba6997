"""Encodes rendered chat templates such that text from outside never becomes a control token.

While a template is rendered, text from outside is disguised: each of its characters except white space, quotes and backslashes, which
templates need to trim texts and write JSON, becomes a private-use character. Whatever spells a control token in the rendering therefore
comes from the template itself. The rendering is split at these tokens; the text between them is restored and encoded by a copy of the
tokenizer without added tokens. Harmless text gets the ids that the tokenizer itself gives it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

# Unicode's private-use characters, of the basic plane and of planes 15 and 16.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_KEPT = '"\\\x7f'

# What templates look up in messages and in the schemas of tools, which therefore is not disguised.
KEYS = {
    "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "strict", "anyOf", "default",
    "format", "title", "additionalProperties", "return", "arguments",
}  # fmt: skip
TYPES = {"function", "object", "string", "number", "integer", "boolean", "array", "null"}


_HIDDEN = re.compile(f"[^{''.join(f'{chr(codes[0])}-{chr(codes[-1])}' for codes in _PRIVATE)}]+")


def hidden_part(text: str) -> str:
    """Returns the private-use characters of a text, which a disguised text keeps however white space, quotes and backslashes are written."""
    return _HIDDEN.sub("", text)


def cleaned(text: str) -> str:
    """Replaces each unpaired half of a surrogate pair, which no tokenizer encodes, by "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _kept(character: str) -> bool:
    return character.isspace() or character < " " or character in _KEPT


class Disguise:
    """Replaces the characters of some texts by private-use characters, and restores them.

    Args:
      values: all texts from outside: strings, and lists and mappings of strings.
      template: the template's text; its own private-use characters are not used.

    Raises:
      ValueError: the texts have more different characters than there are private-use characters.
    """

    def __init__(self, values: Iterable[Any], template: str = "") -> None:
        characters = sorted({c for text in chain.from_iterable(map(_texts, values)) for c in text if not _kept(c)})
        free = (code for code in chain(*_PRIVATE) if chr(code) not in template)
        self._on = dict(zip(map(ord, characters), free))
        self._off = {private: code for code, private in self._on.items()}
        if len(self._on) < len(characters):
            raise ValueError(
                f"the texts have {len(characters)} different characters, at most {len(self._on)} can be told apart"
            )

    def text(self, text: str) -> str:
        """Returns the disguised text."""
        return cleaned(text).translate(self._on)

    def value(self, value: Any) -> Any:
        """Returns a JSON-like value with all strings and keys disguised."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(held) for key, held in value.items()}
        return [self.value(held) for held in value] if isinstance(value, list | tuple) else value

    def schema(self, value: Any, key: str = "") -> Any:
        """Disguises a tool's schema, except for the keys and types that templates look up."""
        if isinstance(value, str):
            return value if key == "type" and value in TYPES else self.text(value)
        if isinstance(value, Mapping):
            return {k if k in KEYS else self.text(str(k)): self.schema(held, k) for k, held in value.items()}
        return [self.schema(held, key) for held in value] if isinstance(value, list | tuple) else value

    def removed(self, rendered: str) -> str:
        """Restores the original characters of a rendering."""
        return rendered.translate(self._off)


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings of a JSON-like value, its keys among them."""
    if isinstance(value, str):
        yield cleaned(value)
    elif isinstance(value, Mapping):
        for key, held in value.items():
            yield cleaned(str(key))
            yield from _texts(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from _texts(held)


class OutsideEncoder:
    """Encodes text without control tokens, and renderings with only the control tokens that the template wrote.

    Args:
      tokenizer: a fast transformers tokenizer.

    Attributes:
      controls: {text: id} of the tokenizer's added tokens, except those of white space alone, which count as text.

    Raises:
      ValueError: the tokenizer is not one of the tokenizers library, or makes an added token's id from plain text.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"{type(tokenizer).__name__} is no fast tokenizer: text from outside can only be kept apart from control tokens with a "
                "tokenizer.json; convert the tokenizer, or use one that has it"
            )
        described = json.loads(backend.to_str())
        added = [token for token in described["added_tokens"] if token["content"].strip()]
        self.controls: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._strips_left = {token["content"] for token in added if token["lstrip"]}
        self._strips_right = {token["content"] for token in added if token["rstrip"]}
        spelled = sorted(map(re.escape, self.controls), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(spelled) or '(?!)'})")
        left = [token for token in described["added_tokens"] if not token["content"].strip()]
        self._plain = _with_added(described, left)
        # The tokenizers library renumbers added tokens where earlier ones are missing.
        self._numbers = {self._plain.token_to_id(token["content"]): token["id"] for token in left}
        self._check(set(self.controls.values()) - {getattr(tokenizer, "unk_token_id", None)})

    def _check(self, ids: set[int]) -> None:
        """Raises ValueError where the spelling of a control token, encoded as text, has one of `ids`."""
        for text in self.controls:
            try:
                made = ids & set(self.text(text))
            except ValueError:  # a character outside the alphabet
                continue
            if made:
                raise ValueError(
                    f"the tokenizer makes the control id {sorted(made)} from the plain text {text!r}: with it, text from outside can "
                    "act as control tokens; use a tokenizer whose control tokens are added tokens alone"
                )

    def text(self, text: str) -> list[int]:
        """Encodes a text into ids, none of them a control id.

        Raises:
          ValueError: the tokenizer cannot encode the text.
        """
        try:
            found = self._plain.encode(cleaned(text), add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"the tokenizer cannot encode {text[:80]!r} ({error})") from error
        return [self._numbers.get(i, i) for i in found]

    def first(self, markup: str) -> int | None:
        """Returns the id of the control token that begins the markup, after white space; None where the markup begins with text."""
        pieces = self._pattern.split(markup)
        return self.controls[pieces[1]] if len(pieces) > 1 and not pieces[0].strip() else None

    def beginning_at(self, markup: str, ids: Iterable[int]) -> str:
        """Returns the markup from the first control token that is one of `ids`; raises ValueError where there is none."""
        wanted = set(ids)
        for found in self._pattern.finditer(markup):
            if self.controls[found[1]] in wanted:
                return markup[found.start() :]
        raise ValueError(f"the chat template writes no end of a turn after an answer with calls (got {markup!r})")

    def rendered(self, rendered: str, disguise: Disguise) -> list[int]:
        """Encodes a disguised rendering; its control tokens are those that the template wrote."""
        pieces, ids = self._pattern.split(rendered), list[int]()
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self.controls[piece])
                continue
            if place and pieces[place - 1] in self._strips_right:
                piece = piece.lstrip()
            if place + 1 < len(pieces) and pieces[place + 1] in self._strips_left:
                piece = piece.rstrip()
            if piece:
                ids += self.text(disguise.removed(piece))
        return ids


def _with_added(described: Mapping[str, Any], added: list[Mapping[str, Any]]) -> Any:
    """Builds the tokenizer of a tokenizer.json with these added tokens alone."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps({**described, "added_tokens": added, "truncation": None, "padding": None}))
