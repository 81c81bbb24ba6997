"""Published weights inside a real server: the server's log-probs are the new version's, or still the old one's."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from published import data_files, write_version
from serving import resident_bytes
from tiny_qwen2 import VOCABULARY, config, weights

TOLERANCE = 1e-4  # nats, float32
SQUARE = "model.layers.1.self_attn.o_proj.weight"
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, 200)]


def gap(server, reference) -> float:
    """Largest difference of the log-probs of a prompt of 200 tokens, nats."""
    server.call("/reset_prefix_cache")
    return float(np.abs(server.score(PROMPT) - reference.logprobs(PROMPT)).max())


def test_a_committed_version_is_what_the_server_computes_with(server, published, references):
    for version in (0, 1):
        server.update(published[version], version)
        assert int(server.method("published_version")) == version
        assert gap(server, references(version)) < TOLERANCE
    assert gap(server, references(0)) > 1


def test_a_staged_version_changes_nothing_before_its_commit(server, published, references):
    server.update(published[0], 0)
    assert server.stage(published[1], 1)["bytes"] == sum(array.nbytes for array in weights(1).values())
    assert gap(server, references(0)) < TOLERANCE
    server.method("commit", version=1)
    assert gap(server, references(1)) < TOLERANCE


def flip_one_bit(folder: Path) -> None:
    bits = weights(1)[SQUARE].tobytes()[4096:4128]
    files = [file for file in data_files(folder) if bits in file.read_bytes()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[content.index(bits)] ^= 1
        file.write_bytes(content)


def cut_off(folder: Path) -> None:
    file = max(data_files(folder), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
    "uncommitted": (lambda folder: (folder / "weights" / "_CHECKPOINT_METADATA").unlink(), "never completed"),
    "cut off": (cut_off, "cannot be"),
    "one bit": (flip_one_bit, "differ from what was published"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no manifest"),
}
CHANGES = {
    "missing": (lambda w: {n: a for n, a in w.items() if n != SQUARE}, f"lacks 1 tensors ['{SQUARE}']"),
    "extra": (lambda w: w | {"model.layers.9.more": np.ones(3, np.float32)}, "model.layers.9.more"),
    "shape": (lambda w: w | {SQUARE: np.ones((64, 128), np.float32)}, "different architectures"),
}


@pytest.mark.parametrize("name", [*DAMAGES, *CHANGES])
def test_a_bad_version_leaves_the_old_weights_serving(server, published, references, tmp_path, name):
    server.update(published[0], 0)
    if name in DAMAGES:
        change, message = DAMAGES[name]
        bad = shutil.copytree(published[1], tmp_path / "bad")
        change(bad)
    else:
        change, message = CHANGES[name]
        bad = write_version(tmp_path, 1, change(weights(1)), config=config(False))
    status = server.stage(str(bad), 1)
    assert status["state"] == "failed"
    assert message in status["error"]
    answer = server.method("commit", version=1)
    assert (answer["version"], message in answer["error"]) == (0, True)
    assert int(server.method("published_version")) == 0
    assert gap(server, references(0)) < TOLERANCE


def test_a_transposed_square_tensor_is_refused(server, published, references, tmp_path):
    server.update(published[0], 0)
    transposed = np.ascontiguousarray(weights(1)[SQUARE].T)
    path = write_version(tmp_path, 1, weights(1) | {SQUARE: transposed}, weights(1), config=config(False))
    assert SQUARE in server.stage(path, 1)["error"]
    assert gap(server, references(0)) < TOLERANCE


def test_a_version_of_another_rotary_base_is_refused(server, published, references, tmp_path):
    """The server's own base is the one that vLLM read from its config.json."""
    server.update(published[0], 0)
    path = write_version(tmp_path, 1, weights(1), config=config(False) | {"rope_theta": 15000.0})
    assert "rope_theta is 10000.0 here and 15000.0 there" in server.stage(path, 1)["error"]
    assert gap(server, references(0)) < TOLERANCE


@pytest.mark.parametrize("after", [0, 2, 9, 30])
def test_a_load_that_fails_midway_is_whole_after_the_next_commit(server, published, references, after):
    server.update(published[0], 0)
    server.call("/pause?mode=keep&clear_cache=true")
    server.stage(published[1], 1)
    server.method("fail_next_load", after=after)
    answer = server.method("commit", version=1)
    assert (answer["version"], "no memory left on the device" in answer["error"]) == (-1, True)
    assert int(server.method("published_version")) == -1
    assert server.method("commit", version=1)["version"] == 1
    server.call("/resume")
    assert gap(server, references(1)) < TOLERANCE


def test_memory_does_not_grow_over_ten_updates(server, published):
    for version in (0, 1, 0):
        server.update(published[version], version)
    before = resident_bytes(server.process.pid)
    for update in range(10):
        server.update(published[update % 2], update % 2)
    one_version = sum(array.nbytes for array in weights(0).values())
    assert resident_bytes(server.process.pid) - before < one_version
