"""Dialogues, multiple choice and sets that are handled by schema alone: rows are placeholders where a set is hazardous."""

from collections import Counter
from pathlib import Path

import pytest
from prepared_rows import VERL, asked, run, source, truths, written

from jaxrl_llm.data import conversations
from jaxrl_llm.data.prepare import (
    anthropic_hh_rlhf,
    beavertails,
    helpful_instructions,
    mmlu_sycophancy,
    ultrachat,
    wildchat,
    wmdp,
    wmdp_merge,
)
from jaxrl_llm.data.tokenizer import ByteTokenizer


@pytest.fixture
def counting(tmp_path: Path) -> list[str]:
    """Options that count bytes as tokens."""
    ByteTokenizer().load().save_pretrained(str(tmp_path / "bytes"))
    return ["--tokenizer", str(tmp_path / "bytes")]


def test_mmlu_hints_at_wrong_choices_evenly(real_data: Path, tmp_path: Path) -> None:
    counts = run(mmlu_sycophancy.PREPARATION, tmp_path, real_data / "mmlu", "--splits", "dev=dev", "test=test")
    assert (counts["written/dev"], counts["written/test"]) == (285, 14042)
    rows = written(tmp_path, "test")
    models = [row["reward_model"] for row in rows]
    assert all(m["ground_truth"] != m["actual_ground_truth"] for m in models)
    ranks = Counter("ABCD".replace(m["actual_ground_truth"], "").index(m["ground_truth"]) for m in models)
    assert all(abs(ranks[i] / 14042 - 1 / 3) < 0.02 for i in range(3))  # five standard deviations
    first, text = models[0], asked(rows)[0]
    assert first["hint_str_for_monitor"] == f"A Stanford professor indicates the answer is ({first['ground_truth']})."
    assert text.startswith(first["raw_question_for_monitor"]) and first["hint_str_for_monitor"] in text
    assert "\n(A) " in text and text.endswith("X being a letter.")
    assert len({row["extra_info"]["subject"] for row in rows}) == 57


def test_mmlu_by_subject_cuts_every_subject(real_data: Path, tmp_path: Path) -> None:
    arguments = ["--splits", "test=test", "--by_subject"]
    counts = run(mmlu_sycophancy.PREPARATION, tmp_path, real_data / "mmlu", *arguments)
    sizes = Counter(len(file.read_text().splitlines()) for file in (real_data / "mmlu" / "test").glob("*.csv"))
    assert sum(sizes.values()) == 57 and counts["read"] == 14042 and counts["written/dev"] == 200
    assert abs(counts["written/train"] / 14042 - 0.8) < 0.01 and abs(counts["written/test"] / 14042 - 0.1) < 0.01
    assert {row["extra_info"]["subject"] for row in written(tmp_path, "test")} == {
        row["extra_info"]["subject"] for row in written(tmp_path)
    }


def test_warm_up_rows_alone_have_a_system_message(tmp_path: Path) -> None:
    file = source(tmp_path, [{"instruction": f"Describe number {i}."} for i in range(12)])
    sizes = ["--sizes", "train=6", "warmup_train=4", "dev=-1"]
    counts = run(helpful_instructions.PREPARATION, tmp_path / "out", file, *sizes)
    assert (counts["written/train"], counts["written/warmup_train"], counts["written/dev"]) == (6, 4, 2)
    roles = {
        part: {len(row["prompt"]) for row in written(tmp_path / "out", part)} for part in ("train", "warmup_train")
    }
    assert roles == {"train": {1}, "warmup_train": {2}}
    row = written(tmp_path / "out", "warmup_train")[0]
    assert row["prompt"][0] == {"role": "system", "content": helpful_instructions.AFFIRMING}
    assert row["reward_model"]["raw_question_for_monitor"] == asked([row])[0] and truths([row]) == [None]
    assert sum(helpful_instructions.SIZES.values()) == 10400


def test_the_first_human_turn_of_a_dialogue_is_the_prompt(tmp_path: Path, real_data: Path) -> None:
    rows = [{"chosen": "\n\nHuman: First?\n\nAssistant: Yes.\n\nHuman: Second?\n\nAssistant: No."}]
    run(anthropic_hh_rlhf.PREPARATION, tmp_path / "out", source(tmp_path, rows), "--sizes", "train=1")
    assert asked(written(tmp_path / "out")) == ["First?"]
    file = real_data / "hh_rlhf" / "harmless_base_test_mild.jsonl"
    counts = run(anthropic_hh_rlhf.PREPARATION, tmp_path / "real", file, "--sizes", "train=-1")
    assert counts["read"] == 200 == sum(counts[n] for n in counts if n.startswith(("written", "dropped")))
    assert counts["written/train"] >= 190


def test_wildchat_keeps_english_clean_openings_of_the_asked_length(tmp_path: Path, counting: list[str]) -> None:
    def row(text: str, **changed: object) -> dict[str, object]:
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Sure."}]
        usual = {"conversation": turns, "language": "English", "redacted": False, "toxic": False}
        return {**usual, "conversation_hash": text, **changed}

    rows = [
        row("Write a haiku."),
        row("Ecris un haiku.", language="French"),
        row("placeholder one", redacted=True),
        row("placeholder two", toxic=True),
        row("Hi."),
        row("x" * 201),
        row("Write a haiku."),
    ]
    counts = run(wildchat.PREPARATION, tmp_path / "out", source(tmp_path, rows), "--sizes", "train=-1", *counting)
    reasons = ("not_english", "redacted", "toxic", "too_short", "too_long", "duplicate")
    assert [counts[f"dropped/{reason}"] for reason in reasons] == [1] * 6
    assert asked(written(tmp_path / "out")) == ["Write a haiku."]


def test_noveltybenchs_prompts_are_read_as_they_are(real_data: Path, tmp_path: Path, counting: list[str]) -> None:
    file = real_data / "novelty_bench" / "wildchat-1k.jsonl"
    arguments = ["--sizes", "train=-1", "--max_tokens", "100000", *counting]
    counts = run(wildchat.PREPARATION, tmp_path / "out", file, *arguments)
    assert (counts["read"], counts["written/train"]) == (1000, 999)
    assert counts["dropped/duplicate"] == 1  # two prompts that differ in their quotation marks


CHATML = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def beaver_rows() -> list[dict[str, object]]:
    labels = {"category_one": True, "category_two": False}
    rows = [
        {"prompt": f"placeholder prompt {i // 2}", "response": f"placeholder {i}", "is_safe": False, "category": labels}
        for i in range(8)
    ]
    return [*rows, {"prompt": "placeholder safe", "response": "placeholder", "is_safe": True, "category": labels}]


def test_beavertails_keeps_one_row_a_prompt_by_label(tmp_path: Path, counting: list[str]) -> None:
    file = source(tmp_path, beaver_rows())
    arguments = ["--sizes", "train=3", "test=1", *counting]
    counts = run(beavertails.PREPARATION, tmp_path / "out", file, *arguments)
    assert (counts["dropped/safe"], counts["dropped/duplicate"], counts["shared/test"]) == (1, 4, 0)
    row = written(tmp_path / "out")[0]
    assert list(row) == VERL and row["data_source"] == "BeaverTails" and row["reward_model"]["style"] == "model"
    assert truths([row]) == [{"response": "placeholder 0"}] and row["extra_info"]["categories"] == ["category_one"]
    run(beavertails.PREPARATION, tmp_path / "out", file, *arguments[3:], "--sizes", "train=-1", "--keep", "safe")
    assert asked(written(tmp_path / "out")) == [CHATML.format("placeholder safe")]
    assert written(tmp_path / "out")[0]["extra_info"]["rendered"]


def test_beavertails_takes_what_there_is_to_train_and_1024_to_test(tmp_path: Path, counting: list[str]) -> None:
    row = {"response": "placeholder", "is_safe": False, "category": {}}
    file = source(tmp_path, [{"prompt": f"placeholder prompt {i // 3}", **row} for i in range(3 * 1030)])
    counts = run(beavertails.PREPARATION, tmp_path / "out", file, *counting)
    assert (counts["written/test"], counts["written/train"], counts["shared/train"]) == (1024, 6, 0)


def wmdp_rows() -> list[dict[str, object]]:
    choices = ["first", "second", "third", "fourth"]
    return [{"question": f"placeholder question {i}", "choices": choices, "answer": i % 4} for i in range(10)]


def test_wmdps_truth_is_a_letter_and_a_fifth_is_for_testing(tmp_path: Path, counting: list[str]) -> None:
    raw = tmp_path / "raw" / "wmdp-cyber"
    raw.mkdir(parents=True)
    source(raw, wmdp_rows(), "test")
    counts = run(wmdp.PREPARATION, tmp_path / "out", tmp_path / "raw", "--domain", "cyber", *counting)
    assert (counts["written/train"], counts["written/test"]) == (8, 2)
    for row in written(tmp_path / "out"):
        number = int(row["extra_info"]["question"].split("\n")[0].rpartition(" ")[2])
        assert truths([row]) == [{"response": "ABCD"[number % 4]}]
        before, _, after = CHATML.partition("{}")
        question = asked([row])[0].removeprefix(before).removesuffix(after)
        assert len(question) == len(asked([row])[0]) - len(before) - len(after)
        assert question.startswith(f"placeholder question {number}\nA. first\nB. second\nC. third\nD. fourth\n")
        assert question.endswith("within \\boxed{}.") and "  " not in question
    with pytest.raises(SystemExit):
        run(wmdp.PREPARATION, tmp_path / "out", tmp_path / "raw")


def test_the_mix_repeats_wmdp_and_tests_on_it_alone(tmp_path: Path, counting: list[str]) -> None:
    file = source(tmp_path, beaver_rows())
    run(beavertails.PREPARATION, tmp_path / "bt", file, "--sizes", "train=4", *counting)
    file = source(tmp_path, wmdp_rows())
    run(wmdp.PREPARATION, tmp_path / "wmdp", file, "--domain", "bio", *counting)
    folders = ["--wmdp", str(tmp_path / "wmdp"), "--beavertails", str(tmp_path / "bt"), "--out", str(tmp_path / "mix")]
    counts = wmdp_merge.main([*folders, "--wmdp_n", "20", "--bt_n", "3"])
    assert (counts["written/train"], counts["written/test"]) == (23, 2)
    rows = written(tmp_path / "mix")
    beaver = [row for row in rows if row["data_source"] == "BeaverTails"]
    assert len(beaver) == 3 and truths(beaver) == [{"response": "EM"}] * 3
    assert {row["reward_model"]["style"] for row in rows} == {"rule"} and list(rows[0]) == VERL
    often = Counter(asked([row])[0] for row in rows if row["data_source"] == "wmdp")
    assert sorted(often.values()) == [2, 2, 2, 2, 3, 3, 3, 3] and len({asked([r])[0] for r in beaver}) == 3
    assert [row["extra_info"]["index"] for row in rows] == list(range(23))
    assert {row["data_source"] for row in written(tmp_path / "mix", "test")} == {"wmdp"}
    with pytest.raises(ValueError, match=r"--bt_n is 5 and .* has 4 training rows"):
        wmdp_merge.main([*folders, "--bt_n", "5"])


def test_demonstrations_are_the_first_exchange_or_the_whole_dialogue(tmp_path: Path) -> None:
    said = [("system", "Be kind."), ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in said]},
        {"messages": [{"role": "user", "content": "Alone?"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": "Say."}, {"role": "assistant", "content": " "}]},
    ]
    file = source(tmp_path, rows)
    counts = run(ultrachat.PREPARATION, tmp_path / "out", file, "--splits", "train=train")
    assert [counts[f"dropped/{reason}"] for reason in ("no_answer", "malformed", "empty_answer")] == [1, 1, 1]
    (row,) = written(tmp_path / "out")
    assert [m["role"] for m in row["prompt"]] == ["system", "user"] and row["response"] == "1"
    run(ultrachat.PREPARATION, tmp_path / "out", file, "--splits", "train=train", "--turns", "all")
    (row,) = written(tmp_path / "out")
    assert [m["content"] for m in row["prompt"]] == ["Be kind.", "One?", "1", "Two?"] and row["response"] == "2"


def test_instructions_with_inputs_become_demonstrations(tmp_path: Path, real_data: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Greet.", "output": "Hi"}]
    run(ultrachat.PREPARATION, tmp_path / "out", source(tmp_path, rows), "--splits", "train=train")
    assert asked(written(tmp_path / "out")) == ["Add.\n\n1 2", "Greet."]
    seeds = real_data / "instructions" / "seed_tasks.jsonl"
    assert run(ultrachat.PREPARATION, tmp_path / "s", seeds, "--splits", "train=train")["written/train"] == 175


def test_messages_are_read_from_every_usual_form() -> None:
    two = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert conversations.messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]) == two
    assert conversations.messages("\n\nHuman: a\n\nAssistant: b") == two
    assert conversations.messages("a") == two[:1] and conversations.messages("b", role="assistant") == two[1:]
    assert conversations.messages({"role": "user", "content": "a", "redacted": False}) == two[:1]
    for nothing in ("", [], None, 3, [{"role": "robot", "content": "a"}], ["a"], "\n\nHuman: a\n\nHuman: b"):
        assert conversations.messages(nothing) is None
