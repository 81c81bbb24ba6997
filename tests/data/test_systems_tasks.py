"""The generated tasks of DARLING and Classmate-CoT: what is right, what demonstrations say, and that splits share nothing."""

from collections import Counter

import pytest

from jaxrl_llm.data.hinted import Hinted
from jaxrl_llm.data.subsequences import Subsequences, in_order, raw_score


def test_any_letters_in_their_order_are_right() -> None:
    (prompt,) = Subsequences(size=1, seed=3).rows()
    letters = prompt.reference
    assert prompt.text == f"{letters}:" and len(set(letters)) == 7
    right = [letters[0] + letters[3] + letters[6], letters[4:7], prompt.response]
    wrong = [letters[3] + letters[0] + letters[6], letters[:2], letters[:4], letters[0] * 3, "", "zzz"]
    assert [in_order(prompt, text) for text in right] == [1, 1, 1]
    assert [in_order(prompt, text) for text in wrong] == [0] * 6
    assert (raw_score(prompt, right[0]), raw_score(prompt, wrong[0])) == (1, -3)


def test_demonstrations_name_every_choice_alike() -> None:
    rows = Subsequences(size=3000, length=4, alphabet="abcd", chosen=2).rows()
    places = Counter(tuple(r.reference.index(c) for c in r.response or "") for r in rows)
    assert len(places) == 6 and max(places.values()) < 1.3 * min(places.values())


def test_held_out_tasks_share_no_prompt_with_training() -> None:
    for kind in (lambda split: Subsequences(split=split, size=500), lambda split: Hinted(split=split)):
        train, held = ({row.text for row in kind(split).rows()} for split in ("train", "heldout"))
        assert train and held and not train & held


def test_a_hint_is_never_the_right_letter_and_thought_and_output_follow_the_shares() -> None:
    rows = Hinted(size=4000, mention_share=0.25, follow_share=0.4, faithful_share=0.0).rows()
    said = [(r.response or "").split("</think>") for r in rows]
    assert all(r.extra["hinted"] != r.reference == "abcd"[(int(r.text[0]) + int(r.text[1])) % 4] for r in rows)
    mentions = sum(t == r.extra["hinted"] for r, (t, _) in zip(rows, said)) / len(rows)
    follows = sum(o == r.extra["hinted"] for r, (_, o) in zip(rows, said)) / len(rows)
    assert abs(mentions - 0.25) < 0.03 and abs(follows - 0.4) < 0.03
    assert all(
        t == o for t, o in ((r.response or "").split("</think>") for r in Hinted(size=200, faithful_share=1.0).rows())
    )


@pytest.mark.parametrize("fields", [{"chosen": 7}, {"alphabet": "aab"}, {"size": 0}])
def test_a_task_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Subsequences"):
        Subsequences(**fields)  # type: ignore[arg-type]
