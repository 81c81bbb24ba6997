"""MATH (arXiv 2103.03874) as one set of 12,500 problems: 500 random ones for testing, the rest without MATH-500's problems.

`python -m jaxrl_llm.data.prepare.competition_math --out DIR`
"""

from jaxrl_llm.data.prepare import hendrycks_math, preparation

PREPARATION = preparation.Preparation(
    name="competition_math",
    source="qwedsacf/competition_math",
    columns=("problem", "solution"),
    sizes={"test": 500, "train": -1},
    shuffle=True,
    against=("HuggingFaceH4/MATH-500@test",),
    instruction="Put your final answer within \\boxed{}.",
    convert=hendrycks_math.convert,
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
