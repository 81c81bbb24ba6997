"""DeepMath-103K (arXiv 2504.11456): 5,000 random problems, with a system message that asks to box the answer.

`python -m jaxrl_llm.data.prepare.deepmath --out DIR`
"""

from jaxrl_llm.data import templates
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a problem with its difficulty; --no_guessable leaves out yes/no and true/false answers, which can be guessed."""
    answer = str(row["final_answer"]).strip()
    if not answer:
        raise preparation.Drop("no_answer")
    if options.no_guessable and answer.casefold() in ("yes", "no", "true", "false"):
        raise preparation.Drop("guessable_answer")
    difficulty = float(row["difficulty"])
    columns = {"question": row["question"], "final_answer": answer, "difficulty": difficulty}
    return preparation.Item(question=str(row["question"]), truth=answer, columns=columns)


PREPARATION = preparation.Preparation(
    name="deepmath",
    source="zwhe99/DeepMath-103K",
    data_source="math_dapo",
    columns=("question", "final_answer", "difficulty"),
    sizes={"train": 5000},
    shuffle=True,
    convert=convert,
    system=lambda part: templates.STEP_BY_STEP,
    arguments={"--no_guessable": {"action": "store_true", "help": "leave out yes/no and true/false answers"}},
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
