"""Packed rows hold every sequence once, within their limits, evenly and nearly full; token stats find their places."""

import gzip
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.learner.packing import ATTENTION, PackedRows, Packing, Placement


def loads(placement: Placement, lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[i] for i in row) for row in placement.rows]


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_stands_in_one_row_that_holds_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packing = Packing(row_tokens=64, rows=int(rng.integers(1, 6)), sequences_per_row=int(rng.integers(1, 7)))
    lengths = rng.integers(0, 65, rng.integers(1, 80)).tolist()
    placements = packing.place(lengths)
    assert sorted(chain.from_iterable(p.members for p in placements)) == list(range(len(lengths)))
    for placement in placements:
        assert len(placement.rows) == packing.rows
        assert max(loads(placement, lengths)) <= 64
        assert max(len(row) for row in placement.rows) <= packing.sequences_per_row
        assert placement.members == list(chain.from_iterable(placement.rows))


@pytest.mark.parametrize("seed", range(10))
def test_an_atom_stays_in_one_micro_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 65, 60).tolist()
    atoms = np.split(rng.permutation(60), np.sort(rng.choice(np.arange(1, 60), 29, replace=False)))
    atoms = [atom[:3].tolist() for atom in atoms] + [[int(i)] for atom in atoms for i in atom[3:]]
    placements = Packing(row_tokens=64, rows=3, sequences_per_row=4).place(lengths, atoms)
    assert sorted(chain.from_iterable(p.members for p in placements)) == list(range(60))
    for atom in atoms:
        assert sum(set(atom) <= set(p.members) for p in placements) == 1
    assert max(chain.from_iterable(loads(p, lengths) for p in placements)) <= 64


def test_rows_are_spread_by_longest_first_scheduling() -> None:
    # Graham's worst case for three machines: 11 where 9 is possible, (4/3 - 1/9) times as much.
    lengths = [3, 5, 4, 3, 5, 4, 3]
    (placement,) = Packing(row_tokens=12, rows=3).place(lengths)
    assert sorted(loads(placement, lengths)) == [8, 8, 11]


def test_rows_that_an_even_spread_would_overfill_are_filled_by_best_fit() -> None:
    lengths = [3, 5, 4, 3, 5, 4, 3]
    (placement,) = Packing(row_tokens=9, rows=3).place(lengths)
    assert loads(placement, lengths) == [9, 9, 9]


@pytest.mark.parametrize("seed", range(10))
def test_micro_batches_and_rows_carry_nearly_equal_loads(seed: int) -> None:
    # The fullest bin got its last sequence when it was the emptiest: it is ahead by less than that sequence.
    lengths = np.random.default_rng(seed).integers(1, 33, 70).tolist()
    packing = Packing(row_tokens=100, rows=4, sequences_per_row=64)
    placements = packing.place(lengths)
    totals = [sum(loads(p, lengths)) for p in placements]
    assert len(placements) > 1 and max(totals) - min(totals) <= 32
    (single,) = Packing(row_tokens=1000, rows=4, sequences_per_row=64).place(lengths)
    assert max(loads(single, lengths)) <= (4 / 3 - 1 / 12) * (sum(lengths) / 4 + max(lengths))
    assert max(loads(single, lengths)) - min(loads(single, lengths)) <= 32


@pytest.mark.parametrize("rows", [4, 8])
def test_rows_of_a_large_step_are_nearly_full(rows: int) -> None:
    # Measured over five seeds, 2048 sequences of 50 to 400 positions in rows of 1024: 0.973 for both.
    fills = []
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(50, 401, 2048).tolist()
        fills.append(sum(lengths) / (len(Packing(rows=rows).place(lengths)) * rows * 1024))
    assert np.mean(fills) > 0.965 and min(fills) > 0.96


def test_sequences_longer_than_half_a_row_take_a_row_each() -> None:
    assert len(Packing(row_tokens=1000, rows=8).place([600] * 4096)) == 512


def test_nothing_takes_no_micro_batch() -> None:
    assert Packing().place([]) == []


@pytest.mark.parametrize("name", ["row_tokens", "rows", "sequences_per_row"])
def test_a_size_below_one_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Packing.{name} must be >= 1 (got 0)")):
        Packing(**{name: 0})


def test_a_sequence_longer_than_a_row_is_refused_with_the_binding() -> None:
    with pytest.raises(ValueError, match=r"9 positions .* train.Packing.row_tokens >= 9 \(got 8\)"):
        Packing(row_tokens=8).place([3, 9])


@pytest.mark.parametrize(
    ("rows", "sequences_per_row", "lengths"),
    [(2, 1, [1, 1, 1]), (1, 4, [5, 5, 1]), (2, 4, [5, 5, 5])],  # too many, too long, no split of them fits
)
def test_an_atom_that_no_micro_batch_holds_is_refused_with_the_bindings(
    rows: int, sequences_per_row: int, lengths: list[int]
) -> None:
    packing = Packing(row_tokens=8, rows=rows, sequences_per_row=sequences_per_row)
    with pytest.raises(ValueError, match=r"3 sequences .* set train.Packing.rows, row_tokens or sequences_per_row"):
        packing.place(lengths, [[0, 1, 2]])


def example() -> PackedRows:
    """Three sequences in two rows of eight positions: [1 | 2 3 4] and [5 6 7 | 8 9] side by side, [3 3] alone."""
    prompts = [np.array(p, np.int32) for p in ([5, 6, 7], [1], [3, 3])]
    responses = [np.array(r, np.int32) for r in ([8, 9], [2, 3, 4], [])]
    return PackedRows.build(
        Packing(row_tokens=8, rows=2, sequences_per_row=2), Placement([[1, 0], [2]]), prompts, responses
    )


def test_the_arrays_of_a_micro_batch_written_out() -> None:
    rows = example()
    expected = {
        "tokens": [[1, 2, 3, 5, 6, 7, 8, 0], [3, 0, 0, 0, 0, 0, 0, 0]],
        "targets": [[2, 3, 4, -1, -1, 8, 9, -1], [-1] * 8],
        "positions": [[0, 1, 2, 0, 1, 2, 3, 0], [0] * 8],
        "segments": [[1, 1, 1, 2, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
        "sequence": [[0, 0, 0, 1, 1, 1, 1, 0], [2, 0, 0, 0, 0, 0, 0, 0]],
        "row_of": [[1, 1, 1, -1, -1, 0, 0, -1], [-1] * 8],
        "index_of": [[0, 1, 2, -1, -1, 0, 1, -1], [-1] * 8],
        "members": [1, 0, 2, -1],
    }
    for name, values in expected.items():
        array = getattr(rows, name)
        assert array.dtype == np.int32 and array.tolist() == values, name


def test_a_stream_stands_where_its_token_is_predicted() -> None:
    stats = np.array([[10.0, 11, np.nan], [20, 21, 22], [np.nan] * 3])
    assert example().scatter(stats).tolist() == [[20, 21, 22, 0, 0, 10, 11, 0], [0] * 8]


def test_gathering_undoes_scattering() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 9, n).astype(np.int32) for n in rng.integers(1, 9, 30)]
    responses = [rng.integers(0, 9, n).astype(np.int32) for n in rng.integers(0, 12, 30)]
    lengths = [len(p) + len(r) - 1 for p, r in zip(prompts, responses)]
    packing = Packing(row_tokens=32, rows=2, sequences_per_row=4)
    there = np.arange(12) < np.array([len(r) for r in responses])[:, None]
    stats = np.where(there, rng.normal(size=there.shape), 0.0)
    found, places = np.zeros_like(stats), 0
    for placement in packing.place(lengths):
        rows = PackedRows.build(packing, placement, prompts, responses)
        packed = rows.scatter(stats)
        places += int((rows.index_of >= 0).sum())
        rows.gather(packed, found)
        np.testing.assert_array_equal(packed[rows.index_of < 0], 0.0)
        np.testing.assert_array_equal(rows.targets >= 0, rows.index_of >= 0)
        here = rows.targets >= 0
        np.testing.assert_array_equal(
            rows.targets[here], [responses[i][t] for i, t in zip(rows.row_of[here], rows.index_of[here])]
        )
    assert places == there.sum()
    np.testing.assert_array_equal(found, stats)


def costs(placement: Placement, lengths: Sequence[int]) -> list[float]:
    """Of each row, in the FLOPs of a token's products: the products of its tokens, and attention's pairs."""
    return [sum(lengths[i] + lengths[i] ** 2 / ATTENTION for i in row) for row in placement.rows]


@pytest.mark.parametrize("seed", range(12))
def test_a_tail_leaves_out_the_rows_that_nothing_fills(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tail = int(2 ** rng.integers(0, 4))
    packing = Packing(row_tokens=64, rows=8, sequences_per_row=5, tail=tail)
    lengths = rng.integers(1, 65, rng.integers(1, 90)).tolist()
    placements = packing.place(lengths)
    assert sorted(chain.from_iterable(p.members for p in placements)) == list(range(len(lengths)))
    assert max(chain.from_iterable(loads(p, lengths) for p in placements)) <= 64
    assert max(len(row) for p in placements for row in p.rows) <= 5
    sizes = [len(p.rows) for p in placements]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) <= {8, 4, 2, 1} and min(sizes) >= tail
    empty = sum(not row for p in placements for row in p.rows)
    assert empty < tail


def test_rows_of_a_tail_are_filled_longest_first() -> None:
    # 9: 5 + 4, 5 + 4, 3 + 3 + 3 by hand; each 4 fills the row of a 5.
    (placement,) = Packing(row_tokens=9, rows=4, tail=1).place([3, 5, 4, 3, 5, 4, 3])[:1]
    assert len(placement.rows) == 2
    (whole,) = Packing(row_tokens=9, rows=4, tail=4).place([3, 5, 4, 3, 5, 4, 3])
    assert sorted(loads(whole, [3, 5, 4, 3, 5, 4, 3])) == [0, 9, 9, 9]


def test_a_tail_is_a_halving_of_the_rows() -> None:
    with pytest.raises(ValueError, match=r"tail must be 0, or rows \(8\) halved some times \(got 3\)"):
        Packing(rows=8, tail=3)


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_real_lengths_fill_their_rows_and_load_four_devices_evenly(name: str, real_data: Path) -> None:
    """1024 problems with their solutions as responses: a step of 128 prompts and 8 rollouts, in tokens of Qwen3."""
    lengths = real_lengths(name, real_data)[:1024]
    placements = Packing(row_tokens=4096, rows=8, sequences_per_row=64, tail=1).place(lengths)
    fill = sum(lengths) / sum(4096 * len(p.rows) for p in placements)
    assert fill > 0.97
    for placement in placements[: -(8).bit_length()]:  # the full micro-batches
        device = np.array(costs(placement, lengths)).reshape(4, 2).sum(axis=1)
        assert device.max() / device.mean() < 1.01


def test_sequences_that_best_fit_leaves_over_share_full_rows() -> None:
    """20 positions in two rows of 10; best fit puts a 4 beside the 5, and then needs a third row."""
    lengths = [5, 4, 4, 3, 2, 2]
    placements = Packing(row_tokens=10, rows=2, tail=1).place(lengths)
    assert [sorted(loads(p, lengths)) for p in placements] == [[10, 10]]


def test_a_row_takes_no_more_sequences_than_it_may() -> None:
    lengths = [6, *[1] * 9, 0, 0]
    placements = Packing(row_tokens=10, rows=1, sequences_per_row=3, tail=1).place(lengths)
    assert [len(p.rows[0]) for p in placements] == [3, 3, 3, 3]


def test_rows_of_minibatches_of_real_samples_are_filled(real_data: Path) -> None:
    """256 samples a minibatch, of four models that answered problems of GSM8K, in rows that hold a prompt and a response of 640 tokens."""
    samples, rng, packing = (
        sampled_lengths(real_data),
        np.random.default_rng(0),
        Packing(row_tokens=1280, rows=16, tail=1),
    )
    for _ in range(4):
        problems = rng.choice(len(samples), 32, replace=False)
        lengths = [min(int(n), 1152) for i in problems for n in rng.choice(samples[i], 8)]
        placements = packing.place(lengths)
        assert sum(lengths) / sum(1280 * len(p.rows) for p in placements) > 0.97
        assert placements == packing.place(lengths)


def sampled_lengths(folder: Path) -> list[list[int]]:
    """Positions of four sampled answers to each problem, with the 45 tokens of a chat template."""
    from tokenizers import Tokenizer

    text = gzip.decompress((folder / "tokenizers/qwen3/tokenizer.json.gz").read_bytes()).decode()
    tokenizer = Tokenizer.from_str(text)
    rows = [
        json.loads(x) for x in (folder / "graders/gsm8k_example_model_solutions.jsonl").read_text().splitlines()[:300]
    ]
    answers = [[v["solution"] for v in row.values() if isinstance(v, dict)] for row in rows]
    count = lambda texts: [len(found.ids) for found in tokenizer.encode_batch(texts)]  # noqa: E731
    prompts, flat = count([row["question"] for row in rows]), iter(count([x for four in answers for x in four]))
    return [[45 + prompt + next(flat) for _ in four] for prompt, four in zip(prompts, answers, strict=True)]


def real_lengths(name: str, folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(
        gzip.decompress((folder / "tokenizers/qwen3/tokenizer.json.gz").read_bytes()).decode()
    )
    if name == "gsm8k":
        rows = [json.loads(line) for line in (folder / "gsm8k/test.jsonl").read_text().splitlines()]
        texts = [row["question"] + "\n" + row["answer"] for row in rows]
    else:
        rows = [json.loads(line) for line in (folder / "math/math500.jsonl").read_text().splitlines()]
        texts = [row["problem"] + "\n" + row["solution"] for row in rows] * 3
    return [len(found.ids) - 1 for found in tokenizer.encode_batch(texts[:1024])]
