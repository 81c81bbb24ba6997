"""Preference pairs in verl's schema: `python -m jaxrl_llm.data.prepare.preference --out DIR [--source Anthropic/hh-rlhf] [--single_turn]`.

Rows that hold no pair are left out and counted by reason.
"""

from jaxrl_llm.data.preference import pair
from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a pair, as columns `chosen` and `rejected` beside verl's columns."""
    held = pair(row)
    *history, last = held.asked
    if options.single_turn and history:
        raise preparation.Drop("several_turns")
    return preparation.Item(
        question=last["content"],
        style="model",
        history=history,
        columns={"chosen": held.chosen, "rejected": held.rejected},
    )


PREPARATION = preparation.Preparation(
    name="preference",
    source="HuggingFaceH4/ultrafeedback_binarized",
    ability="chat",
    splits={"train": "train_prefs", "test": "test_prefs"},
    columns=("chosen", "rejected"),
    convert=convert,
    arguments={"--single_turn": {"action": "store_true", "help": "leave out dialogues of several turns"}},
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
