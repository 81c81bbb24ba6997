"""WildChat (arXiv 2405.01470): opening messages of conversations in English, of 5 to 200 tokens: 10,000 to train and 200 to test.

`python -m jaxrl_llm.data.prepare.wildchat --out DIR`. Conversations that the data set marks as redacted or toxic are left out;
NoveltyBench (arXiv 2504.05228) also lets a language model select the prompts that allow diverse answers. Rows with a column
`prompt` (NoveltyBench's own selection of 1,000) are read without these filters.
"""

from jaxrl_llm.data import conversations
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes the first message; there is no gold answer, and a reward model scores the response."""
    if row.get("conversation") is None:
        return preparation.Item(question=str(row["prompt"]), style="model", info={"id": str(row["id"])})
    if row["language"] != "English":
        raise preparation.Drop("not_english")
    if row["redacted"]:
        raise preparation.Drop("redacted")
    if row["toxic"]:
        raise preparation.Drop("toxic")
    turns = conversations.messages(row["conversation"])
    if turns is None or turns[0]["role"] != "user":
        raise preparation.Drop("malformed")
    return preparation.Item(question=turns[0]["content"], style="model", info={"id": str(row["conversation_hash"])})


PREPARATION = preparation.Preparation(
    name="wildchat",
    source="allenai/WildChat-1M",
    ability="chat",
    sizes={"train": 10000, "test": 200},
    shuffle=True,
    unique=True,
    tokenizer="Xenova/gpt-4o",
    min_tokens=5,
    max_tokens=200,
    convert=convert,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
