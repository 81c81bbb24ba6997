"""MATH-500: the 500 problems of MATH (arXiv 2103.03874) that PRM800K (arXiv 2305.20050) holds out.

`python -m jaxrl_llm.data.prepare.math500 --out DIR`
"""

from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a problem with the answer column as gold answer."""
    info = {"answer": row["solution"], "unique_id": row["unique_id"]}
    columns = {"level": str(row["level"]), "type": row["subject"]}
    return preparation.Item(question=str(row["problem"]), truth=str(row["answer"]), info=info, columns=columns)


PREPARATION = preparation.Preparation(
    name="math500",
    source="HuggingFaceH4/MATH-500",
    data_source="HuggingFaceH4/MATH-500",
    splits={"test": "test"},
    columns=("problem", "solution", "answer"),
    instruction="Put your final answer within \\boxed{}.",
    convert=convert,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
