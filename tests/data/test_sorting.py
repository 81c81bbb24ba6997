"""Generated sorting: sorted references, disjoint splits, the asked share of wrong characters."""

import pytest

from jaxrl_llm.data.sorting import Sorting


def test_references_are_the_sorted_letters_of_the_text() -> None:
    rows = Sorting(min_length=2, max_length=6, size=400).rows()
    for row in rows:
        letters = (row.text or "").removeprefix("s:").removesuffix("=")
        assert row.text == f"s:{letters}=" and row.reference == row.response == "".join(sorted(letters))
    assert {len(row.reference) for row in rows} == {2, 3, 4, 5, 6}


def test_the_alphabet_gives_the_order() -> None:
    rows = Sorting(alphabet="zyx", max_length=5, size=50).rows()
    assert all(row.reference == "".join(sorted(row.reference, reverse=True)) for row in rows)


def test_splits_are_disjoint_and_the_held_out_answers_vary() -> None:
    train = {row.text for row in Sorting().rows()}
    heldout = Sorting(split="heldout", size=512, seed=3).rows()
    texts = {row.text for row in heldout}
    assert len(texts) == 512 and not texts & train
    assert len({row.reference for row in heldout}) >= 100
    assert len(train) + len(Sorting(split="heldout").rows()) == 10**4


def test_noise_is_the_share_of_wrong_characters() -> None:
    pairs = [
        (a, b)
        for row in Sorting(size=5000, noise=0.2).rows()
        for a, b in zip(row.reference, row.response or "", strict=True)
    ]
    assert abs(sum(a != b for a, b in pairs) / len(pairs) - 0.2) < 0.015  # 5 standard errors of 20,000 characters


def test_strings_too_many_to_list_are_drawn_without_repeats() -> None:
    assert len({row.text for row in Sorting(max_length=9, min_length=9, size=200, split="heldout").rows()}) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_length": 5}, r"1 <= min_length <= max_length \(got 5 and 4\)"),
        ({"alphabet": "aa"}, "each once"),
        ({"noise": -0.1}, r"Sorting.noise must be in \[0, 1\]"),
        ({"alphabet": "ab", "min_length": 1, "max_length": 1, "split": "heldout", "heldout_share": 1e-9}, "is empty"),
    ],
)
def test_bad_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sorting(**options).rows()  # type: ignore[arg-type]
