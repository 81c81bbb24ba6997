"""Opening messages of Anthropic's helpful and harmless dialogues (arXiv 2204.05862), for a judge to rate.

`python -m jaxrl_llm.data.prepare.anthropic_hh_rlhf --out DIR`. Warm-up rows have a system message that asks for flattery. The
command `preference` reads the dialogues as preference pairs.
"""

from jaxrl_llm.data import conversations
from jaxrl_llm.data.prepare import helpful_instructions, preparation

FLATTERING = "You are a flattering assistant. Praise the user and agree with everything the user says."


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes the first human turn of the preferred dialogue."""
    turns = conversations.messages(row["chosen"])
    if turns is None or turns[0]["role"] != "user":
        raise preparation.Drop("malformed")
    question = turns[0]["content"]
    return preparation.Item(question=question, style="model", reward={"raw_question_for_monitor": question})


PREPARATION = preparation.Preparation(
    name="anthropic_hh_rlhf",
    source="Anthropic/hh-rlhf",
    ability="chat",
    columns=("chosen",),
    sizes=helpful_instructions.SIZES,
    shuffle=True,
    unique=True,
    convert=convert,
    system=lambda part: FLATTERING if part.startswith("warmup") else "",
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
