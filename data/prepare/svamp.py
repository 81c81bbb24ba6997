"""SVAMP (arXiv 2103.07191): word problems that are to be read with care, to evaluate on.

`python -m jaxrl_llm.data.prepare.svamp --out DIR`
"""

from jaxrl_llm.data import templates
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes the text and the question about it; a whole number as gold answer has no decimal point."""
    answer = float(row["Answer"])
    question = templates.continued(str(row["Body"]), str(row["Question"]))
    return preparation.Item(
        question=question, truth=str(int(answer) if answer.is_integer() else answer), columns={"type": row["Type"]}
    )


PREPARATION = preparation.Preparation(
    name="svamp",
    source="ChilleD/SVAMP",
    data_source="ChilleD/SVAMP",
    splits={"test": "test"},
    columns=("Body", "Question", "Answer", "Type"),
    instruction="Put your final answer within \\boxed{}.",
    convert=convert,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
