"""What a sampler reads is what the learner published, or an error that says what is wrong."""

import asyncio
import itertools
import shutil
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from published import data_files, write_version

from jaxrl_llm.publication import parts as memory
from jaxrl_llm.publication import reader
from jaxrl_llm.publication.manifest import Canary, Manifest, TensorEntry, checksum, digits, partial_sum, weights_of
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import BadVersion, OrbaxReader, check_sums, read_version

EMBEDDING, QUERY, SQUARE, NORM = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.norm.weight",
)
SHAPES = {EMBEDDING: (48, 16), QUERY: (8, 16), SQUARE: (16, 16), NORM: (16,)}


def tensors(dtype: type = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def whole(shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Target]:
    return {name: Target(shape=shape, box=whole_box(shape)) for name, shape in shapes.items()}


def murmur_finalizer(x: int) -> int:
    """As published: github.com/aappleby/smhasher, MurmurHash3.cpp, fmix32."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def defining_sum(array: np.ndarray) -> str:
    """The definition in the manifest's module, element by element in Python's integers."""
    columns = array.shape[-1] if array.ndim else 1
    words = array.reshape(-1).view(f"u{array.dtype.itemsize}").tolist()
    total = 0
    for i, word in enumerate(words):
        row, column = divmod(i, columns)
        total += word * (murmur_finalizer(2 * row) | 1) * (murmur_finalizer(2 * column + 1) | 1)
    return f"{total % 2**32:08x}"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16, np.int8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 5), (600, 700), (0, 4)])
def test_the_checksum_is_the_defined_sum(dtype, shape):
    array = np.asarray(100 * np.random.default_rng(1).standard_normal(shape)).astype(dtype)
    if array.size > 1000 and dtype != np.float32:
        array = array[:40]
    assert checksum(array) == defining_sum(array)


def test_the_weights_are_the_same_in_jax():
    positions = np.arange(0, 2**32, 65_537_111, dtype=np.uint32)
    np.testing.assert_array_equal(weights_of(jnp.asarray(positions)), weights_of(positions))


def test_sums_of_parts_add_up_to_the_checksum_however_a_tensor_is_cut():
    array = np.random.default_rng(2).standard_normal((12, 6, 8)).astype(ml_dtypes.bfloat16)
    cuts = itertools.product(((0, 5), (5, 12)), ((0, 1), (1, 6)), ((0, 3), (3, 8)))
    parts = [[slice(*axis) for axis in cut] for cut in cuts]
    total = sum(partial_sum(array[tuple(p)], [axis.start for axis in p], array.shape) for p in parts)
    assert digits(total) == checksum(array)


def test_every_flipped_bit_changes_the_checksum():
    array = np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)
    before = checksum(array)
    bits = array.view(np.uint8).reshape(-1)
    for byte, bit in itertools.product(range(bits.size), range(8)):
        bits[byte] ^= 1 << bit
        assert checksum(array) != before
        bits[byte] ^= 1 << bit


def test_a_transposition_and_swapped_rows_change_the_checksum():
    array = np.random.default_rng(4).standard_normal((16, 16)).astype(ml_dtypes.bfloat16)
    swapped = array[[1, 0, *range(2, 16)]]
    assert len({checksum(array), checksum(np.ascontiguousarray(array.T)), checksum(swapped)}) == 3


def test_a_manifest_survives_its_file():
    canary = Canary(tokens=(1, 2, 3), logprobs=(-0.5, -1.25), likely=(2, 9), likely_logprobs=(-0.5, -0.25), limit=0.125)
    entry = TensorEntry(shape=(3, 2), dtype="bfloat16", checksum="0123abcd")
    forward = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "sliding_layers": [1], "sliding_window": None}
    manifest = Manifest(
        version=7, model_type="qwen2", tied=True, tensors={"a.weight": entry}, forward=forward, canary=canary
    )
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 3}',
        '{"format": 2}',
        '{"format": 1}',
        Manifest(version=1, model_type="q", tied=True, tensors={}, forward={}).to_json()[:-3],
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="publish the version again"):
        Manifest.from_json(text)


SHARDINGS = [
    (1, 1, PartitionSpec()),
    (2, 1, PartitionSpec("fsdp")),
    (4, 2, PartitionSpec("fsdp", "tensor")),
    (4, 2, PartitionSpec(("tensor", "fsdp"))),
    (2, 4, PartitionSpec(None, "tensor")),
]


@pytest.mark.parametrize(("rows", "columns", "spec"), SHARDINGS, ids=str)
def test_every_sharding_of_the_learner_reads_back_bit_for_bit(tmp_path, rows, columns, spec):
    mesh = Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("fsdp", "tensor"))
    published = tensors()
    placed = {
        name: jax.device_put(a, NamedSharding(mesh, spec if a.ndim == 2 else PartitionSpec()))
        for name, a in published.items()
    }
    staged = read_version(write_version(tmp_path, 3, placed), 3, whole())
    assert staged.manifest.version == 3
    assert list(staged.parts) == list(SHAPES), "the model's order"
    assert staged.nbytes == sum(a.nbytes for a in published.values())
    for name, array in published.items():
        assert staged.parts[name].dtype == array.dtype
        np.testing.assert_array_equal(staged.parts[name].view(np.uint16), array.view(np.uint16))


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "database"])
def test_the_older_array_format_and_a_narrow_window_read_the_same(tmp_path, use_ocdbt):
    published = tensors(np.float32)
    path = write_version(tmp_path, 1, published, use_zarr3=False, use_ocdbt=use_ocdbt)
    out = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
    boxes = {name: (whole_box(array.shape), array) for name, array in out.items()}
    assert list(OrbaxReader(path, window_bytes=1).read_into(boxes)) == list(SHAPES)
    for name, array in published.items():
        np.testing.assert_array_equal(out[name], array)


@pytest.mark.parametrize("block", [1 << 26, 100], ids=["one block", "blocks of a row or two"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_parts_alone_and_their_sums_add_up(tmp_path, monkeypatch, ranks, block):
    monkeypatch.setattr(memory, "_SUMMED_BYTES", block)
    published = tensors(np.float32)
    path = write_version(tmp_path, 1, published)
    totals = dict.fromkeys((EMBEDDING, QUERY, SQUARE), 0)
    for rank in range(ranks):
        targets = whole()
        rows = slice(rank * 48 // ranks, (rank + 1) * 48 // ranks)
        targets[EMBEDDING] = Target(shape=(48, 16), box=(rows, slice(0, 16)))
        columns = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
        targets[SQUARE] = Target(shape=(16, 16), box=(slice(0, 16), columns))
        pair = rank * 2 // ranks  # two halves, of which each is read by ranks / 2 ranks
        targets[QUERY] = Target(
            shape=(8, 16), box=(slice(4 * pair, 4 * pair + 4), slice(0, 16)), counted=rank % (ranks // 2) == 0
        )
        staged = read_version(path, 1, targets)
        assert staged.nbytes == 4 * (48 * 16 // ranks + 16 * 16 // ranks + 4 * 16 + 16)
        for name, target in targets.items():
            np.testing.assert_array_equal(staged.parts[name], published[name][target.box])
        totals = {name: total + staged.sums[name] for name, total in totals.items()}
    check_sums(path, staged.manifest, totals)
    totals[SQUARE] += 1
    with pytest.raises(BadVersion, match=r"1 tensors differ.*up_proj"):
        check_sums(path, staged.manifest, totals)


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "database"])
@pytest.mark.parametrize("name", ["lr=1e-5, kl=0.1", "50%", "a%20b", "run #2", "why?", "a|b"])
def test_a_folder_may_have_any_name(tmp_path, name, use_ocdbt):
    published = tensors()
    staged = read_version(write_version(tmp_path / name, 4, published, use_ocdbt=use_ocdbt), 4, whole())
    for tensor, array in published.items():
        np.testing.assert_array_equal(staged.parts[tensor].view(np.uint16), array.view(np.uint16))


@pytest.mark.skipif(not reader.in_memory("/dev/shm"), reason="/dev/shm is no tmpfs here")
def test_a_version_in_memory_is_mapped_and_reads_the_same():
    published = tensors()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = write_version(Path(folder), 2, published)
        assert reader.in_memory(path)
        staged = read_version(path, 2, whole())
    for name, array in published.items():
        np.testing.assert_array_equal(staged.parts[name].view(np.uint16), array.view(np.uint16))


def test_what_lies_on_no_tmpfs_is_not_taken_for_memory():
    assert not reader.in_memory("/proc/self/mounts")
    assert not reader.in_memory("gs://bucket/dev/shm")


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "database"])
def test_a_version_can_be_read_over_http(tmp_path, use_ocdbt):
    published = tensors()
    write_version(tmp_path, 7, published, use_ocdbt=use_ocdbt)
    ready, addresses = threading.Event(), []

    async def serve() -> None:
        app = web.Application()
        app.router.add_static("/", tmp_path)
        async with TestServer(app) as server:
            addresses.append(str(server.make_url("/v00000007")))
            ready.set()
            await asyncio.to_thread(done.wait, 20)

    done = threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        staged = read_version(addresses[0], 7, whole())
        assert "never completed" in refused(addresses[0].replace("0007", "0008"))
    finally:
        done.set()
        thread.join(20)
    for name, array in published.items():
        np.testing.assert_array_equal(staged.parts[name].view(np.uint16), array.view(np.uint16))


@pytest.fixture(scope="module", params=[False, True], ids=["files", "database"])
def good(tmp_path_factory, request) -> str:
    return write_version(tmp_path_factory.mktemp("good"), 5, tensors(np.float32), use_ocdbt=request.param)


def refused(path: str | Path, targets: dict[str, Target] | None = None, version: int = 5) -> str:
    with pytest.raises(BadVersion) as refusal:
        read_version(str(path), version, whole() if targets is None else targets)
    assert str(path) in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("use_ocdbt", "file", "message"),
    [
        (False, "weights/_CHECKPOINT_METADATA", "never completed"),
        (False, "weights/_METADATA", "list of tensors is missing"),
        (False, "manifest.json", "no manifest"),
        (False, f"weights/{QUERY}/zarr.json", "cannot be opened"),
        (False, f"weights/{QUERY}/c/0/0", "cannot be read"),
        (True, "weights/manifest.ocdbt", "cannot be opened"),
    ],
)
def test_a_version_without_one_of_its_files_is_refused(tmp_path, use_ocdbt, file, message):
    torn = write_version(tmp_path, 5, tensors(np.float32), use_ocdbt=use_ocdbt)
    (Path(torn) / file).unlink()
    assert message in refused(torn)


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "database"])
def test_elements_that_are_gone_are_refused_also_where_another_rank_counts_them(tmp_path, use_ocdbt):
    torn = write_version(tmp_path, 5, tensors(np.float32), use_ocdbt=use_ocdbt)
    for file in data_files(Path(torn)):
        file.unlink()
    part = Target(shape=(8, 16), box=(slice(0, 4), slice(0, 16)), counted=False)
    assert "cannot be" in refused(torn, whole() | {QUERY: part})


def test_elements_that_are_zero_are_written_and_read(tmp_path):
    zero = {name: np.zeros_like(array) for name, array in tensors(np.float32).items()}
    path = write_version(tmp_path, 5, zero)
    assert not any(array.any() for array in read_version(path, 5, whole()).parts.values())


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "never completed" in refused(tmp_path / "nothing")


def largest_data_file(folder: Path) -> Path:
    return max(data_files(folder), key=lambda f: f.stat().st_size)


def test_a_data_file_that_was_cut_off_is_refused(good, tmp_path):
    torn = shutil.copytree(good, tmp_path / "torn")
    file = largest_data_file(torn)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot be" in refused(torn)


def test_one_flipped_bit_of_the_data_is_refused(good, tmp_path):
    damaged = shutil.copytree(good, tmp_path / "damaged")
    bits = tensors(np.float32)[EMBEDDING].tobytes()[1000:1016]
    files = [f for f in data_files(damaged) if bits in f.read_bytes()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[content.index(bits)] ^= 0x10
        file.write_bytes(content)
    message = refused(damaged)
    assert EMBEDDING in message and "differ from what was published" in message


def test_another_version_than_asked_for_is_refused(good):
    assert "holds version 5, asked for was 6" in refused(good, version=6)


def test_a_tensor_that_the_model_has_and_the_version_lacks_is_refused(good):
    targets = whole(SHAPES | {"lm_head.weight": (48, 16)})
    assert "lacks 1 tensors ['lm_head.weight']" in refused(good, targets)


def test_a_tensor_that_the_model_lacks_is_refused(good):
    targets = {name: target for name, target in whole().items() if name != NORM}
    assert f"holds 1 ['{NORM}'] too many" in refused(good, targets)


def test_a_tensor_that_the_manifest_lists_and_the_checkpoint_lacks_is_refused(tmp_path):
    listed = tensors()
    written = {name: a for name, a in listed.items() if name != QUERY}
    assert f"the checkpoint lacks 1 tensors ['{QUERY}']" in refused(write_version(tmp_path, 5, written, listed))


def test_another_architecture_is_refused(good):
    assert "different architectures" in refused(good, whole(SHAPES | {QUERY: (4, 16)}))


def test_a_transposed_square_tensor_is_refused(tmp_path):
    listed = tensors()
    path = write_version(tmp_path, 5, listed | {SQUARE: np.ascontiguousarray(listed[SQUARE].T)}, listed)
    assert SQUARE in refused(path)


def test_another_element_type_than_the_manifest_lists_is_refused(tmp_path):
    listed = tensors()
    path = write_version(tmp_path, 5, listed | {NORM: listed[NORM].astype(np.float16)}, listed)
    assert "stored as float16 (16,), the manifest says bfloat16 (16,)" in refused(path)


def test_reading_that_is_given_up_ends(good):
    with pytest.raises(BadVersion, match="given up"):
        read_version(good, 5, whole(), cancelled=lambda: True)
