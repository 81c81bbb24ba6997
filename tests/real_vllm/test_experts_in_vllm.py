"""Published experts inside a real vLLM: on one rank, and divided over two by width, it computes with the version's weights."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from published import write_version
from serving import ON_TWO_CORES, environment
from tiny_qwen3_moe import CONFIG, VOCABULARY, as_published, checkpoint, logprobs, write_served

TOLERANCE = 1e-4  # nats, float32
TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, 100)]
# A version twice: a reload of the very same weights is what vLLM's packed copy for a CPU does not survive by itself.
ORDER = [0, 1, 1, 0]
# No division by expert: vLLM's kernel for CPUs knows no map of experts (0.32), and its workers die of it; test_published_experts.py has that division.
ENGINES = {
    "one rank": {"tensor_parallel_size": 1},
    "width over two": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, list[str]]:
    """A model folder without weights, and those of the versions 0 and 1."""
    folder = tmp_path_factory.mktemp("experts")
    paths = [write_version(folder, version, as_published(checkpoint(version)), config=CONFIG) for version in (0, 1)]
    return write_served(folder / "model"), paths


@pytest.fixture(scope="module", params=ENGINES)
def found(request, folders) -> dict:
    """What an engine says of each version in ORDER."""
    model, paths = folders
    program = Path(__file__).parent / "two_ranks.py"
    variables = {**ON_TWO_CORES, "ENGINE": json.dumps(ENGINES[request.param])}
    if ENGINES[request.param]["tensor_parallel_size"] > 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    done = subprocess.run(
        [sys.executable, str(program), str(model), *(paths[version] for version in ORDER), json.dumps([ORDER, TOKENS])],
        env=environment(**variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[0].removeprefix("FOUND "))


def test_each_version_is_what_the_engine_computes_with(found, tmp_path):
    expected = [logprobs(version, TOKENS, tmp_path / str(version)) for version in (0, 1)]
    assert np.abs(expected[0] - expected[1]).max() > 1
    for place, version in enumerate(ORDER):
        assert all(answer["error"] == "" for answer in found["commits"][place]), found["commits"][place]
        assert np.abs(np.array(found["logprobs"][place]) - expected[version]).max() < TOLERANCE, (place, version)


def test_ranks_read_all_experts_once_together(found):
    experts = sum(x.nbytes for name, x in as_published(checkpoint(0)).items() if ".experts." in name)
    rest = sum(x.nbytes for name, x in checkpoint(0).items() if ".experts." not in name)
    read = [status["bytes"] for status in found["statuses"][0]]
    assert experts < sum(read) <= experts + len(read) * rest
    assert max(read) <= experts / len(read) + rest
