"""Makes devices by name, without the hardware: the target's own compiler says what a program needs on a pod or a GPU host.

`v6e:16x16` and `v5p:4x4x4` are a kind of TPU and the shape of its torus, also by the name of Google Cloud's accelerator type, v6e-256
and v5p-128; `2*v6e:16x16` are two such slices. `h200:8` is a kind of GPU and how many one host has. Such devices compile and cannot run.
TPU programs need the package libtpu, GPU programs JAX's plugin for CUDA, and neither needs the chip, so both compile on a host of CPUs.
`prepare` must be called before JAX starts its backends.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from jaxrl_llm.distributed import xla_flags

TPUS, GPUS = ("v5p", "v6e"), ("h200",)
_SLICES = re.compile(r"([1-9]\d?)\*(?=v)")
_ACCELERATOR = re.compile(r"(v\d+\w*)-(\d+)")
_SHAPE = re.compile(r"(v\d+\w*):(\d+(?:x\d+){1,2})|([a-z]+\d+):(\d+)")
# What XLA must know of a GPU that is not there: the limits of compute capability 9.0, and the sizes of one H200.
_LIMITS = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""


class Missing(ImportError):
    """Raised where the compiler of a target is not installed."""


def parsed(name: str) -> tuple[str, tuple[int, ...]]:
    """Returns (kind, shape of a slice) of a name; raises ValueError where it names no target that programs can be compiled for."""
    one = _SLICES.sub("", name, count=1)
    found = _SHAPE.fullmatch(one)
    kind, shape = (None, "") if found is None else (found[1] or found[3], found[2] or found[4])
    sizes = tuple(int(n) for n in shape.split("x") if n)
    if found is None and (accelerator := _ACCELERATOR.fullmatch(one)):
        kind, sizes = accelerator[1], _torus(accelerator[1], int(accelerator[2]))
    if kind not in (*TPUS, *GPUS) or 0 in sizes or not sizes:
        raise ValueError(
            f"--topology={name} names no target: use a kind of TPU and its shape, such as v6e:16x16 or v5p:4x4x4, an accelerator type "
            "such as v6e-64, slices of one such as 2*v6e:16x16, or a kind of GPU and how many one host has, such as h200:8; "
            f"kinds are {', '.join((*TPUS, *GPUS))}"
        )
    return kind, sizes


def _torus(kind: str, number: int) -> tuple[int, ...]:
    """Returns the shape that Google Cloud gives an accelerator type of `number` chips (cores, of v5p, two per chip); () for none."""
    axes, chips = (2, number) if kind == "v6e" else (3, number // 2)
    if chips < 1 or chips & (chips - 1) or (axes == 3 and (number % 2 or chips < 4)):
        return ()
    if (axes, chips) == (3, 4):
        return (2, 2, 1)  # the chips of one host
    doublings = chips.bit_length() - 1
    return tuple(2 ** ((doublings + place) // axes) for place in range(axes))


def slices(name: str) -> int:
    """Returns the number of slices in a name; a data centre's network joins them."""
    found = _SLICES.match(name)
    return int(found[1]) if found else 1


def prepare(name: str, environment: MutableMapping[str, str] | None = None) -> dict[str, str]:
    """Sets the environment in which JAX's backends must start to compile for a target; returns what was set.

    The process itself computes on its CPU. XLA's flags are those that a run on the target gets, and the user's stay.

    Raises:
      ValueError: the name names no target.
      Missing: the target's compiler is not installed.
    """
    kind, sizes = parsed(name)
    _check_installed(kind)
    environment = os.environ if environment is None else environment
    gpus = sizes[0] if kind in GPUS else 0
    found = xla_flags.settings(gpus, kind if kind in TPUS else None, environment) | {"JAX_PLATFORMS": "cpu"}
    if kind in TPUS:
        # No metadata server is asked for the TPU's host, and several processes may compile at once.
        found |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment.update(found)
    if "jax" in sys.modules:  # it read the variable when it was imported
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    return found


def _check_installed(kind: str) -> None:
    if kind in TPUS and importlib.util.find_spec("libtpu") is None:
        raise Missing(
            f"programs for {kind} are compiled by libtpu, which is not installed: pip install 'jaxrl-llm[aot-tpu]'"
        )
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if kind in GPUS and not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise Missing(
            f"programs for {kind} are compiled by JAX's plugin for CUDA, which is not installed: pip install 'jaxrl-llm[aot-gpu]'"
        )


def devices(name: str) -> list[Any]:
    """Returns the devices of a target, in the order in which its processes list them; call `prepare` first.

    Raises:
      ValueError: the name names no target, or the compiler knows no such shape.
      Missing: the target's compiler is not installed.
    """
    import jax
    from jax.experimental import topologies

    kind, sizes = parsed(name)
    _check_installed(kind)
    try:
        if kind in TPUS:
            shape, number = f"{kind}:{'x'.join(map(str, sizes))}", slices(name)
            several = {"num_slices": number} if number > 1 else {}
            return list(topologies.get_topology_desc(platform="tpu", topology_name=shape, **several).devices)
        options: Mapping[str, Any] = {"topology": f"1x1x{sizes[0]}", "target_config": _LIMITS}
        return list(topologies.get_topology_desc(platform="cuda", topology_name=kind, **options).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        line = str(error).splitlines()[0][:300]
        raise ValueError(f"--topology={name}: the compiler makes no such target ({line})") from error
