"""Values as bytes: long texts beside the header, messages of earlier versions, and no second copy of what is large."""

import json
import tracemalloc

import numpy as np
import pytest

from jaxrl_llm.distributed import processes, serialization

LARGE = 2**24  # bytes


def values():
    rng = np.random.default_rng(0)
    return {
        "odd": np.frombuffer(b"abc", np.uint8),
        "tokens": rng.integers(0, 2**31, 1001, dtype=np.int32),
        "weights": rng.normal(size=(3, 5)),
        "none": np.zeros((0, 2), np.float32),
        "texts": ["short", "é\ud800\n" * 1000, "z" * 5000],
    }


def assert_equal(got, want):
    assert got.keys() == want.keys() and got["texts"] == want["texts"]
    for name in want.keys() - {"texts"}:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name], want[name])


def received(pieces):
    """The bytes of a message as a process that receives it holds them."""
    data = np.frombuffer(bytearray(b"".join(pieces)), np.uint8)
    return data.data


def test_values_come_back_from_one_piece_and_from_many_and_arrays_lie_where_their_dtypes_are_read_fastest():
    want = values()
    assert_equal(serialization.unpacked(serialization.packed(want)), want)
    found = serialization.unpacked(received(serialization.pieces(want)))
    assert_equal(found, want)
    assert all(x.flags.aligned and x.flags.writeable for name, x in found.items() if name != "texts")


def test_a_long_text_stays_out_of_the_header():
    data = serialization.packed(values())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert len(json.dumps(header)) < 2000 and "short" in json.dumps(header)


def test_a_message_of_a_version_that_set_arrays_side_by_side_is_read():
    arrays = [np.frombuffer(b"abc", np.uint8), np.arange(5, dtype=np.int32)]
    entries = [[x.dtype.str, list(x.shape)] for x in arrays]
    root = {"map": {"odd": {"array": 0}, "tokens": {"array": 1}, "text": "a" * 3000}}
    header = json.dumps({"root": root, "objects": [], "arrays": entries}).encode()
    found = serialization.unpacked(len(header).to_bytes(8, "little") + header + b"".join(x.tobytes() for x in arrays))
    assert (
        found["odd"].tobytes() == b"abc" and found["tokens"].tolist() == [0, 1, 2, 3, 4] and found["text"] == "a" * 3000
    )


def peak(work):
    tracemalloc.start()
    result = work()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken, result


def test_a_large_value_is_sent_and_received_without_a_second_copy_of_it():
    value = {"x": np.random.default_rng(0).integers(0, 256, LARGE, dtype=np.uint8)}
    taken, pieces = peak(lambda: serialization.pieces(value))
    assert taken < LARGE / 100
    taken, sent = peak(lambda: sum(len(part) for part in processes._parts(pieces)))
    assert sent >= LARGE and taken < 2 * processes.PART
    data = received(pieces)
    taken, found = peak(lambda: serialization.unpacked(data))
    assert taken < LARGE / 100
    np.testing.assert_array_equal(found["x"], value["x"])


@pytest.mark.parametrize("sizes", [[1], [5, 0, 3], [7, 7, 2], [16], [8, 8]])
def test_parts_have_one_length_and_hold_the_bytes_of_all_pieces_in_their_order(sizes, monkeypatch):
    monkeypatch.setattr(processes, "PART", 8)
    rng = np.random.default_rng(sum(sizes))
    pieces = [rng.bytes(size) for size in sizes]
    parts = [part.tobytes() for part in processes._parts(pieces)]
    assert {len(part) for part in parts} == {8} and len(parts) == -(-sum(sizes) // 8)
    assert b"".join(parts)[: sum(sizes)] == b"".join(pieces)
