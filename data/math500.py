"""MATH-500: the 500 problems of MATH (arXiv 2103.03874) that PRM800K (arXiv 2305.20050) holds out.

`python -m jaxrl_llm.data.math500 --out DIR`
"""

from jaxrl_llm.data import prepare


def convert(row: prepare.Raw, options: prepare.Options) -> prepare.Item:
    """A problem with the answer column as gold answer."""
    info = {"answer": row["solution"], "unique_id": row["unique_id"]}
    columns = {"level": str(row["level"]), "type": row["subject"]}
    return prepare.Item(question=str(row["problem"]), truth=str(row["answer"]), info=info, columns=columns)


PREPARATION = prepare.Preparation(
    name="math500",
    source="HuggingFaceH4/MATH-500",
    data_source="HuggingFaceH4/MATH-500",
    splits={"test": "test"},
    columns=("problem", "solution", "answer"),
    instruction="Put your final answer within \\boxed{}.",
    convert=convert,
)

if __name__ == "__main__":
    prepare.command(PREPARATION)
