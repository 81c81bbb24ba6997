"""NoveltyBench's partition and utilities, n-gram diversity, AlpacaEval's file: by hand and by definition."""

import json
from itertools import pairwise

import numpy as np
import pytest
from records_of import answered

from jaxrl_llm.eval.instructions import AlpacaOutputs, Instructions, WinRate, at_equal_length
from jaxrl_llm.eval.ngrams import NgramDiversity, distinct_n, unique_counts, unique_shares
from jaxrl_llm.eval.novelty import Novelty, partition, rouge1, rouge1_similar, utility_flat, utility_patience


def linked(*pairs):
    return lambda a, b: (a, b) in pairs or (b, a) in pairs


def test_a_class_is_compared_by_its_first_text():
    # 1 = 2 and 2 = 3, but not 1 = 3: the middle one decides only where it opens the class.
    chain = linked(("1", "2"), ("2", "3"))
    assert partition(["1", "2", "3"], chain) == [0, 0, 1]
    assert partition(["2", "1", "3"], chain) == [0, 0, 0]
    assert partition(["3", "1", "2"], chain) == [0, 1, 0]
    assert partition([], chain) == []


def test_utilities_have_their_published_example():
    classes, utilities = [0, 0, 0, 1, 0, 0, 1, 0, 1, 0], [7, 1, 1, 5, 1, 1, 1, 1, 1, 1]
    assert utility_patience(classes, utilities) == pytest.approx((7 + 5 * 0.8**3) / sum(0.8**i for i in range(10)))
    assert utility_patience(classes, utilities) == pytest.approx(2.1420, abs=5e-5)
    assert utility_flat(classes, utilities) == pytest.approx(1.2)


def test_rouge1_is_the_f1_of_shared_words():
    # "the" twice and "cat" shared: precision 3/4, recall 3/5
    assert rouge1("The cat, the dog", "the the cat sat down") == pytest.approx(2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5))
    assert rouge1("", "") == 0.0
    long = "one two three four five six seven"
    assert rouge1_similar(long, f"{long} eight") and not rouge1_similar(long, "a b c d e f g h")


def test_novelty_counts_classes_and_leaves_its_files(tmp_path):
    groups = [
        answered("p", sampled=[("red", -9.0), ("Red", 0.0), ("blue", -5.2), ("green", -8.0)]),
        answered("q", sampled=[("a", 0.0)] * 4),
    ]
    measure = Novelty(cut_points=(-7.719, -6.281, -6.0, -5.719, -5.5, -5.0, -4.375, -3.438, -2.047), patience=0.5)
    found = measure.measure(groups)
    assert found["distinct"].tolist() == [3, 1]
    # utilities: -9 -> 1, 0 -> 10, -5.2 -> 6 (five cut points below), -8 -> 1
    assert found["quality"].tolist() == [(1 + 10 + 6 + 1) / 4, 10]
    assert found["utility_flat"].tolist() == [(1 + 6 + 1) / 4, 10 / 4]
    assert found["utility_patience"] == pytest.approx([(1 + 6 / 4 + 1 / 8) / 1.875, 10 / 1.875])
    report = measure.report(groups, tmp_path, "some model")["novelty"]
    assert (
        report["mean_distinct"] == 2
        and report["var_distinct"] == 1
        and report["distinct_histogram"] == {"1": 1, "3": 1}
    )
    first = json.loads((tmp_path / "scores.jsonl").read_text().splitlines()[0])
    assert (
        first["partition"] == [0, 0, 1, 2] and first["partition_scores"] == [1, 6, 1] and first["model"] == "some model"
    )
    assert json.loads((tmp_path / "generations.jsonl").read_text().splitlines()[1])["generations"] == ["a"] * 4


def test_without_quality_there_is_no_utility(tmp_path):
    groups = [answered("p", sampled=[("red", None), ("blue", None)])]
    assert set(Novelty().measure(groups)) == {"distinct"}
    Novelty().report(groups, tmp_path, "m")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["generations.jsonl", "partitions.jsonl"]


def test_ngram_measures_follow_their_definitions():
    texts = ["a b c d e", "A b c d x", "a b"]
    bigrams = [{*pairwise(t.lower().split())} for t in texts]
    assert distinct_n(texts, 2) == len(set.union(*bigrams)) / sum(map(len, bigrams)) == 5 / 9
    unique = [len(s - set.union(*(o for o in bigrams if o is not s))) for s in bigrams]
    assert unique_counts(texts, 2) == unique == [1, 1, 0]
    # 4-grams: abcd is shared, bcde and bcdx are not; the third text has none
    assert unique_shares(texts) == [1 / 2, 1 / 2, 0]
    assert unique_shares(["a b c d e f"]) == [1.0]
    assert np.isnan(distinct_n(["a"], 2))


def test_equal_answers_have_no_diversity():
    found = NgramDiversity(sizes=(1, 4)).measure([answered("p", sampled=[("a b c d e", 0), ("a b c d e", 0)])])
    assert {n: v.tolist() for n, v in found.items()} == {
        "distinct_1": [0.5], "distinct_4": [0.5], "unique_1": [0], "unique_4": [0], "unique_share": [0],
    }  # fmt: skip


def test_alpaca_outputs_are_an_array_in_its_schema(tmp_path):
    groups = [
        answered("p", greedy=("four", None), instruction="2+2?", dataset="helpful_base"),
        answered("q", greedy=("", None), instruction="hm", dataset="vicuna"),
    ]
    measure = AlpacaOutputs(generator="mine")
    assert measure.measure(groups)["characters"].tolist() == [4, 0]
    measure.report(groups, tmp_path, "path")
    assert json.loads((tmp_path / "model_outputs.json").read_text()) == [
        {"instruction": "2+2?", "output": "four", "generator": "mine", "dataset": "helpful_base"},
        {"instruction": "hm", "output": "", "generator": "mine", "dataset": "vicuna"},
    ]


def test_the_reference_output_is_read_from_alpaca_evals_rows(tmp_path):
    file = tmp_path / "eval.json"
    file.write_text(
        json.dumps([{"instruction": "2+2?", "output": "Four.", "generator": "g", "dataset": "helpful_base"}])
    )
    assert Instructions(path=str(file)).rows()[0].reference == ""
    judged = Instructions(path=str(file), reference=("output",)).rows()[0]
    assert (judged.reference, judged.extra["instruction"], judged.extra["dataset"]) == ("Four.", "2+2?", "helpful_base")
    with pytest.raises(ValueError, match=r"Instructions\.reference"):
        Instructions(path=str(file), reference=("answer",)).rows()


def test_the_win_rate_is_the_mean_verdict_in_percent():
    groups = [
        answered(name, greedy=(text, score))
        for name, text, score in (("p", "ab", 1.0), ("q", "abc", 0.5), ("r", "", None))
    ]
    found = WinRate(part="part").measure(groups)
    np.testing.assert_allclose(found["win_rate"], [100, 50, np.nan])
    assert 0 < float(found["win_rate_at_equal_length"]) < 100


def test_a_win_rate_that_length_explains_is_a_half_at_equal_length():
    rng = np.random.default_rng(0)
    longer = rng.normal(size=4000) * 100
    # Wins by length alone, but for a constant lead of 0.4 in log-odds: at equal length sigmoid(0.4) = 0.599 wins.
    p = 1 / (1 + np.exp(-(0.4 + 2.0 * np.tanh(longer / longer.std()))))
    won = (rng.random(4000) < p).astype(float)
    assert at_equal_length(won, longer) == pytest.approx(1 / (1 + np.exp(-0.4)), abs=0.03)
    assert (
        at_equal_length(won, longer + 60) < won.mean() - 0.02
    )  # longer answers won more than they would at equal length
    for value in (0.0, 1.0):
        assert at_equal_length(np.full(50, value), longer[:50]) == pytest.approx(value, abs=0.01)
    assert np.isnan(at_equal_length(np.array([np.nan]), np.array([1.0])))
    assert at_equal_length(np.array([1.0, 0.0]), np.zeros(2)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("file", "count", "begins"),
    [
        ("instructions/vicuna_bench", 80, "How can I improve my time management skills?"),
        ("instructions/user_oriented_instructions", 252, "The sentence you are given might be too wordy"),
        ("novelty_bench/curated", 100, "Tell me a story in five sentences"),
    ],
)
def test_real_instructions_are_read(real_data, file, count, begins):
    prompts = Instructions(path=str(real_data / f"{file}.jsonl"), name="set").rows()
    assert len(prompts) == len({p.id for p in prompts}) == count
    assert prompts[0].extra["instruction"].startswith(begins)
    if "user_oriented" in file:
        assert "If you have any questions about my rate" in prompts[0].messages[0]["content"]
