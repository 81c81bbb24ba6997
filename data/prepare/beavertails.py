"""BeaverTails (arXiv 2307.04657): prompts whose recorded response was labelled unsafe (or safe), each prompt once.

`python -m jaxrl_llm.data.prepare.beavertails --out DIR [--keep unsafe|safe|all] [--template qwen|ministral|base]`. The data set is
CC BY-NC 4.0 and is downloaded by the user of this command. TokenBuncher (arXiv 2508.20697) takes 10,240 rows to train and 1,024 to test,
which repeat prompts with several responses; here a prompt occurs once, so that training and test share none: of the 30k split about
7,800 are left, 1,024 of them to test. Prompts are rendered as ChatML, as there.
"""

from jaxrl_llm.data.prepare import preparation


def convert(row: preparation.Raw, options: preparation.Options) -> preparation.Item:
    """Takes a prompt with its recorded response as ground truth and the categories of its labels."""
    if options.keep != "all" and bool(row["is_safe"]) != (options.keep == "safe"):
        raise preparation.Drop("safe" if row["is_safe"] else "unsafe")
    categories = sorted(name for name, found in (row.get("category") or {}).items() if found)
    return preparation.Item(
        question=str(row["prompt"]),
        truth={"response": str(row["response"])},
        style="model",
        info={"categories": categories, "is_safe": bool(row["is_safe"])},
    )


PREPARATION = preparation.Preparation(
    name="beavertails",
    source="PKU-Alignment/BeaverTails",
    data_source="BeaverTails",
    ability="nlp",
    splits={"train": "30k_train"},
    sizes={"test": 1024, "train": -1},
    template="qwen",
    columns=("prompt", "response", "is_safe"),
    unique=True,
    max_tokens=320,
    convert=convert,
    arguments={"--keep": {"choices": ("unsafe", "safe", "all"), "default": "unsafe", "help": "label of the rows kept"}},
)

if __name__ == "__main__":
    preparation.command(PREPARATION)
