"""Settings of XLA that a run wants before JAX starts its backend; what the user has set is left as it is.

Several GPUs: the latency-hiding scheduler, pipelined collectives and fewer, larger ones, so that the gathering of the next
layer's weights and the scattering of the last one's gradients run while a layer computes. TPU: asynchronous collectives
fused with computation. GPU: almost all memory for JAX, since a run shares its GPU with nobody, most of the host's for what is
offloaded (XLA allows 64 GB by itself), and products by cuBLAS, which XLA's tuning chose on an H200 for all large products of an
update, and which needs less memory in the log-probs' gradient.
"""

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

COMBINED = 128 * 2**20  # bytes of small collectives that are joined; NVLink needs about this much to be busy
HOST_LIMIT = (
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of pinned memory; 64 where it is not set, too little for offloaded moments
)
# XLA plans with 80% of the memory less arguments and results, times this; below the need of a program it computes values again,
# which a full GPU's larger share makes unnecessary: in a 7B update 700 kernels and 29 ms of elementwise passes.
PLANNED_PERCENT = 120
GPU = {"xla_gpu_enable_triton_gemm": "false", "xla_gpu_memory_limit_slop_factor": str(PLANNED_PERCENT)}
SEVERAL_GPUS = {
    **GPU,
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_enable_highest_priority_async_stream": "true",
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    "xla_gpu_all_gather_combine_threshold_bytes": str(COMBINED),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(COMBINED),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(COMBINED),
}
TPU = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}


def gpus() -> int:
    """NVIDIA GPUs that JAX will find here, without asking the driver; 0 where JAX has no plugin for them."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return sum(file.name[6:].isdigit() for file in Path("/dev").glob("nvidia[0-9]*"))


def tpus(devices: Path = Path("/dev")) -> int:
    """TPU chips of this host: until v4 they have a driver of their own, from v5e on the kernel's vfio."""
    return len([*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")])


def _host_gb() -> int:
    """The host's memory, 10^9 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9


def settings(gpus: int, tpu: bool, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to add for this hardware; flags that `environment` names already stay as they are there."""
    found: dict[str, str] = {}
    if gpus:
        defaults = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", HOST_LIMIT: str(_host_gb() * 9 // 10)}
        found |= {name: environment.get(name, value) for name, value in defaults.items()}
    of_gpu = SEVERAL_GPUS if gpus > 1 or environment.get("JAX_NUM_PROCESSES", "1") != "1" else GPU
    for wanted, variable, flags in ((gpus > 0, "XLA_FLAGS", of_gpu), (tpu, "LIBTPU_INIT_ARGS", TPU)):
        if wanted:
            there = environment.get(variable, "")
            named = {flag.partition("=")[0].lstrip("-") for flag in there.split()}
            found[variable] = " ".join([there, *(f"--{n}={v}" for n, v in flags.items() if n not in named)]).strip()
    return found


def apply(environment: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Adds the settings for this machine to the environment, before JAX starts; returns what was set."""
    environment = os.environ if environment is None else environment
    allowed = environment.get("JAX_PLATFORMS", "")
    here = lambda name: not allowed or name in allowed  # noqa: E731
    tpu = here("tpu") and bool(importlib.util.find_spec("libtpu")) and tpus() > 0
    found = settings(gpus() if here("cuda") or here("gpu") else 0, tpu, environment)
    environment.update(found)
    return found
