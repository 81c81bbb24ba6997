"""Parses a completion: thoughts first, then calls of tools in the format of the model's family, then the rest."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.experience import Action, ToolCall

Schemas = Sequence[Mapping[str, Any]]
THINK, THOUGHT = "<think>", "</think>"


class Unreadable(ValueError):
    """The error for a text that is not a readable call."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls of tools.

    Attributes:
      name: the format's name.
      signs: texts that the chat template of a model with this format all contains.
      opening: text before a call; "" where the whole completion is the call.
      closing: text after a call.
      read: parses the text in between, with {tool: {parameter: its schema}}, into name and arguments; raises Unreadable.
    """

    name: str
    signs: tuple[str, ...]
    opening: str
    closing: str
    read: Callable[[str, Mapping[str, Mapping[str, Any]]], tuple[str, Mapping[str, Any]]]


def _no_constant(text: str) -> Any:
    raise Unreadable(f"{text} is no JSON")


def _object(text: str) -> dict[str, Any]:
    """Parses a JSON text that must be an object."""
    try:
        value = json.loads(text.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable("no JSON object")
    return value


def _read_json(text: str, _: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Reads calls of Hermes and Llama 3: {"name": NAME, "arguments": {...}}, or "parameters" in its place."""
    value = _object(text)
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Unreadable("a call has a name and an object of arguments")
    return name, arguments


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read_elements(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Reads calls of Qwen3-Coder: <function=NAME> with <parameter=KEY> elements, whose values are JSON unless the schema says string."""
    found = _FUNCTION.fullmatch(text)
    if found is None or _PARAMETER.sub("", found[2]).strip():
        raise Unreadable("a call is one <function=NAME> that holds <parameter=NAME> elements alone")
    known = parameters.get(found[1], {})
    return found[1], {key: _typed(value, known.get(key)) for key, value in _PARAMETER.findall(found[2])}


def _typed(value: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value


FORMATS = (
    CallFormat(
        name="elements",
        signs=("<tool_call>", "<function="),
        opening="<tool_call>",
        closing="</tool_call>",
        read=_read_elements,
    ),
    CallFormat(name="hermes", signs=("<tool_call>",), opening="<tool_call>", closing="</tool_call>", read=_read_json),
    CallFormat(
        name="llama3", signs=("<|eot_id|>", '"parameters"'), opening="", closing="", read=_read_json
    ),
)  # fmt: skip


def format_of(template: str, name: str | None = None) -> CallFormat | None:
    """Returns the format of the name `name`, or the first whose signs are all in a chat template; None where none are.

    Raises:
      ValueError: there is no format of that name.
    """
    if name is None:
        return next((f for f in FORMATS if all(sign in template for sign in f.signs)), None)
    for form in FORMATS:
        if form.name == name:
            return form
    raise ValueError(f"there is no format of calls {name!r}: choose one of {[f.name for f in FORMATS]}")


def split(text: str, form: CallFormat | None, tools: Schemas | None = None, *, thinking: bool = False) -> Action:
    """Parses a completion's text into an action.

    Args:
      text: the completion without its end token.
      form: how calls are written; None where there are none.
      tools: schemas of the tools that may be called; None accepts any name.
      thinking: whether the prompt already began the thoughts.

    Returns:
      The action. Calls that cannot be read, were not closed or name no known tool are in `calls` with their status, and stay in the text.
    """
    reasoning, rest = thoughts(text, thinking)
    if form is None:
        return Action(text=rest, reasoning=reasoning)
    parameters = None if tools is None else dict(map(_parameters, tools))
    calls, left, place = list[ToolCall](), list[str](), 0
    for start, end, body, closed in _spans(rest, form, lambda body: _call(body, form, None).status == "ok"):
        call = _call(body, form, parameters)
        if not form.opening and not body.startswith("{"):
            break  # a completion without marks that is not JSON is text
        whole = call if closed else replace(call, status="unclosed")
        calls.append(replace(whole, id=f"call_{len(calls)}", raw=rest[start:end]))
        if whole.status == "ok":
            left.append(rest[place:start])
            place = end
    if place:
        rest = "".join([*left, rest[place:]]).strip("\n")
    return Action(text=rest, reasoning=reasoning, calls=tuple(calls))


def thoughts(text: str, thinking: bool = False) -> tuple[str, str]:
    """Returns the thoughts at the beginning of a text, which may start within them, and the rest, which is empty where the thoughts do
    not end."""
    begun = text.lstrip().removeprefix(THINK) if text.lstrip().startswith(THINK) else text if thinking else None
    if begun is None:
        return "", text
    reasoning, _, rest = begun.partition(THOUGHT)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns a tool's name and the schemas of its parameters."""
    function = tool.get("function", tool)
    properties = (function.get("parameters") or {}).get("properties") or {}
    return str(function.get("name", "")), properties


def _spans(text: str, form: CallFormat, readable: Callable[[str], bool]) -> Iterator[tuple[int, int, str, bool]]:
    """Yields (start, end, text in between, whether it was closed) of each call.

    A call ends at the first closing mark before which it can be read, so that its arguments may hold such marks; else at the first mark.
    """
    if not form.opening:
        if text.strip():
            yield 0, len(text), text.strip().removeprefix("<|python_tag|>"), True
        return
    start = text.find(form.opening)
    while start >= 0:
        inside = start + len(form.opening)
        following = text.find(form.opening, inside)
        ends = [inside + found.start() for found in re.finditer(re.escape(form.closing), text[inside:])]
        end = next((e for e in ends if readable(text[inside:e])), None)
        if end is None and ends and not 0 <= following < ends[0]:
            end = ends[0]
        if end is None:
            yield start, (stop := following if following >= 0 else len(text)), text[inside:stop], False
        else:
            stop = end + len(form.closing)
            yield start, stop, text[inside:end], True
        start = text.find(form.opening, stop)


def _call(body: str, form: CallFormat, parameters: Mapping[str, Mapping[str, Any]] | None) -> ToolCall:
    """Parses the text of a call; the call has the status "bad_json" where it cannot be read."""
    try:
        name, arguments = form.read(body, parameters or {})
    except Unreadable:
        return ToolCall(id="", name="", arguments=None, status="bad_json")
    known = parameters is None or name in parameters
    return ToolCall(id="", name=name, arguments=arguments, status="ok" if known else "unknown_tool")
