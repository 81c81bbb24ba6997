"""Normalises chat messages, whether an environment, a data set or the client of a chat API wrote them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.experience import Action

Message = dict[str, Any]

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def normalised(message: Mapping[str, Any]) -> Message:
    """Returns the fields of a message that templates read, in one form.

    The content is a text ("" for none; parts of text are joined by lines), arguments of calls are mappings where they can be read, and
    unknown fields are left out.

    Raises:
      ValueError: the role or the content is of an unknown kind.
    """
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"a message has the role {role!r}, and roles are {', '.join(ROLES)}")
    found: Message = {"role": ROLES[role], "content": content(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        found["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    found |= {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
    return found


def content(value: Any) -> str:
    """Returns the text of a message's content: a string, None, or a list of parts of text.

    Raises:
      ValueError: the content is something else, such as an image.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Sequence) and all(isinstance(part, Mapping) and _is_text(part) for part in value):
        return "\n".join(part["text"] for part in value)
    shown = [part.get("type") for part in value if isinstance(part, Mapping)] if isinstance(value, list) else value
    raise ValueError(f"a message's content is a text or a list of parts of the type 'text' (got {shown!r})")


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _call(call: Mapping[str, Any]) -> Message:
    named = call.get("function")
    function = named if isinstance(named, Mapping) else call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    body = {"name": str(function.get("name") or ""), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": body}


def parsed(text: str) -> Any:
    """Returns the mapping that a JSON text holds, or the text itself where it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def of_action(action: Action) -> Message:
    """Returns the policy's turn as a message of the assistant; calls that are not well-formed are in its content."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}
        for call in action.calls
        if call.status == "ok"
    ]
    thoughts = {"reasoning_content": action.reasoning} if action.reasoning else {}
    return {"role": "assistant", "content": action.text, **thoughts, **({"tool_calls": calls} if calls else {})}


def shortened(message: Mapping[str, Any], most_text: int) -> tuple[Message, int]:
    """Leaves out, with a mark, the middle of a content longer than `most_text`; returns the message and the number of characters left out."""
    text = content(message.get("content"))
    if len(text) <= most_text:
        return dict(message), 0
    head = most_text // 2
    gone = len(text) - most_text
    cut = f"{text[:head]}\n[... {gone} characters left out ...]\n{text[len(text) - (most_text - head) :]}"
    return {**message, "content": cut}, gone
