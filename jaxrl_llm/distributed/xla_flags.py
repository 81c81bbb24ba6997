"""Sets XLA's flags for a run before JAX starts its backend; flags that the user has set stay as they are.

With several GPUs, they enable the latency-hiding scheduler, pipelined collectives and fewer, larger ones, so that the
weights of the next layer are gathered and the gradients of the last one scattered while a layer computes. On TPU, asynchronous
collectives are fused with computation, and a product of weights that fsdp splits is one product of gathered weights: XLA would
split it into as many products as there are chips, whose sums it rounds to bfloat16. On GPU, JAX gets almost all of the device's
memory, since a run shares its GPU with nobody, and most of the host's memory for offloaded arrays (XLA's own limit is 64 GB). Matrix
products use cuBLAS, which XLA's tuning chose on an H200 for all large products of an update, and which needs less memory in the
log-probs' gradient.
"""

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

COMBINED = 128 * 2**20  # bytes up to which small collectives are combined; NVLink needs about this much to be busy
HOST_LIMIT = (
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # limit of pinned memory; the default of 64 is too little for offloaded moments
)
# XLA plans a program with 80% of the memory, less arguments and results, times this; a program that needs more recomputes
# values. The larger share of a full GPU avoids that, which saves 700 kernels and 29 ms of elementwise passes in a 7B update.
PLANNED_PERCENT = 120
# Products of the same rows are merged into one product of concatenated weights where one of the weights has at most so many MiB.
# Larger weights would be concatenated anew for each token, which is not worth it.
MERGED_MIB = 8
GPU = {
    "xla_gpu_enable_triton_gemm": "false",
    "xla_gpu_memory_limit_slop_factor": str(PLANNED_PERCENT),
    "xla_gpu_dot_merger_threshold_mb": str(MERGED_MIB),
}
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
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # On a torus of three axes weights would be gathered by sums with zeros, which send twice as much and are waited for.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    # Columns of the head for rows, and shares of the embedding's width for tokens, are exchanged beside computation.
    "xla_tpu_enable_async_all_to_all": "true",
}

# Reduce-scatters, and all-gathers along lines of the torus (`scatter`) and over two or three of its axes, run on the SparseCores,
# beside computation: the TensorCores would wait for them.
ON_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
# All-reduces over the axes data and context were compiled so for v6e alone.
WHOLE_SUMS = {"xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true"}
TPU_KINDS: Mapping[str, Mapping[str, str]] = {"v5p": ON_SPARSE_CORES, "v6e": {**ON_SPARSE_CORES, **WHOLE_SUMS}}
# What chips on the PCI bus say of themselves, as `jax._src.hardware_utils` reads it.
GOOGLE = "0x1ae0"
PCI_KINDS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """Returns the number of NVIDIA GPUs that JAX will find, without asking the driver; 0 where JAX has no plugin for them."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return sum(file.name[6:].isdigit() for file in Path("/dev").glob("nvidia[0-9]*"))


def tpus(devices: Path = Path("/dev")) -> int:
    """Returns the number of TPU chips of this host, which have a driver of their own until v4 and the kernel's vfio from v5e on."""
    return len([*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")])


def tpu_kind(environment: Mapping[str, str], bus: Path = Path("/sys/bus/pci/devices")) -> str:
    """The kind of this host's TPUs, such as "v6e", by the environment or else by the chips themselves; "" where neither says it.

    A host of Google Cloud has an accelerator type such as v6e-64 in its metadata, and not always in its environment.
    """
    if named := environment.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]:
        return named
    for vendor in bus.glob("*/vendor"):
        if vendor.read_text().strip() == GOOGLE:
            kind = PCI_KINDS.get((vendor.parent / "device").read_text().strip())
            if kind is not None:
                return kind
    return ""


def on_cpu() -> bool:
    """Returns whether JAX will find no accelerator here, without starting it."""
    named = os.environ.get("JAX_PLATFORMS", "")
    return named.split(",")[0] == "cpu" or not (gpus() or tpus())


def _host_gb() -> int:
    """Returns the host's memory in units of 10^9 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9


def settings(gpus: int, tpu: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to add for the hardware; flags that `environment` already sets keep their values.

    Args:
      gpus: number of GPUs of the host.
      tpu: kind of its TPUs, such as "v6e", "" where it has some of an unknown kind, or None where it has none.
      environment: the variables that are set.
    """
    found: dict[str, str] = {}
    if gpus:
        defaults = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", HOST_LIMIT: str(_host_gb() * 9 // 10)}
        found |= {name: environment.get(name, value) for name, value in defaults.items()}
    of_tpu = {**TPU, **TPU_KINDS.get(tpu or "", {})}
    of_gpu = SEVERAL_GPUS if gpus > 1 or environment.get("JAX_NUM_PROCESSES", "1") != "1" else GPU
    for wanted, variable, flags in ((gpus > 0, "XLA_FLAGS", of_gpu), (tpu is not None, "LIBTPU_INIT_ARGS", of_tpu)):
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
    kind = tpu_kind(environment) if tpu else None
    found = settings(gpus() if here("cuda") or here("gpu") else 0, kind, environment)
    environment.update(found)
    return found
