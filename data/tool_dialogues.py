"""Recorded dialogues with tools in the form that LLaMA-Factory reads: "human", "gpt", "function_call" and "observation", and the tools' schemas.

A prompt is what was said before the first call. What follows is in `Prompt.extra["recorded"]`, for an environment that replays it
(environments/replayed_tools.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.data import files
from jaxrl_llm.experience import Prompt

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True, kw_only=True)
class ToolDialogues:
    """Reads rows with the columns `conversations`, [{"from", "value"}], and `tools`, the JSON of a list of functions.

    `Prompt.extra` has "tools", the schemas in OpenAI's form, and "recorded": from the first call to the last one, {"name", "arguments", "result"} for
    each call and {"user": text} for what the user says in between. What the assistant said there is left out: the policy speaks for itself.

    Attributes:
      path: a .jsonl, .json, .parquet or .csv file, a folder of such files, or a Hugging Face dataset id.
      split: part of a folder or dataset.
      skip: first dialogues that are left out.
      limit: most dialogues after them; None for all.
      calls_at_least: recorded calls from which on a dialogue is used; those of the files with fewer are left out.
    """

    path: str
    split: str = "train"
    skip: int = 0
    limit: int | None = None
    calls_at_least: int = 1

    def __post_init__(self) -> None:
        components.at_least(self, 1, "calls_at_least", "limit")
        components.at_least(self, 0, "skip")

    def rows(self) -> Sequence[Prompt]:
        """Returns the prompts of the dialogues with enough calls.

        Raises:
          FileNotFoundError: there is nothing at `path`.
          ValueError: the data is malformed, or no dialogue has enough calls; the message names the file and the row.
        """
        found = files.read(
            self.path, ("conversations", "tools"), split=self.split, skip=self.skip, limit=self.limit
        )  # fmt: skip
        read = [
            (number, _dialogue(where, row["conversations"]), tools(where, row["tools"]))
            for number, (where, row) in enumerate(found, start=self.skip)
        ]
        called = [one for one in read if sum("name" in step for step in one[1][1]) >= self.calls_at_least]
        if not called:
            raise ValueError(
                f"none of the {len(found)} dialogues of {self.path!r} has {self.calls_at_least} calls: set ToolDialogues.calls_at_least lower, "
                "or read more rows"
            )
        return [
            Prompt(
                id=f"tool_dialogues/{self.split}/{number}", messages=messages, source="tool_dialogues",
                extra={"tools": schemas, "recorded": recorded},
            )
            for number, (messages, recorded), schemas in called
        ]  # fmt: skip


def tools(where: str, value: Any) -> list[dict[str, Any]]:
    """The schemas of a row in OpenAI's form; raises ValueError where they are none."""
    found = _json(where, "tools", value)
    if not isinstance(found, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in found
    ):
        raise ValueError(f"{where}: 'tools' is the JSON of a list of functions, each with a name (got {str(value)[:80]!r})")  # fmt: skip
    return [{"type": "function", "function": tool} for tool in found]


def _dialogue(where: str, turns: Any) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """The messages before the first call, and what was recorded from there to the last call."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: 'conversations' is a list of turns (got {turns!r})")
    messages, recorded, last = list[dict[str, str]](), list[dict[str, Any]](), 0
    for place, turn in enumerate(turns):
        at, said = f"{where}: turn {place} of 'conversations'", turn if isinstance(turn, Mapping) else {}
        role, text = said.get("from"), said.get("value")
        if not isinstance(text, str) or role not in (*ROLES, "function_call", "observation"):
            raise ValueError(
                f'{at} is {{"from": one of {(*ROLES, "function_call", "observation")}, "value": a text}} (got {str(turn)[:80]!r})'
            )
        if role == "function_call":
            recorded.append(_call(at, text))
            last = len(recorded)
        elif role == "observation":
            open_ = next((step for step in recorded if step.get("result", "") is None), None)
            if open_ is None:
                raise ValueError(f"{at} is a result without a call before it")
            open_["result"] = text
        elif not recorded:
            messages.append({"role": ROLES[role], "content": text})
        elif role == "human":
            recorded.append({"user": text})
    if unanswered := [step["name"] for step in recorded if step.get("result", "") is None]:
        raise ValueError(f"{where}: the calls of {unanswered} have no 'observation' after them")
    return messages, recorded[:last]


def _call(at: str, text: str) -> dict[str, Any]:
    found = _json(at, "value", text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError(f'{at} is no call, {{"name", "arguments"}} (got {text[:80]!r})')
    arguments = found.get("arguments", {})
    arguments = _json(at, "arguments", arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"{at} has arguments that are no JSON object (got {text[:80]!r})")
    return {"name": found["name"], "arguments": arguments, "result": None}


def _json(where: str, name: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{where}: {name!r} is no JSON ({error})") from error
