"""GSM8K's two splits in verl's schema: python -m jaxrl_llm.data.prepare.gsm8k --out DIR."""

from jaxrl_llm.data.gsm8k import gold
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a word problem; the gold answer is the number alone, never the worked solution."""
    answer = gold(str(row["answer"]))
    if not answer:
        raise preparation.Drop("no_answer")
    return preparation.Item(question=str(row["question"]), truth=answer, info={"answer": row["answer"]})


PREPARATION = preparation.Preparation(
    name="gsm8k",
    source="openai/gsm8k",
    subset="main",
    data_source="openai/gsm8k",
    splits={"train": "train", "test": "test"},
    columns=("question", "answer"),
    instruction="Put your final answer within \\boxed{}.",
    convert=convert,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
