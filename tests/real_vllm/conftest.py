"""A real vLLM server on the CPU; where the package is not installed each test here is skipped and says so."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ON_TWO_CORES, TINY_ON_CPU, Server, serving
from tiny_qwen2 import config, weights, write_model

EXTENSION = ("--worker-extension-cls", "faulty.FaultyExtension")
VERSIONS = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed; .ci/real_vllm makes an environment for these tests")
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "untied", tied=False)


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one server of these tests: untied, with development endpoints."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, log, *TINY_ON_CPU, *EXTENSION, VLLM_SERVER_DEV_MODE="1", **ON_TWO_CORES) as started:
        assert int(started.method("published_version")) == -1, "no version of the learner's yet"
        yield started


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of the versions 0, 1 and 2."""
    from published import write_version

    folder = tmp_path_factory.mktemp("published")
    return [write_version(folder, version, weights(version), config=config(False)) for version in range(VERSIONS)]


@pytest.fixture(scope="session")
def references() -> Callable[[int], Any]:
    """The model of a version by transformers."""
    from by_transformers import Reference

    made: dict[int, Reference] = {}

    def reference(version: int) -> Reference:
        if version not in made:
            made[version] = Reference(weights(version))
        return made[version]

    return reference
