"""DeepScaleR (40,000 competition problems): 10,000 random ones, each problem once.

`python -m jaxrl_llm.data.prepare.deepscaler --out DIR [--pass_rate COLUMN] [--against EVAL_FILE ...]`. DARLING (arXiv
2509.02534) trains on 10,000 problems and does not publish its selection; here a column of pass rates, where there is one,
leaves out problems that are always or never solved, which give a group no advantages.
"""

from jaxrl_llm.data import templates
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a problem with the answer column as gold answer."""
    answer = str(row["answer"]).strip()
    if not answer:
        raise preparation.Drop("no_answer")
    info = {"answer": row.get("solution") or ""}
    if options.pass_rate:
        rate = float(row[options.pass_rate])
        if rate <= 0:
            raise preparation.Drop("never_solved")
        if rate >= 1:
            raise preparation.Drop("always_solved")
        info["pass_rate"] = rate
    return preparation.Item(question=str(row["problem"]), truth=answer, info=info)


PREPARATION = preparation.Preparation(
    name="deepscaler",
    source="agentica-org/DeepScaleR-Preview-Dataset",
    columns=("problem", "answer"),
    sizes={"train": 10000},
    shuffle=True,
    unique=True,
    instruction=templates.STEP_BY_STEP,
    convert=convert,
    arguments={"--pass_rate": {"default": "", "help": "column with the share of attempts that solve the problem"}},
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
