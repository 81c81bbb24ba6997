"""Prompt templates by name: functions from a question to a text, or to chat messages for the tokenizer's own template.

Sources: r1_zero is the prompt of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), which ends inside the thinking; alpaca is that
of Stanford Alpaca without input; qwen (ChatML), llama3 and ministral are those models' formats as plain text, with
Qwen2.5's default system message where the format has one; base is TokenBuncher's for pretrained models (arXiv
2508.20697); qwen_math has Qwen2.5-Math's system message.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Template = Callable[[str], str | list[dict[str, str]]]

HELPFUL = "You are a helpful assistant."
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
WITH_PYTHON = "Reason step by step, compute with the tool `python`, and put the final answer within \\boxed{}."
WITH_BLOCKS = (
    "Reason step by step. To compute, write Python in a block that begins with ```python and ends with ```, and stop: it is run, and you are told "
    "what it prints. Then put the final answer within \\boxed{}."
)
STEP_BY_STEP_SHORT = "Reason step by step, and put the final answer within \\boxed{}."


def chat(question: str) -> list[dict[str, str]]:
    """Puts the question in the user's message; the tokenizer's chat template does the rest."""
    return [{"role": "user", "content": question}]


def chat_boxed(question: str) -> list[dict[str, str]]:
    """Puts the question and the request to reason and box the answer in the user's message."""
    return chat(f"{question}\n{STEP_BY_STEP}")


def chat_boxed_short(question: str) -> list[dict[str, str]]:
    """Puts the question and a shorter request to reason and box the answer in the user's message."""
    return chat(f"{question}\n{STEP_BY_STEP_SHORT}")


def chat_boxed_python(question: str) -> list[dict[str, str]]:
    """Puts the question and the request to compute with the tool `python` (environments/python_tool.py) in the user's message."""
    return chat(f"{question}\n{WITH_PYTHON}")


def chat_boxed_blocks(question: str) -> list[dict[str, str]]:
    """Puts the question in the user's message, which says that blocks of Python are run (environments/code_blocks.py)."""
    return chat(f"{question}\n{WITH_BLOCKS}")


def question_only(question: str) -> str:
    """Returns the question alone."""
    return question


def base(question: str) -> str:
    """Writes a question and an answer block, for models that were only pretrained."""
    return f"### Question:\n{question}\n\n### Answer:\n"


def r1_zero(question: str) -> str:
    """Writes the conversation whose response begins inside <think> and gives the answer in <answer> tags."""
    return (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        f"User: {question}\nAssistant: <think>"
    )


def alpaca(question: str) -> str:
    """Writes an instruction and a response heading."""
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{question}\n\n### Response:\n"
    )


def qwen(question: str) -> str:
    """Writes ChatML as plain text."""
    return _chatml(HELPFUL, question)


def qwen_math(question: str) -> str:
    """Writes ChatML as plain text, with the request to reason and box the answer as the system message."""
    return _chatml(STEP_BY_STEP, question)


def _chatml(system: str, question: str) -> str:
    turns = (("system", system), ("user", question))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def llama3(question: str) -> str:
    """Writes Llama 3's headers as plain text, including its begin-of-text token."""
    turns = (("system", HELPFUL), ("user", question))
    asked = "".join(f"{_header(role)}{text}<|eot_id|>" for role, text in turns)
    return f"<|begin_of_text|>{asked}{_header('assistant')}"


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def ministral(question: str) -> str:
    """Writes Mistral's instruction marks as plain text, including its begin-of-sequence token; the format has no system turn."""
    return f"<s>[INST]{question}[/INST]"


TEMPLATES: Mapping[str, Template] = {
    function.__name__: function
    for function in (
        chat,
        chat_boxed,
        chat_boxed_short,
        chat_boxed_python,
        chat_boxed_blocks,
        question_only,
        base,
        r1_zero,
        alpaca,
        qwen,
        qwen_math,
        llama3,
        ministral,
    )
}


def continued(context: str, question: str) -> str:
    """Returns a text and a question that goes on from it; the text ends with a full stop where it has no mark of its own."""
    before = context.strip()
    return f"{before}{'' if before.endswith(('.', '?', '!')) else '.'} {question.strip()}"


def named(template: str | Template, owner: str) -> Template:
    """Returns the template of a name; a function is returned unchanged.

    Args:
      template: a name of TEMPLATES, or a function.
      owner: the component that has the field, for the error message.

    Raises:
      ValueError: the name is unknown.
    """
    if callable(template):
        return template
    if template not in TEMPLATES:
        raise ValueError(f"{owner}.template must be one of {sorted(TEMPLATES)} or a function (got {template!r})")
    return TEMPLATES[template]


def fields(template: Template, question: str) -> dict[str, Any]:
    """Returns the fields of a Prompt that hold the question: {"text"} or {"messages"}."""
    asked = template(question)
    return {"text": asked} if isinstance(asked, str) else {"messages": asked}


@dataclass(frozen=True, kw_only=True)
class Templated:
    """A dataset whose questions become prompts by a template.

    Attributes:
      template: name of a prompt template (data/templates.py), or a function question -> text or messages.
    """

    template: str | Template = "chat"

    def __post_init__(self) -> None:
        named(self.template, type(self).__name__)

    def asked(self, question: str) -> dict[str, Any]:
        """Returns the fields of a Prompt that hold the question."""
        return fields(named(self.template, type(self).__name__), question)


def rerendered(template: str | Template, messages: list[dict[str, str]], owner: str) -> dict[str, Any]:
    """Returns the fields of a Prompt for chat messages, through the template unless that is "chat".

    Args:
      template: name or function.
      messages: chat messages; the last one is the user's.
      owner: the component that has the template field, for the error message.

    Raises:
      ValueError: the template takes a single question, and there are several messages.
    """
    if template == "chat":
        return {"messages": messages}
    if len(messages) != 1:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"{owner}.template={template!r} takes one message and the row has {roles}: set it to 'chat', which leaves "
            "messages to the tokenizer's chat template"
        )
    return fields(named(template, owner), messages[0]["content"])
