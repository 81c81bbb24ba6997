"""A server that quantizes to fp8 what it loads: what was loaded is compared exactly, and what it holds is the rounding of it."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from published import write_version
from served_model import HIDDEN, SHAPES, Layer
from stand_in_worker import Worker, on_every_rank, weights
from test_vllm_plugin import staged

from jaxrl_llm.samplers.servers.answers import Refused, check_quantization

FP8, LARGEST = ml_dtypes.float8_e4m3fn, 448.0
MATRICES = 7  # q, k, v, o, gate, up, down
METHODS = ["Fp8PtpcOnlineLinearMethod", "Fp8PerTensorOnlineLinearMethod", "Fp8PerBlockOnlineLinearMethod"]


def rounded(loaded: np.ndarray, method: str) -> tuple[np.ndarray, np.ndarray]:
    """A matrix [N, K] in fp8 by NumPy, and its scales: one a row, one, or one a block of 128 x 128."""
    if method == METHODS[2]:
        assert max(loaded.shape) <= 128
    axis = 1 if method == METHODS[0] else None
    scale = np.abs(loaded).max(axis=axis, keepdims=True).astype(np.float32) / np.float32(LARGEST)
    return np.clip(loaded / scale, -LARGEST, LARGEST).astype(FP8), scale.reshape(-1) if method == METHODS[1] else scale


class Method:
    """A stand-in for vLLM's method of a layer, as one that quantizes has it."""

    def process_weights_after_loading(self, layer: Layer) -> None:
        kind = type(self).__name__
        held, scale = rounded(layer.weight.data.float().numpy(), kind)
        narrow = torch.from_numpy(held.view(np.uint8)).view(torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(narrow if kind == METHODS[2] else narrow.t(), requires_grad=False)
        name = "weight_scale_inv" if kind == METHODS[2] else "weight_scale"
        setattr(layer, name, torch.nn.Parameter(torch.from_numpy(scale), requires_grad=False))


class QuantizingWorker(Worker):
    """A worker whose matrices are in fp8, reloaded layer by layer into the tensors that it serves from, as vLLM does."""

    def __init__(self, method: str, rank: int = 0, ranks: int = 1):
        super().__init__(rank, ranks, torch.bfloat16)
        self.layers = {}
        for path, layer in self.served.named_modules():
            if type(layer).__name__.endswith("Linear"):
                layer.quant_method = type(method, (Method,), {})()
                layer.output_size_per_partition, layer.input_size_per_partition = layer.weight.shape
                layer.weight_block_size = [128, 128] if method == METHODS[2] else None
                self.layers[path] = (layer, tuple(layer.weight.shape))
                layer.quant_method.process_weights_after_loading(layer)
        self.skips = ""  # the path of a layer that is forgotten

    def reload_weights(self, weights_iterator):
        served = {path: dict(layer.named_parameters(recurse=False)) for path, (layer, _) in self.layers.items()}
        for layer, shape in self.layers.values():
            layer.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        super().reload_weights(weights_iterator)
        for path, (layer, _) in self.layers.items():
            if path != self.skips:
                layer.quant_method.process_weights_after_loading(layer)
            made = dict(layer.named_parameters(recurse=False))
            for name, parameter in served[path].items():
                parameter.data.copy_(made[name].data)
                setattr(layer, name, parameter)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("published")
    return [write_version(folder, version, weights(version, ml_dtypes.bfloat16)) for version in range(2)]


def committed(worker: Worker, published: list[str], version: int = 1) -> dict:
    assert staged(worker, published[version], version)["state"] == "staged", worker.stage_status()
    return worker.commit(str(version))


@pytest.mark.parametrize("method", METHODS)
def test_a_quantizing_server_takes_a_version_and_says_how_far_rounding_moved_it(published, method):
    worker = QuantizingWorker(method)
    answer = committed(worker, published)
    assert (answer["version"], answer["error"]) == (1, "")
    assert (answer["checked"], answer["unchecked"], answer["quantized"]) == (len(SHAPES), 0, MATRICES)
    moved = of = 0.0
    for (_, parts), names in zip(
        worker.layers.items(), (["q", "k", "v"], ["o"], ["gate", "up"], ["down"]), strict=True
    ):
        whole = np.concatenate(
            [weights(1, ml_dtypes.bfloat16)[n] for name in names for n in SHAPES if n.endswith(f"{name}_proj.weight")]
        ).astype(np.float64)
        held, scale = rounded(whole.astype(np.float32), method)
        moved += np.square(held.astype(np.float64) * scale.astype(np.float64) - whole).sum()
        of += np.square(whole).sum()
        kept = parts[0].weight.data.float().numpy()
        np.testing.assert_array_equal(kept if method == METHODS[2] else kept.T, held.astype(np.float32))
    assert answer["rounding"] == pytest.approx(np.sqrt(moved / of), rel=1e-5)
    assert 0.01 < answer["rounding"] < 0.04  # rounding to three bits after the first
    assert not any("process_weights_after_loading" in vars(layer.quant_method) for layer, _ in worker.layers.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_compares_its_own_part(published, monkeypatch, ranks):
    workers = [QuantizingWorker(METHODS[0], rank, ranks) for rank in range(ranks)]
    for worker in workers:
        staged(worker, published[1], 1)
    for answer in on_every_rank(monkeypatch, workers, "commit", "1"):
        assert (answer["error"], answer["checked"], answer["quantized"]) == ("", len(SHAPES), MATRICES)


def first(worker: QuantizingWorker) -> tuple[str, Layer]:
    (path, (layer, _)), *_ = [(p, found) for p, found in worker.layers.items() if found[1] == (HIDDEN, HIDDEN)]
    return path, layer


def wrong_load(worker: QuantizingWorker) -> None:
    """A loader puts rows in the place of others, before the layer is quantized."""
    own = worker.served.load
    worker.served.load = lambda name, whole: own(name, torch.roll(whole, 1, 0) if "down_proj" in name else whole)


def not_anew(worker: QuantizingWorker) -> None:
    """vLLM takes a layer for one that it has quantized already, and copies its 16 bits over the 8."""
    worker.skips = first(worker)[0]


def stale_scale(worker: QuantizingWorker) -> None:
    """A scale of the version before is kept."""
    layer = first(worker)[1]
    before = layer.weight_scale.data.clone()

    def process(self, given):
        Method.process_weights_after_loading(self, given)
        given.weight_scale.data.copy_(before)

    type(layer.quant_method).process_weights_after_loading = process


def not_copied(worker: QuantizingWorker) -> None:
    """What a layer serves from is not what its quantization gave: a bit of one element of it."""
    reload = worker.reload_weights

    def reloaded(weights_iterator):
        reload(weights_iterator)
        first(worker)[1].weight.data.view(torch.uint8)[3, 5] ^= 1

    worker.reload_weights = reloaded


@pytest.mark.parametrize(
    ("fault", "message"),
    [(wrong_load, "differ from what was published.*down_proj"), (not_anew, "not quantized anew.*o_proj"),
     (stale_scale, "o_proj.*other numbers in fp8 than rounding"), (not_copied, "o_proj.*does not hold what its quantization gave")],
)  # fmt: skip
def test_a_load_that_goes_wrong_is_told_and_the_next_one_is_whole(published, fault, message):
    worker = QuantizingWorker(METHODS[0])
    assert committed(worker, published, 0)["error"] == ""
    fault(worker)
    answer = committed(worker, published)
    assert answer["version"] == -1
    assert re.search(message, answer["error"]), answer["error"]


def test_weights_that_a_checkpoint_brings_quantized_are_refused():
    worker = Worker(dtype=torch.bfloat16)
    layer = worker.served.model["layers"][0]["self_attn"]["o_proj"]
    layer.quant_method = type("Fp8LinearMethod", (), {})()
    layer.weight_scale = torch.nn.Parameter(torch.ones(1))
    worker.stage("nowhere", "1")
    status = worker.stage_status()
    assert status["state"] == "failed"
    assert "weight_scale" in status["error"] and "--quantization fp8_per_channel" in status["error"]


def test_learner_and_server_agree_on_quantization_or_the_update_is_refused():
    plain, narrow = [{"quantized": 0}], [{"quantized": MATRICES}]
    check_quantization("http://a", plain, "")
    check_quantization("http://a", [{}], "")
    check_quantization("http://a", narrow, "fp8_per_block")
    with pytest.raises(Refused, match=r"start it with --quantization fp8_per_block"):
        check_quantization("http://a", plain, "fp8_per_block")
    with pytest.raises(Refused, match=r"set VLLM_QUANTIZATION to"):
        check_quantization("http://a", [*narrow, *plain], "")
