"""Times weight updates of a real server: what is saved, staged, and how long generation stands still.

    PYTHONPATH=.:tests python tests/real_vllm/time_updates.py --folder /dev/shm/updates --models 0.5B 1.5B

Run it where JAX is. vLLM may be elsewhere: `--python` names its interpreter, `--python-path` a folder with its packages. Weights
are random, in bfloat16, in the shapes of Qwen2.5, saved from four simulated devices; with `--ipc` they lie in JAX's GPU memory and
go to the server without files (leave vLLM its 0.4 of the memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.3). Prints a line an update, and
fails where the server's log-probs do not follow the weights.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from published import write_version
from serving import ON_TWO_CORES, TINY_ON_CPU, Refusal, Server, serving
from tiny_qwen2 import Sizes, shapes, write_model

from jaxrl_llm.samplers.cuda_ipc import Cuda, describe

ROOT = Path(__file__).parent.parent.parent
MODELS = {
    "tiny": Sizes(),
    "0.5B": Sizes(vocabulary=151936, width=896, layers=24, heads=14, kv_heads=2, ffn=4864, context=2048),
    "1.5B": Sizes(vocabulary=151936, width=1536, layers=28, heads=12, kv_heads=2, ffn=8960, context=2048),
}
EXTENSION = ("--worker-extension-cls", "jaxrl_llm.samplers.vllm_plugin.OrbaxWorkerExtension")
CANARY = list(range(100, 300))
SAME, DIFFERENT = 0.1, 0.5  # mean nats between scores of one version, and of two


def made(version: int, sizes: Sizes) -> dict[str, jax.Array]:
    """Random weights; matrices are divided by rows over this process's devices."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("fsdp",))
    noise = np.random.default_rng(version).standard_normal(1 << 22, np.float32)
    placed = {}
    for i, (name, shape) in enumerate(shapes(tied=True, sizes=sizes).items()):
        scale = 1.0 if name.endswith("norm.weight") else 0.05
        values = np.resize(np.roll(noise, 7919 * i), shape) * np.float32(scale)
        spec = PartitionSpec("fsdp") if shape[0] % len(devices) == 0 else PartitionSpec()
        placed[name] = jax.device_put(values.astype(ml_dtypes.bfloat16), NamedSharding(mesh, spec))
    return jax.block_until_ready(placed)


def publish(folder: Path, version: int, arrays: dict[str, jax.Array]) -> str:
    """Saves a version and prints how long it took."""
    began = time.perf_counter()
    path = write_version(folder, version, arrays)
    nbytes = sum(array.nbytes for array in arrays.values())
    print(
        f"  version {version}: {nbytes / 1e6:.0f} MB saved and its checksums made in {time.perf_counter() - began:.2f} s"
    )
    return path


def update(server: Server, version: int, path: str | None, arrays: dict[str, jax.Array]) -> str:
    """One update, from a path or else from GPU memory; its times in words."""
    began, told = time.perf_counter(), "nothing staged"
    method, arguments = "commit", {}
    if path is None:
        method, arguments = "commit_ipc", {"memory": describe(arrays, Cuda())}
    else:
        status = server.stage(path, version)
        assert status["state"] == "staged", status
        told = f"staged {status['seconds']:.3f} s"
    staged = time.perf_counter()
    server.call("/pause?mode=keep&clear_cache=true")
    paused = time.perf_counter()
    answer = server.method(method, version=version, **arguments)
    assert answer["version"] == version and not answer["error"], answer
    committed = time.perf_counter()
    try:
        server.call("/update_weight_version", {"new_version": str(version)})
    except Refusal as unknown:  # before 0.30
        assert unknown.code == 404, unknown
    server.call("/resume")
    resumed = time.perf_counter()
    return (
        f"{told}, pause {paused - staged:.3f} s, {method} {answer['seconds']:.3f} s ({committed - paused:.3f} s with HTTP), "
        f"pause to resume {resumed - staged:.3f} s, whole {resumed - began:.3f} s"
    )


def time_model(name: str, given: argparse.Namespace) -> None:
    """Publishes two versions and updates a server to them in turn."""
    folder = given.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}:")
    model = write_model(folder / "model", tied=True, sizes=MODELS[name], dtype="bfloat16")
    weights = [made(version, MODELS[name]) for version in (0, 1)]
    paths = [None if given.ipc else publish(folder, version, arrays) for version, arrays in enumerate(weights)]
    path = os.pathsep.join([*given.python_path, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    found = subprocess.run(
        [given.python, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        env=os.environ | variables, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    options = ["--dtype", "bfloat16", "--max-model-len", "2048", "--gpu-memory-utilization", "0.4"]
    if given.cpu:
        options, variables = [*TINY_ON_CPU, "--dtype", "bfloat16"], ON_TWO_CORES | variables
    elif tuple(int(x) for x in found.split(".")[:2]) >= (0, 30):
        options += ["--enable-scale-out"]
    began = time.perf_counter()
    with serving(model, folder / "log", *options, *EXTENSION, python=(given.python,), **variables) as server:
        print(f"  vLLM {found} ready after {time.perf_counter() - began:.0f} s (log: {folder / 'log'})")
        scores: list[np.ndarray] = []
        for turn in range(2 * given.repeats):
            version = turn % 2
            print(f"  {turn}: {update(server, version, paths[version], weights[version])}", flush=True)
            scores.append(server.score(CANARY))
    same = max(float(np.abs(scores[turn] - scores[turn % 2]).mean()) for turn in range(len(scores)))
    different = float(np.abs(scores[1] - scores[0]).mean())
    print(f"  mean nats between scores of one version at most {same:.4f}, between the two versions {different:.2f}")
    assert same < SAME and different > DIFFERENT, "the server's log-probs do not follow the weights"
    shutil.rmtree(folder)


def main() -> None:
    """Times each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="where versions are published, such as /dev/shm/updates"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.5B", "1.5B"])
    parser.add_argument("--repeats", type=int, default=5, help="updates to each of the two versions")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("--python-path", nargs="*", default=[], help="folders to put on the server's PYTHONPATH")
    parser.add_argument("--ipc", action="store_true", help="from this process's GPU memory and not from files")
    parser.add_argument("--cpu", action="store_true", help="the server runs on the CPU")
    given = parser.parse_args()
    if not given.ipc:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
    for name in given.models:
        time_model(name, given)


if __name__ == "__main__":
    main()
