"""The tests' process: eight simulated CPU devices, a kept compilation cache, checked shape annotations, a fresh gin."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# JAX reads these once, when it is imported; xdist's workers load this file first too.
_DEVICES = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA runs all simulated devices on one pool, by default of a thread per device: collectives that devices reach in
# different orders can block every thread, and the process is killed. This is the size of that pool.
os.environ["NPROC"] = "64"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Programs that run for milliseconds are compiled with fewer optimisations; test_whole_runs.py compiles as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tracing makes objects by the million: at the collector's own thresholds its passes take up to a quarter of a test's time.
gc.set_threshold(50_000, 10, 10)

_MOST_MAPS = 20_000

import pytest
from jaxtyping import install_import_hook

# Threads that import at once can write the bytecode that the hook makes under the name of the plain one, which other processes then read.
sys.dont_write_bytecode = True
# Every annotation of the package is executed; an int where a float is asked for is fine, as in Python's own typing.
install_import_hook("jaxrl_llm", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the files of one slice, "1/4" being the second of four, where JAXRL_LLM_SLICE names one: a part of the tests for a short time."""
    if asked := os.environ.get("JAXRL_LLM_SLICE"):
        number, count = map(int, asked.split("/"))
        files = sorted({item.path for item in items})[number::count]
        left = [item for item in items if item.path not in files]
        items[:] = [item for item in items if item.path in files]
        config.hook.pytest_deselected(items=left)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes down a failure at once, in the file that JAXRL_LLM_FAILED names: a limit of time may end the process before it tells."""
    if report.failed and (file := os.environ.get("JAXRL_LLM_FAILED")):
        with open(file, "a", encoding="utf-8") as names:
            names.write(f"{report.nodeid}\n")


@pytest.fixture(autouse=True)
def fresh_gin() -> Iterator[None]:
    """gin's configuration is empty and unlocked before and after each test, whatever ran before in this worker."""
    import gin

    gin.clear_config(clear_constants=True)
    yield
    gin.clear_config(clear_constants=True)


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs() -> Iterator[None]:
    """Compiled programs leave a process that has many: Linux ends one with over 65,530 memory maps, and each program takes some."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets; a test that needs it is skipped where JAXRL_LLM_DATA names none."""
    folder = os.environ.get("JAXRL_LLM_DATA")
    if not folder:
        pytest.skip("JAXRL_LLM_DATA is unset: it names the folder of real data sets")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"JAXRL_LLM_DATA={folder} is no folder: unset it, or name the folder of real data sets")
    return path
