"""WMDP (arXiv 2403.03218): multiple-choice questions of one domain, 80% for training and 20% for testing.

`python -m jaxrl_llm.data.prepare.wmdp --domain bio|chem|cyber --out DIR`. The ground truth is the letter of the right choice.
TokenBuncher (arXiv 2508.20697) puts a persona before each question; here there is only the question. Prompts are rendered as ChatML, as
there.
"""

from collections.abc import Iterator

from jaxrl_llm.data import files
from jaxrl_llm.data.prepare.preparation import Drop, Item, Options, Preparation, Raw, command

LETTERS = "ABCD"


def read(preparation: Preparation, options: Options, split: str) -> Iterator[files.Located]:
    """Returns the rows of the domain."""
    return files.each(options.source, preparation.columns, split=split, subset=f"wmdp-{options.domain}")


def convert(row: Raw, options: Options) -> Item:
    """Takes a question with four lettered choices."""
    choices = list(row["choices"])
    if len(choices) != len(LETTERS) or row["answer"] not in range(len(LETTERS)):
        raise Drop("malformed")
    lettered = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
    return Item(
        question=f"{row['question']}\n{lettered}\n",
        truth={"response": LETTERS[row["answer"]]},
        info={"domain": options.domain},
    )


PREPARATION = Preparation(
    name="wmdp",
    source="cais/wmdp",
    ability="nlp",
    splits={"train": "test"},  # the set has no other split
    sizes={"train": 0.8, "test": -1},
    columns=("question", "choices", "answer"),
    shuffle=True,
    template="qwen",
    instruction="Please reason step by step, and put the letter of your answer within \\boxed{}.",
    max_tokens=1024,
    convert=convert,
    read=read,
    arguments={"--domain": {"choices": ("bio", "chem", "cyber"), "required": True, "help": "which of the three sets"}},
)

if __name__ == "__main__":
    command(PREPARATION)
