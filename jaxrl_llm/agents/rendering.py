"""Renders conversations to token ids by a tokenizer's chat template, appends new messages to exact earlier ids, and parses completions."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.agents import messages as chat
from jaxrl_llm.agents.calls import FORMATS, THOUGHT, CallFormat, format_of, split, thoughts
from jaxrl_llm.agents.outside import Disguise, OutsideEncoder, hidden_part
from jaxrl_llm.agents.trial import Trial
from jaxrl_llm.data.tokenizer import stop_ids
from jaxrl_llm.experience import Action, Finish, Task

History = Literal["keep", "template"]
Messages = Sequence[Mapping[str, Any]]

# The content of an answer in probes: a private-use character, which their disguises do not use.
_MARK = "\U0010fffd"
_THOUGHT = "\U0010fffc"


@runtime_checkable
class Renderer(Protocol):
    """Converts the messages of a dialogue into token ids, and completions into actions."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn of the policy."""
        ...

    def opening(self, task: Task, said: Messages) -> np.ndarray:
        """Returns token ids int32 [P] of the task and the messages since, from which the policy's turn is sampled."""
        ...

    def bridge(
        self, prior_ids: np.ndarray, finish: Finish, new_messages: Messages, tools: Messages = ()
    ) -> np.ndarray | None:
        """Returns token ids int32 [P] of the next prompt, which begins with `prior_ids`; None where it cannot."""
        ...

    def parse(self, ids: np.ndarray, *, finish: Finish = "stop", tools: Messages | None = None) -> Action:
        """Parses a completion's ids int32 [T] into an action."""
        ...


class Rendering:
    """A tokenizer's chat template, applied such that text from outside never becomes a control token.

    Args:
      tokenizer: a fast transformers tokenizer with a chat template.
      history: what happens where the template would render earlier turns differently from how they were sampled, such as without their thoughts:
        "keep" keeps them as sampled, so that a conversation stays one sequence; with "template" `bridge` returns None there.
      template_kwargs: keyword arguments of the chat template, such as enable_thinking.
      calls: the name of a format of calls in calls.FORMATS; None detects it by the template.

    Raises:
      ValueError: the tokenizer has no chat template, is not a fast one, or its template moves, edits or repeats the content of a role.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: History = "keep",
        template_kwargs: Mapping[str, Any] | None = None,
        calls: str | None = None,
    ) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not isinstance(template, str):
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template (one text): set PretrainedTokenizer.chat_template, "
                "or use an environment of plain text"
            )
        self.tokenizer, self.history, self._template = tokenizer, history, template
        self._kwargs = dict(template_kwargs or {})
        self._outside = OutsideEncoder(tokenizer)
        self.calls: CallFormat | None = format_of(template, calls)
        self.refused: Mapping[str, str] = Trial(self._plain, self._safe, self._ids).run()
        opened = self._plain([{"role": "user", "content": _MARK}]).rpartition(_MARK)[2]
        self._opens_thought = opened.rstrip().endswith("<think>")
        end = self._outside.first(self._tail([{"role": "user", "content": "x"}]))
        self.stop_token_ids = tuple(dict.fromkeys((*stop_ids(tokenizer), *(() if end is None else (end,)))))

    # ------------------------------------------------------------------------------------------------------ rendering
    def _plain(self, messages: Messages, tools: Messages = (), *, open: bool = True) -> str:
        """Returns the template's text, with texts from outside undisguised."""
        return str(
            self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tools=[dict(t) for t in tools] or None, tokenize=False, add_generation_prompt=open,
                **self._kwargs,
            )
        )  # fmt: skip

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _disguised(self, messages: Messages, tools: Messages) -> tuple[Disguise, list[chat.Message], list[Any]]:
        """Returns messages in one form and tools, with their texts disguised."""
        normal = [self._thoughts_apart(chat.normalised(message)) for message in messages]
        disguise = Disguise([normal, list(tools)], self._template + _MARK + _THOUGHT)
        said = []
        for message in normal:
            hidden = {key: disguise.value(held) for key, held in message.items() if key not in ("role", "tool_calls")}
            if "tool_calls" in message:
                parts = [
                    (call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in message["tool_calls"]
                ]
                hidden["tool_calls"] = [_call(*map(disguise.value, part)) for part in parts]
            said.append({"role": message["role"], **hidden})
        return disguise, said, disguise.schema(list(tools))

    def _thoughts_apart(self, message: chat.Message) -> chat.Message:
        """Separates the thoughts at the beginning of an answer's content, where the template uses thoughts."""
        if message["role"] != "assistant" or "reasoning_content" in message or THOUGHT not in self._template:
            return message
        reasoning, rest = thoughts(message["content"])
        return {**message, "content": rest, "reasoning_content": reasoning} if reasoning else message

    def _safe(self, messages: Messages, tools: Messages = (), *, open: bool = True) -> list[int]:
        disguise, said, schemas = self._disguised(messages, tools)
        rendered = self._plain(said, schemas, open=open)
        _check_shown(said, rendered)
        return self._outside.rendered(rendered, disguise)

    def prompt(self, messages: Messages, tools: Messages = ()) -> np.ndarray:
        """Returns token ids int32 [P] of a conversation, of the schemas of `tools`, and of the beginning of the policy's turn.

        Raises:
          ValueError: the template has no place for a role, or a message cannot be rendered.
        """
        self._accept(messages, tools)
        try:
            return np.asarray(self._safe(messages, tools), np.int32)
        except Exception as error:  # a template raises errors of its own and of Jinja
            roles = [message.get("role") for message in messages]
            raise ValueError(f"the chat template does not render messages of the roles {roles}: {error}") from error

    def opening(self, task: Task, said: Messages) -> np.ndarray:
        """Returns token ids int32 [P] of the task's messages and tools, the messages since, and the beginning of the policy's turn."""
        return self.prompt([*task.messages, *said], task.tools)

    def _accept(self, messages: Messages, tools: Messages) -> None:
        """Raises ValueError where the template has no place for a role or for tools."""
        roles = {chat.ROLES.get(str(message.get("role")), "") for message in messages} | ({"tools"} if tools else set())
        for role in roles & self.refused.keys():
            what = "tools" if role == "tools" else f"messages of the role {role!r}"
            raise ValueError(f"the chat template has no place for {what} ({self.refused[role]}): use another template")
        if tools and self.calls is None:
            raise ValueError(
                "there are tools, and the format in which the model calls them is not known by its chat template: name one of "
                f"{[form.name for form in FORMATS]}"
            )

    # ------------------------------------------------------------------------------------------------------ bridges
    def bridge(
        self, prior_ids: np.ndarray, finish: Finish, new_messages: Messages, tools: Messages = ()
    ) -> np.ndarray | None:
        """Returns token ids int32 [P] of the next prompt: exactly `prior_ids`, the turn's end where it was cut off, new messages, the
        next turn's beginning.

        Args:
          prior_ids: int32 [P] the last prompt and its completion, as the sampler had them.
          finish: why the completion ended; the end token is added unless it stopped by one.
          new_messages: the messages since, of any role but the policy's.
          tools: schemas; templates render them at the beginning, so that they change nothing here.

        Returns:
          The ids, or None where the template would render the earlier turns without their thoughts and `history` is "template".

        Raises:
          ValueError: the template has no place for a role, or a message cannot be rendered.
        """
        del tools
        self._accept(new_messages, ())
        if self.history == "template" and self._rewrites(prior_ids, new_messages):
            return None
        disguise, said, _ = self._disguised(new_messages, ())
        tail = self._tail(said)
        ids = self._outside.rendered(tail, disguise)
        end = self._outside.first(tail)
        if finish == "stop" and end is not None and len(prior_ids) and int(prior_ids[-1]) == end:
            ids = ids[ids.index(end) + 1 :]
        return np.concatenate([np.asarray(prior_ids, np.int32), np.asarray(ids, np.int32)])

    def _tail(self, said: Messages) -> str:
        """Returns the template's text from the end of an answer on, where these disguised messages follow.

        The answer is a text, or calls whose results are among the messages, for templates that render results only after their calls.
        """
        calls = [
            _call(m.get("tool_call_id", ""), m.get("name", "x"), {"x": _MARK}) for m in said if m["role"] == "tool"
        ]
        answers: list[Mapping[str, Any]] = [{"role": "assistant", "content": _MARK}]
        answers += [{"role": "assistant", "content": "", "tool_calls": calls}] if calls else []
        problem = ""
        for answer in answers:
            try:
                tail = self._plain([{"role": "user", "content": "x"}, answer, *said]).rpartition(_MARK)[2]
                if "tool_calls" in answer:
                    tail = self._outside.beginning_at(tail, self.stop_token_ids)
                _check_shown(said, tail)
                return tail
            except Exception as error:  # a template raises errors of its own and of Jinja
                problem = problem or str(error)
        roles = [message["role"] for message in said]
        raise ValueError(
            f"the chat template does not go on after an answer with messages of the roles {roles}: {problem}"
        )

    def _rewrites(self, prior_ids: np.ndarray, new_messages: Messages) -> bool:
        """Returns whether the template leaves thoughts out once `new_messages` follow, and there are thoughts in `prior_ids`."""
        roles = tuple(chat.ROLES[str(message["role"])] for message in new_messages)
        return self._forgets(roles) and THOUGHT in self.tokenizer.decode(prior_ids, skip_special_tokens=False)

    @functools.cached_property
    def _forgotten(self) -> dict[tuple[str, ...], bool]:
        return {}

    def _forgets(self, roles: tuple[str, ...]) -> bool:
        """Returns whether the template renders the thoughts of a last answer, and leaves them out where messages of these roles follow."""
        if roles not in self._forgotten:
            asked, after = {"role": "user", "content": "x"}, [{"role": role, "content": "y"} for role in roles]
            answers: list[Mapping[str, Any]] = [
                {"role": "assistant", "content": "z", "reasoning_content": _THOUGHT},
                {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nz"},
            ]
            self._forgotten[roles] = any(
                _THOUGHT in self._plain([asked, said], open=False)
                and _THOUGHT not in self._plain([asked, said, *after])
                for said in answers
            )
        return self._forgotten[roles]

    # ------------------------------------------------------------------------------------------------------ completions
    def parse(self, ids: np.ndarray, *, finish: Finish = "stop", tools: Messages | None = None) -> Action:
        """Parses a completion into an action.

        Args:
          ids: int32 [T] sampled ids, the end token included.
          finish: why the completion ended.
          tools: schemas of the tools that may be called; None accepts any name.
        """
        kept = [int(i) for i in ids]
        if kept and kept[-1] in self.stop_token_ids:
            kept = kept[:-1]
        text = self.tokenizer.decode(kept, skip_special_tokens=False) if kept else ""
        return replace(split(text, self.calls, tools, thinking=self._opens_thought), finish=finish)


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_shown(said: Messages, rendered: str) -> None:
    """Raises ValueError where the rendering lacks the content of a message that is not the policy's."""
    shown = hidden_part(rendered)
    for message in said:
        if message["role"] != "assistant" and hidden_part(message["content"]) not in shown:
            raise ValueError(f"it leaves out what the role {message['role']!r} says")
