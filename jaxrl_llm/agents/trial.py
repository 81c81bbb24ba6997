"""Tests a chat template on harmless messages at start-up, and refuses one that does not render the messages' texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

_SYSTEM = {"role": "system", "content": "Mind the garden gate."}
_USER = {"role": "user", "content": "Where is the blue lamp?"}
_ASSISTANT = {"role": "assistant", "content": "Upon the kitchen shelf."}
_AGAIN = {"role": "user", "content": "Then who lit it, pray?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"thing": "lamp"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL = {"role": "tool", "content": "Seven candles burn.", "tool_call_id": "call00000", "name": "lookup"}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a thing of the house.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "description": "What to find."}},
            "required": ["thing"],
        },
    },
}

# Role -> conversation by which it is tested; each may only need roles that were tested before it.
CONVERSATIONS: Mapping[str, tuple[Messages, Messages]] = {
    "user": ([_USER], ()),
    "assistant": ([_USER, _ASSISTANT, _AGAIN], ()),
    "system": ([_SYSTEM, _USER, _ASSISTANT, _AGAIN], ()),
    "tool": ([_USER, _CALLING, _TOOL], ()),
    "tools": ([_USER], (_SCHEMA,)),
}
NEEDED = ("user", "assistant")


class Trial:
    """Compares the safe rendering of harmless messages with the plain one, role by role.

    Args:
      plain: renders messages and tools to the template's text.
      safe: renders them to ids in which text from outside has no control tokens.
      ids: encodes a text by the tokenizer itself.
    """

    def __init__(
        self, plain: Callable[..., str], safe: Callable[..., list[int]], ids: Callable[[str], list[int]]
    ) -> None:
        self._plain, self._safe, self._ids = plain, safe, ids

    def run(self) -> dict[str, str]:
        """Returns {role: why} for the roles, and "tools", that the template has no place for.

        Raises:
          ValueError: the template has no place for the user or the assistant; it moves, edits or repeats the content of a role; or the
            safe rendering of harmless messages differs from the plain one.
        """
        refused: dict[str, str] = {}
        for role, (messages, tools) in CONVERSATIONS.items():
            try:
                text = self._plain(messages, tools)
            except Exception as error:  # a template raises errors of its own and of Jinja
                refused[role] = str(error) or type(error).__name__
                continue
            if missing := _left_out(role, text, messages, tools):
                refused[role] = missing
                continue
            _check_places(role, text, messages)
            if self._safe(messages, tools) != self._ids(text):
                raise ValueError(
                    f"the chat template's text for {role!r} gets other ids where texts from outside are encoded apart from control "
                    f"tokens: it edits them, or the tokenizer reads text across control tokens; use another template (got {text!r})"
                )
        for role in NEEDED:
            if role in refused:
                raise ValueError(f"the chat template has no place for the role {role!r}: {refused[role]}")
        return refused


def _left_out(role: str, text: str, messages: Messages, tools: Messages) -> str:
    """Says why a role's content or the tools are not in the text in any form; returns "" where they are."""
    on_trial = [m["content"] for m in messages if m["role"] == role] + [t["function"]["name"] for t in tools]
    for said in on_trial:
        if said.casefold() not in text.casefold():
            return f"it leaves out {said!r}"
    return ""


def _check_places(role: str, text: str, messages: Messages) -> None:
    """Raises ValueError where contents are not in the text once each, unchanged and in their order."""
    place = -1
    for message in messages:
        said = message["content"]
        if not said:
            continue
        found = text.count(said)
        if found != 1 or text.index(said) < place:
            how = "edits or leaves out" if not found else "repeats" if found > 1 else "moves"
            raise ValueError(
                f"the chat template {how} content of the role {message['role']!r} (tried for {role!r}): a conversation cannot be continued by "
                f"exact ids; use another template (got {text!r})"
            )
        place = text.index(said)
