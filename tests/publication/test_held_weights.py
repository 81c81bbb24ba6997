"""What a server's model holds after a load is compared with the published checksums, exactly, on every rank."""

import ml_dtypes
import numpy as np
import pytest
import torch
from published import write_version
from served_model import HIDDEN, LAYER, SHAPES, Served
from stand_in_worker import Worker, on_every_rank, weights
from test_vllm_plugin import staged

from jaxrl_llm.publication.held_weights import tensor_sum
from jaxrl_llm.publication.manifest import partial_sum
from jaxrl_llm.publication.parts import Target
from jaxrl_llm.publication.vllm_targets import held_by, targets_of

BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, list[str]]:
    """Versions 0 and 1 in each element type."""
    folder = tmp_path_factory.mktemp("published")
    types = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    return {
        name: [write_version(folder / name, version, weights(version, dtype)) for version in range(2)]
        for name, dtype in types.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8], ids=str)
@pytest.mark.parametrize("box", [(slice(0, 40), slice(0, 24)), (slice(8, 24), slice(0, 24)), (slice(0, 40), slice(6, 18)), (slice(3, 3), slice(0, 24))])  # fmt: skip
def test_torch_and_numpy_give_a_part_one_sum(dtype, box):
    bits = np.random.default_rng(1).integers(0, 256, (40, 24 * np.dtype(dtype).itemsize), np.uint8)
    whole = bits.view(dtype)
    part = np.ascontiguousarray(whole[box])
    as_torch = torch.from_numpy(part.view(np.uint8)).view(getattr(torch, np.dtype(dtype).name)).reshape(part.shape)
    target = Target(shape=whole.shape, box=box)
    origin = tuple(axis.start for axis in box)
    before = as_torch.clone()
    assert int(tensor_sum(as_torch, target, np.dtype(dtype).name)) == partial_sum(part, origin, whole.shape)
    assert torch.equal(as_torch.view(torch.uint8), before.view(torch.uint8)), "the model's memory is left as it was"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_that_a_model_holds_are_those_of_its_targets(ranks):
    for rank in range(ranks):
        model = Served(rank, ranks, dtype=torch.float32)
        for name, array in weights(1).items():
            model.load(name, torch.from_numpy(array))
        held = held_by(model)
        for name, target in targets_of(model).items():
            np.testing.assert_array_equal(held[name].numpy(), weights(1)[name][target.box])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("published_in", "held_in"), [("float32", torch.float32), ("bfloat16", BFLOAT16), ("bfloat16", torch.float32)])  # fmt: skip
def test_a_whole_load_is_compared_in_full(published, monkeypatch, ranks, published_in, held_in):
    workers = [Worker(rank, ranks, held_in) for rank in range(ranks)]
    for worker in workers:
        staged(worker, published[published_in][1], 1)
    for answer in on_every_rank(monkeypatch, workers, "commit", "1"):
        assert (answer["version"], answer["error"], answer["checked"], answer["unchecked"]) == (1, "", len(SHAPES), 0)


def attention(model: Served) -> torch.nn.Module:
    return model.model["layers"][0]["self_attn"]


def swap_layers(model: Served) -> None:
    """The two halves of gate_up: two loads that went to each other's place."""
    fused = model.model["layers"][0]["mlp"]["gate_up_proj"].weight
    half = len(fused) // 2
    fused[:] = torch.cat([fused[half:].clone(), fused[:half].clone()])


def transpose(model: Served) -> None:
    weight = attention(model)["o_proj"].weight
    assert weight.shape == (HIDDEN, HIDDEN)
    weight[:] = weight.T.clone()


def leave_one_stale(model: Served) -> None:
    model.load(f"{LAYER}self_attn.k_proj.bias", torch.from_numpy(weights(0)[f"{LAYER}self_attn.k_proj.bias"]))


def load_the_old_version(model: Served) -> None:
    for name, array in weights(0).items():
        model.load(name, torch.from_numpy(array))


def flip_an_exponent_bit(model: Served) -> None:
    words = model.lm_head.weight.data.view(torch.int32)
    words[70, 3] ^= 1 << 30


def round_in_place(model: Served) -> None:
    weight = attention(model)["qkv_proj"].weight
    weight[:] = weight.to(BFLOAT16).to(torch.float32)


FAULTS = {
    swap_layers: "gate_proj", transpose: "o_proj", leave_one_stale: "k_proj.bias", load_the_old_version: "embed_tokens",
    flip_an_exponent_bit: "lm_head", round_in_place: "q_proj",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_model_that_holds_something_else_is_never_said_to_hold_the_version(published, fault):
    worker = Worker(dtype=torch.float32)
    staged(worker, published["float32"][0], 0)
    assert worker.commit("0")["version"] == 0
    staged(worker, published["float32"][1], 1)

    @torch.no_grad()
    def spoils(model: Served) -> None:
        fault(model)

    worker.spoils = spoils
    answer = worker.commit("1")
    assert answer["version"] == worker.published_version() == -1
    assert FAULTS[fault] in answer["error"] and "commit again" in answer["error"]
    worker.spoils = lambda model: None
    assert worker.commit("1")["version"] == 1, "it is still staged, and a load that goes well is whole"


@pytest.mark.parametrize(("published_in", "held_in"), [("float32", BFLOAT16), ("bfloat16", torch.float16)])
def test_a_server_of_a_narrower_type_is_refused(published, published_in, held_in):
    worker = Worker(dtype=held_in)
    staged(worker, published[published_in][1], 1)
    answer = worker.commit("1")
    assert answer["version"] == -1
    assert f"start the server with --dtype {published_in}" in answer["error"]


def test_a_wider_type_must_hold_the_published_values(published):
    """Float32 holds bfloat16's values; one that is between two of them was not published, though it rounds to one that was."""
    worker = Worker(dtype=torch.float32)
    staged(worker, published["bfloat16"][1], 1)

    @torch.no_grad()
    def spoils(model: Served) -> None:
        model.lm_head.weight[5, 5] *= 1 + 2.0**-12

    worker.spoils = spoils
    assert "lm_head" in worker.commit("1")["error"]


def test_one_rank_s_own_replica_of_a_head_is_compared_too(published, monkeypatch):
    """With four ranks and two heads of keys, ranks 1 and 3 hold copies that count in no checksum."""
    workers = [Worker(rank, 4, torch.float32) for rank in range(4)]
    for worker in workers:
        staged(worker, published["float32"][1], 1)

    @torch.no_grad()
    def spoils(model: Served) -> None:
        attention(model)["qkv_proj"].weight[-1, 0] += 1

    workers[1].spoils = spoils
    answers = on_every_rank(monkeypatch, workers, "commit", "1")
    assert [answer["version"] for answer in answers] == [1, -1, 1, 1]
    assert "v_proj" in answers[1]["error"]


def test_tensors_that_vllm_packed_away_are_counted_and_told_once(published, caplog):
    worker = Worker()
    for version in (0, 1):
        staged(worker, published["float32"][version], version)
        answer = worker.commit(str(version))
        assert (answer["version"], answer["checked"], answer["unchecked"]) == (version, 1, len(SHAPES) - 1)
    assert caplog.text.count("cannot be compared with their checksums") == 1
