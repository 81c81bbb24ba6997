"""The partition classifier: its loss by hand, its data in both orders, and the same ids in training as when it is asked."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import make_batch, make_outputs, make_sequences, value_and_gradient

from jaxrl_llm.algorithms.pair_classifier import PairClassifier
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.similar_pairs import Rearranged, SimilarPairs
from jaxrl_llm.data.tokenizer import CharTokenizer
from jaxrl_llm.eval.pair_accuracy import accuracy
from jaxrl_llm.rewards.pairs import pair_ids
from jaxrl_llm.rollouts.offline import given

TOKENIZER = CharTokenizer(alphabet="abcdefgh")


def test_the_loss_is_the_weighted_cross_entropy_at_the_last_token() -> None:
    sequences = make_sequences(0, sizes=(1, 1, 1, 1))
    side = jnp.asarray([1, -1, -1, -1, 0], jnp.int32)
    sequences = replace(sequences, side=side, valid=jnp.asarray([True, True, True, False, False]))
    algorithm = PairClassifier(similar_share=0.25)
    assigned = algorithm.advantages(sequences)
    batch, outputs = make_batch(sequences, assigned, 1.0), make_outputs(sequences)
    loss, gradient = value_and_gradient(algorithm, outputs, batch)
    last = [int(np.flatnonzero(m).max()) for m in np.asarray(sequences.mask)[:3]]
    v = np.array([float(outputs["reward_model"]["value"][i, t]) for i, t in enumerate(last)])
    y, weight = np.array([1.0, 0, 0]), np.array([0.5 / 0.25, 0.5 / 0.75, 0.5 / 0.75])
    p = 1 / (1 + np.exp(-v))
    expected = -weight * (y * np.log(p) + (1 - y) * np.log(1 - p))
    assert loss == pytest.approx(expected.mean(), abs=1e-5)
    found = [gradient[i, t] for i, t in enumerate(last)]
    np.testing.assert_allclose(found, weight * (p - y) / 3, atol=1e-5)
    assert np.count_nonzero(gradient) == 3


def test_each_pair_comes_in_both_orders_and_as_it_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"generation_0": "ab", "generation_1": "c", "similar": 1}\n{"generation_0": "d", "generation_1": "e", "similar": 0}\n'
    )
    data = SimilarPairs(path=str(file), tokenizer=TOKENIZER, cls="<bos>", sep="<eos>", budget=99)
    tokenizer = TOKENIZER.load()
    groups = given(Encoder(tokenizer=tokenizer, max_prompt_tokens=99), data.rows(), PairClassifier())
    rollouts = [g.rollouts[0] for g in groups]
    ids = [pair_ids(tokenizer, pair, ("<bos>", "<eos>"), 99) for pair in (("ab", "c"), ("c", "ab"))]
    assert ids[0] == [1, 3, 4, 2, 5, 2]
    # a further token, whose place is that of what the model says after the last mark
    assert [[*r.prompt.prefix, *r.tokens][:-1] for r in rollouts[:2]] == ids
    assert [g.scores.parts["log/side"].tolist() for g in groups] == [[1], [1], [-1], [-1]]
    assert all(r.mask.tolist() == [False, True] for r in rollouts)


def test_generated_pairs_are_alike_in_the_share_given_and_splits_share_no_string() -> None:
    train, held = (Rearranged(tokenizer=TOKENIZER, size=600, split=s).labelled() for s in ("train", "heldout"))
    assert all((sorted(a) == sorted(b)) == similar for a, b, similar in train)
    assert abs(np.mean([similar for *_, similar in train]) - 0.5) < 0.06
    assert not {"".join(sorted(a)) for a, *_ in train} & {"".join(sorted(a)) for a, *_ in held}


def test_labels_that_are_all_the_same_or_no_labels_are_refused(tmp_path: Path) -> None:
    row = '{"generation_0": "a", "generation_1": "b", "similar": %s}\n'
    for text, words in ((row % 1 * 2, "all the same"), (row % 2, "must be 0 or 1")):
        (tmp_path / "pairs.jsonl").write_text(text)
        with pytest.raises(ValueError, match=words):
            SimilarPairs(path=str(tmp_path / "pairs.jsonl"), tokenizer=TOKENIZER, cls="<bos>", sep="<eos>").rows()
    with pytest.raises(ValueError, match="cls and sep"):
        pair_ids(TOKENIZER.load(), ("a", "b"), ("<none>", "<eos>"), 9)
    with pytest.raises(ValueError, match=r"similar_share must be in \(0, 1\)"):
        PairClassifier(similar_share=1.0)


def test_accuracy_counts_both_kinds_of_error() -> None:
    class Lengths:
        async def similar(self, pairs: list[tuple[str, str]]) -> list[float]:
            return [float(len(a) == len(b)) for a, b in pairs]

    found = accuracy(Lengths(), [("a", "b", True), ("a", "bb", True), ("a", "c", False), ("a", "cc", False)])
    assert (found["precision"], found["recall"], found["f1"], found["accuracy"]) == (0.5, 0.5, 0.5, 0.5)
