"""A version's tensors that a server's memory holds from the version before are not read again, and are checked like those that are."""

from pathlib import Path

import numpy as np
import pytest
from published import data_files, write_version

from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import Stager

SHAPES = {
    "model.embed_tokens.weight": (48, 16),
    "model.layers.0.self_attn.q_proj.weight": (8, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (48, 16),
}
EMBEDDING, QUERY, NORM, _ = SHAPES
WHOLE = {name: Target(shape=shape, box=whole_box(shape)) for name, shape in SHAPES.items()}
BYTES = {name: 4 * int(np.prod(shape)) for name, shape in SHAPES.items()}
EVERY = sum(BYTES.values())


def tensors(**changed: int) -> dict[str, np.ndarray]:
    """float32 tensors; those of `changed`, by the last part of their module's name, drawn by another seed."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        seed = changed.get(name.split(".")[-2], 0)
        found[name] = np.random.default_rng([number, seed]).standard_normal(shape).astype(np.float32)
    return found


class Block:
    """Memory that is the same for each version, as a GPU server's locked memory is."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> np.ndarray:
        if len(self.memory) != nbytes:
            self.memory = np.full(nbytes, 255, np.uint8)
        return self.memory


def read(stager: Stager, path: str, version: int, targets: dict[str, Target] = WHOLE) -> tuple[int, int]:
    """Bytes read and unchanged of a version that is staged without error."""
    stager.read(path, version, targets)
    status = stager.status()
    assert (status["state"], status["error"]) == ("staged", "")
    return status["bytes"], status["unchanged"]


def same(stager: Stager, version: int, want: dict[str, np.ndarray]) -> None:
    for name, part in stager.take(version).parts.items():
        np.testing.assert_array_equal(part, want[name])


def remove(path: str, name: str) -> None:
    """Removes the data of a tensor, which then cannot be read."""
    mine = [file for file in data_files(Path(path)) if f"/{name}/" in str(file)]
    assert mine
    for file in mine:
        file.unlink()


def test_tensors_with_the_checksums_of_the_version_before_are_not_read(tmp_path: Path) -> None:
    stager, second = Stager(Block()), tensors(q_proj=1)
    assert read(stager, write_version(tmp_path, 0, tensors()), 0) == (EVERY, 0)
    stager.drop()  # as a commit does
    path = write_version(tmp_path, 1, second)
    for name in SHAPES:
        if name != QUERY:
            remove(path, name)
    assert read(stager, path, 1) == (BYTES[QUERY], EVERY - BYTES[QUERY])
    same(stager, 1, second)
    third = tensors(q_proj=1, embed_tokens=2, norm=2)
    assert read(stager, write_version(tmp_path, 2, third), 2) == (
        BYTES[EMBEDDING] + BYTES[NORM],
        EVERY - BYTES[EMBEDDING] - BYTES[NORM],
    )
    same(stager, 2, third)


def test_memory_that_is_not_kept_holds_nothing(tmp_path: Path) -> None:
    stager = Stager()
    for version in range(2):
        assert read(stager, write_version(tmp_path, version, tensors()), version) == (EVERY, 0)
        stager.drop()


def test_a_bit_that_flips_in_memory_has_its_tensor_read_again(tmp_path: Path) -> None:
    block = Block()
    stager, want = Stager(block), tensors()
    read(stager, write_version(tmp_path, 0, want), 0)
    block.memory[BYTES[EMBEDDING] + 3] ^= 4  # in the second tensor
    assert read(stager, write_version(tmp_path, 1, want), 1) == (BYTES[QUERY], EVERY - BYTES[QUERY])
    same(stager, 1, want)


@pytest.mark.parametrize("how", ["damaged", "refused"])
def test_after_a_version_that_was_bad_everything_is_read(tmp_path: Path, how: str) -> None:
    stager, want = Stager(Block()), tensors()
    read(stager, write_version(tmp_path, 0, want), 0)
    path = write_version(tmp_path, 1, tensors(norm=1))
    if how == "damaged":
        remove(path, NORM)
        stager.read(path, 1, WHOLE)
        assert stager.status()["state"] == "failed" and NORM in stager.status()["error"]
    else:  # as where the ranks' sums together are not the checksum
        read(stager, path, 1)
        stager.refuse(1, "a rank's part differs")
    assert read(stager, write_version(tmp_path, 2, want), 2) == (EVERY, 0)
    same(stager, 2, want)


def test_parts_of_tensors_are_kept_and_other_parts_are_not(tmp_path: Path) -> None:
    """Two ranks' halves of the embedding; then the server's ranks are others."""

    def half(rank: int) -> dict[str, Target]:
        box = (slice(24 * rank, 24 * rank + 24), slice(0, 16))
        return {**WHOLE, EMBEDDING: Target(shape=SHAPES[EMBEDDING], box=box)}

    stager, want, mine = Stager(Block()), tensors(), EVERY - BYTES[EMBEDDING] // 2
    first = write_version(tmp_path, 0, want)
    assert read(stager, first, 0, half(1)) == (mine, 0)
    sums = stager.take(0).sums
    assert read(stager, first, 0, half(1)) == (0, mine)
    assert stager.take(0).sums == sums and sums.keys() == {EMBEDDING}
    np.testing.assert_array_equal(stager.take(0).parts[EMBEDDING], want[EMBEDDING][24:])
    assert read(stager, first, 0, half(0)) == (mine, 0)
    np.testing.assert_array_equal(stager.take(0).parts[EMBEDDING], want[EMBEDDING][:24])
