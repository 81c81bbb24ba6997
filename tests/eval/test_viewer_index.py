"""The viewer's index finds what a plain reading of the whole file finds, while the file grows and is replaced."""

import json

import numpy as np
import pytest
from viewer_rows import record, rollout, write_results, write_run

from jaxrl_llm.eval.viewer import query, rollout_index
from jaxrl_llm.eval.viewer.query import Query
from jaxrl_llm.eval.viewer.rollout_index import RolloutIndex

WORDS = ["Carry", "the", "digit", "naïve", "ÜBER", "x²", 'a "quote"', "tab\there", "back\\slash", "</think>", "\u2028"]


def indexed(file):
    index = RolloutIndex(file)
    for _ in index.update():
        pass
    return index


def many(folder, count=400, seed=0):
    rng = np.random.default_rng(seed)
    steps: dict[int, list] = {}
    for i in range(count):
        step = i // 40 + 1
        reward = None if rng.random() < 0.1 else float(rng.integers(-2, 3))
        streams = {"token": ["zebra"], "logprob": [-1.0]}
        more = {"finish": "length"} if rng.random() < 0.3 else {}
        text = " ".join(rng.choice(WORDS, 5))
        steps.setdefault(step, []).append(rollout(f"p{i // 4}", text, reward, **more, streams=streams))
    return write_run(folder, steps)


def plainly(file):
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_rows_are_read_back_whole_and_without_their_streams(tmp_path):
    index = indexed(many(tmp_path) / "rollouts.jsonl")
    expected = plainly(index.file)
    assert len(index) == 400
    found = index.rows([0, 399], streams=True)
    assert [(r["response"], r["streams"], r["step"]) for r in found] == [
        (expected[i]["response"], expected[i]["streams"], expected[i]["step"]) for i in (0, 399)
    ]
    assert index.rows([7])[0]["streams"] is None and index.rows([7])[0]["response"] == expected[7]["response"]


@pytest.mark.parametrize(
    "text", ["carry THE", "naïve", "ÜBER", 'a "q', "b\there", "k\\s", "x", "²", "question p99", "zebra", "no"]
)
def test_a_search_finds_what_reading_every_row_finds(tmp_path, text):
    index = indexed(many(tmp_path) / "rollouts.jsonl")
    lower = text.encode().lower()
    texts = [" ".join(r[n] for n in ("response", "question", "reference", "prompt")) for r in plainly(index.file)]
    expected = [i for i, t in enumerate(texts) if lower in t.encode().lower()]
    found, settled = index.search(np.arange(len(index)), text, seconds=60, enough=1000)
    assert (found, settled) == (expected, 400)
    assert expected or text in ("zebra", "no")  # what streams hold is no text


def test_a_search_stops_when_it_has_enough_and_goes_on_from_there(tmp_path):
    index = indexed(many(tmp_path) / "rollouts.jsonl")
    among, found = np.arange(len(index)), []
    while len(among):
        some, settled = index.search(among, "the", seconds=60, enough=7)
        assert len(some) <= 7
        found += some
        among = among[settled:]
    assert found == index.search(np.arange(len(index)), "the", seconds=60, enough=1000)[0]
    assert index.search(np.arange(len(index)), "the", seconds=0, enough=1000)[1] < 400  # out of time


def test_filters_and_orders_agree_with_a_plain_reading(tmp_path):
    index = indexed(many(tmp_path) / "rollouts.jsonl")
    rows = plainly(index.file)
    expected = [i for i, r in enumerate(rows) if r["step"] == 3 and r["finish"] == "length" and (r["reward"] or 0) >= 1]
    assert query.rows_of(index, Query(step=3, finish="length", low=1)).tolist() == expected
    assert query.rows_of(index, Query(finish="unknown")).tolist() == []
    rewards = {
        p: [r["reward"] for r in rows if r["prompt"] == p and r["reward"] is not None]
        for p in {r["prompt"] for r in rows}
    }
    means = {p: np.mean(x or [0]) for p, x in rewards.items()}
    spreads = {p: np.var(x or [0]) for p, x in rewards.items()}
    for order, key in (
        ("low reward", means),
        ("high reward", {p: -x for p, x in means.items()}),
        ("spread", {p: -x for p, x in spreads.items()}),
    ):
        found = [g["prompt"] for g in query.groups(index, Query(order=order))["groups"]]
        assert [key[p] for p in found] == pytest.approx(sorted(key.values())[: len(found)])


def test_pages_of_groups_cover_everything_once(tmp_path):
    index = indexed(many(tmp_path) / "rollouts.jsonl")
    for asked, total in ((Query(), 100), (Query(text="the"), None)):
        seen, rows, after = [], 0, 0
        while after is not None:
            page = query.groups(index, asked, after)
            seen += [g["prompt"] for g in page["groups"]]
            rows += sum(sum(g["matched"]) for g in page["groups"])
            after = page["next"]
        expected = {r["prompt"] for r in plainly(index.file) if asked.text in r["response"].lower()}
        assert set(seen) == expected and len(set(seen)) == (total or len(expected))
        assert rows == sum(asked.text in r["response"].lower() for r in plainly(index.file))


def test_a_growing_file_is_read_on_and_a_torn_line_waits(tmp_path):
    file = write_run(tmp_path, {1: [rollout("a", "one", 1)]}) / "rollouts.jsonl"
    index = indexed(file)
    whole = file.read_bytes()
    file.write_bytes(whole + whole.replace(b"one", b"two")[:-9])
    list(index.update())
    assert len(index) == 1 and index.progress() < 1
    with file.open("ab") as opened:
        opened.write(whole[-9:])
    list(index.update())
    assert [r["response"] for r in index.rows([0, 1])] == ["one", "two"] and index.progress() == 1


def test_a_replaced_file_is_indexed_anew(tmp_path):
    file = write_run(tmp_path, {1: [rollout("a", "one", 1)], 2: [rollout("a", "two", 1)]}) / "rollouts.jsonl"
    index = indexed(file)
    write_run(tmp_path / "other", {1: [rollout("b", "three", None)]})
    (tmp_path / "other" / "rollouts.jsonl").replace(file)  # as a run that resumes does
    with pytest.raises(LookupError, match="reload"):
        index.rows([1])
    list(index.update())
    assert len(index) == 1 and index.rows([0])[0]["response"] == "three"


def test_lines_of_another_version_are_counted_and_the_rest_kept(tmp_path):
    file = write_results(tmp_path, [record("a", 0, "one", 1.0)]) / "samples.jsonl"
    with file.open("a") as opened:
        opened.write('{"id": "b", "sample": 0, "kind": "greedy"}\nnot json\n[1]\n')
    index = indexed(file)
    assert len(index) == 1
    assert index.unread["no JSON"] == 1 and sum(index.unread.values()) == 3
    assert any("no response, score, scores: results of another version" in why for why in index.unread)


def test_two_sides_are_compared_on_the_prompts_of_both(tmp_path):
    a = write_results(
        tmp_path / "a",
        [
            record(p, i, "", x)
            for p, xs in {"p": [0, 1], "q": [1, 1], "r": [0, None], "only": [1]}.items()
            for i, x in enumerate(xs)
        ],
    )
    b = write_results(
        tmp_path / "b", [record(p, 0, "", x) for p, x in {"r": 1.0, "q": 0.5, "p": 0.5, "new": 1.0}.items()]
    )
    sides = [(indexed(f / "samples.jsonl"), Query()) for f in (a, b)]
    found = query.compare(*sides)
    assert [(one["prompt"], one["a"], one["b"]) for one in found["prompts"]] == [
        ("r", 0, 1),
        ("q", 1, 0.5),
        ("p", 0.5, 0.5),
    ]
    assert (found["shared"], found["only_a"], found["only_b"]) == (3, 1, 1)
    change = np.array([1, -0.5, 0])
    assert found["summary"]["difference"] == pytest.approx(
        {"mean": change.mean(), "ci95": 1.96 * change.std(ddof=1) / np.sqrt(3), "n": 3}
    )


def test_what_hashes_to_one_bit_is_still_told_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(rollout_index, "SIGNATURE", 8)  # every signature is full
    index = indexed(
        write_run(tmp_path, {1: [rollout("a", "abc" * 9, 1), rollout("b", "abd" * 9, 1)]}) / "rollouts.jsonl"
    )
    assert index.search(np.arange(2), "cab", 60, 9)[0] == [0]


def test_an_excerpt_is_where_prompts_differ(tmp_path):
    def excerpts(questions, folder):
        rows = [rollout(str(i), "", 1, question=q) for i, q in enumerate(questions)]
        index = indexed(write_run(tmp_path / folder, {1: rows}) / "rollouts.jsonl")
        return [group["excerpt"] for group in query.groups(index, Query())["groups"]]

    shots = "an example " * 40
    assert excerpts([f"{shots} one", f"{shots}\n two"], "shots") == [
        f"{shots} {n}".replace("  ", " ")[-160:] for n in ("one", "two")
    ]
    assert excerpts([f"one {shots}", f"two {shots}"], "plain") == [f"{n} {shots}"[:160] for n in ("one", "two")]
