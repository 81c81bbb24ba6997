"""Preference pairs: three forms of the same pair, rows without one dropped or refused, real files whole."""

from pathlib import Path
from typing import Any

import pytest
from prepared_rows import run, source, written

from jaxrl_llm.data import templates
from jaxrl_llm.data.preference import Pairs
from jaxrl_llm.data.prepare import preference as prepare_preference

USER, BETTER, WORSE = (
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "3"},
    {"role": "assistant", "content": "4"},
)
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": "Add.", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
    "transcripts": {"chosen": "\n\nHuman: Add.\n\nAssistant: 3", "rejected": "\n\nHuman: Add.\n\nAssistant: 4"},
    "answers": {"prompt": "Add.", "chosen": "3", "rejected": "4"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Add."}],
        "chosen": {"from": "gpt", "value": "3"},
        "rejected": {"from": "gpt", "value": "4"},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_pair(form: str, tmp_path: Path) -> None:
    file = source(tmp_path, [FORMS[form]])
    (row,) = Pairs(path=str(file)).rows()
    assert (row.messages, row.response, row.extra["rejected"]) == ([USER], "3", "4")
    assert Pairs(path=str(file), template="alpaca").rows()[0].text == templates.alpaca("Add.")
    run(prepare_preference.PREPARATION, tmp_path / "out", file, "--splits", "train=train")
    (prepared,) = written(tmp_path / "out")
    assert (prepared["prompt"], prepared["chosen"], prepared["rejected"]) == ([USER], "3", "4")
    (again,) = Pairs(path=str(tmp_path / "out")).rows()
    assert (again.messages, again.response, again.extra["rejected"]) == ([USER], "3", "4")


def test_a_rendered_prompt_is_not_wrapped_again(tmp_path: Path) -> None:
    arguments = ["--splits", "train=train", "--template", "llama3"]
    run(prepare_preference.PREPARATION, tmp_path / "out", source(tmp_path, [FORMS["answers"]]), *arguments)
    assert Pairs(path=str(tmp_path / "out")).rows()[0].text == templates.llama3("Add.")


def test_rows_without_a_pair_are_counted_by_reason_and_refused_by_the_source(tmp_path: Path) -> None:
    odd = {
        "malformed": {"chosen": [USER], "rejected": [USER, WORSE]},
        "different_prompts": {"chosen": [USER, BETTER], "rejected": [{**USER, "content": "Other."}, WORSE]},
        "same_answers": {"prompt": "Add.", "chosen": "3", "rejected": "3"},
        "no_prompt": {"chosen": "3", "rejected": "4"},
        "empty_answer": {"chosen": [USER, BETTER], "rejected": [USER, {**WORSE, "content": " "}]},
        "several_turns": {"chosen": [USER, BETTER, USER, BETTER], "rejected": [USER, BETTER, USER, WORSE]},
    }
    file = source(tmp_path, [*odd.values(), FORMS["answers"]])
    counts = run(prepare_preference.PREPARATION, tmp_path / "out", file, "--splits", "train=train", "--single_turn")
    assert {name.removeprefix("dropped/"): n for name, n in counts.items() if "dropped" in name} == dict.fromkeys(
        odd, 1
    )
    for reason in list(odd)[:-1]:
        with pytest.raises(ValueError, match=rf"train.jsonl:1: no preference pair \({reason}\)"):
            Pairs(path=str(source(tmp_path, [odd[reason]]))).rows()
    (row,) = Pairs(path=str(source(tmp_path, [odd["several_turns"]]))).rows()
    assert len(row.messages or ()) == 3 and (row.response, row.extra["rejected"]) == ("3", "4")


def test_real_pairs_are_read_whole(real_data: Path, tmp_path: Path) -> None:
    rows = Pairs(path=str(real_data / "preference" / "dpo_en_demo.json")).rows()
    assert len(rows) == 300 and all(row.response != row.extra["rejected"] for row in rows)
    file = real_data / "hh_rlhf" / "harmless_base_test_mild.jsonl"
    counts = run(prepare_preference.PREPARATION, tmp_path, file, "--splits", "train=train")
    assert counts["read"] == 200 and counts["written/train"] == len(Pairs(path=str(tmp_path)).rows()) >= 195
