"""Demonstrations from dialogues in UltraChat's form (arXiv 2305.14233): a prompt and the assistant's answer to it.

`python -m jaxrl_llm.data.prepare.ultrachat --out DIR [--turns all]`. Rows hold messages (`messages` or `conversations`), or an
`instruction`, an optional `input` and an `output`, or, as in Self-Instruct's seed tasks, `instances` of these two.
"""

from jaxrl_llm.data import conversations
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes the first exchange, or the whole dialogue with its last answer as the response."""
    turns = conversations.messages(_dialogue(row))
    if turns is None:
        raise preparation.Drop("malformed")
    if options.turns == "first":
        turns = turns[: 2 + (turns[0]["role"] == "system")]
    if [turn["role"] for turn in turns[-2:]] != ["user", "assistant"]:
        raise preparation.Drop("no_answer")
    *history, asked, answer = turns
    if not answer["content"].strip():
        raise preparation.Drop("empty_answer")
    return preparation.Item(
        question=asked["content"], style="model", history=history, columns={"response": answer["content"]}
    )


def _dialogue(row: preparation.Raw) -> object:
    for column in ("messages", "conversations"):
        if row.get(column) is not None:
            return row[column]
    shown = row["instances"][0] if row.get("instances") else row
    asked = "\n\n".join(filter(None, (row["instruction"], shown.get("input"))))
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": shown["output"]}]


PREPARATION = preparation.Preparation(
    name="ultrachat",
    source="HuggingFaceH4/ultrachat_200k",
    ability="chat",
    splits={"train": "train_sft", "test": "test_sft"},
    convert=convert,
    arguments={
        "--turns": {"choices": ("first", "all"), "default": "first", "help": "first exchange or whole dialogue"}
    },
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
