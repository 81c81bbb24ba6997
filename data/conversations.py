"""Converts chat messages from the formats of data sets: role/content, from/value, and marked transcripts."""

import re
from collections.abc import Mapping
from typing import Any

Messages = list[dict[str, str]]

ROLES: Mapping[str, str] = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
}
# In Anthropic's transcripts each turn begins with a blank line and its speaker.
_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")


def messages(value: Any, role: str = "user") -> Messages | None:
    """Returns the messages that `value` holds, or None where it holds none.

    Args:
      value: a list of messages or one message ({"role", "content"} or {"from", "value"}), a transcript
        ("\\n\\nHuman: ...\\n\\nAssistant: ..."), or a plain text, which becomes one message.
      role: role of a plain text.
    """
    if isinstance(value, str):
        return _transcript(value) if _SPEAKER.match(value) else _said(role, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        return None
    found = [_message(turn) for turn in value]
    good = [message for message in found if message is not None]
    return good if len(good) == len(found) else None


def _message(turn: Any) -> dict[str, str] | None:
    if not isinstance(turn, Mapping):
        return None
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role not in ROLES or not isinstance(content, str):
        return None
    return {"role": ROLES[role], "content": content}


def _said(role: str, text: str) -> Messages | None:
    return [{"role": role, "content": text}] if text.strip() else None


def _transcript(text: str) -> Messages | None:
    """Returns the turns, stripped of white space, or None where a turn is empty or the speakers do not alternate."""
    _, *pieces = _SPEAKER.split(text)
    turns = [
        {"role": "user" if speaker == "Human" else "assistant", "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2])
    ]
    in_turn = all(turn["role"] == ("user", "assistant")[i % 2] for i, turn in enumerate(turns))
    return turns if in_turn and all(turn["content"] for turn in turns) else None
