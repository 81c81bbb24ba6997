"""The values of a gated MLP's gradients: against float64, in interpret mode, and over a mesh."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.gated_mlp import mosaic_tpu, xla
from jaxrl_llm.kernels.gated_mlp.api import chosen
from jaxrl_llm.kernels.gated_mlp.mosaic_tpu import Tiles
from jaxrl_llm.models.gated import gated_mlp
from jaxrl_llm.models.linear import Spread, Stored

TILES = Tiles(rows=512, chunk=256)


@dataclass(frozen=True)
class Tpu:
    device_kind: str = "TPU v6 lite"
    platform: str = "tpu"


def arrays(tokens, width, inner, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (tokens, width), (tokens, width), (width, inner), (width, inner), (inner, width)
    scales = 1, 1, width**-0.5, width**-0.5, inner**-0.5
    return [jnp.asarray(rng.normal(size=shape) * scale, dtype) for shape, scale in zip(shapes, scales)]


def in_float64(x, g, gate, up, down):
    """(h, dgate, dup): silu'(a) = s (1 + a (1 - s)), s = 1 / (1 + exp(-a))."""
    x, g, gate, up, down = (np.asarray(part, np.float64) for part in (x, g, gate, up, down))
    a, b, dh = x @ gate, x @ up, g @ down.T
    s = 1 / (1 + np.exp(-a))
    return a * s * b, dh * b * (s + a * s * (1 - s)), dh * a * s


@pytest.mark.parametrize("run", [xla.gradients, partial(mosaic_tpu.gradients, tiles=TILES, interpret=True)])
def test_values_are_those_of_float64(run):
    # Two blocks of tokens of two chunks each, and a second block of columns that is half full.
    given = arrays(1024, 128, 384)
    for found, exact in zip(run(*given), in_float64(*given), strict=True):
        assert found.dtype == jnp.bfloat16
        # Products and results are rounded to 8 bits.
        assert np.linalg.norm(np.asarray(found, np.float64) - exact) < 6e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "context": 2}])
def test_gradients_over_a_mesh_are_those_of_one_device(axes, monkeypatch):
    monkeypatch.setattr(
        mosaic_tpu, "gradients", partial(mosaic_tpu.gradients, tiles=Tiles(rows=256, chunk=256), interpret=True)
    )
    mesh = Partitioner.create(MeshConfig(**{"fsdp": 1, **axes}), jax.devices()[:4]).mesh
    x, g, *weights = arrays(2048, 128, 256, jnp.float32)
    x, g = (part.astype(jnp.bfloat16).reshape(4, 512, 128) for part in (x, g))

    def step(x, g, *weights):
        y, pull = jax.vjp(gated_mlp, x, *weights)
        return y, *pull(g)

    alone = jax.jit(step)(x, g, *weights)
    rows = tuple(axis for axis in ("data", "fsdp") if axis in axes) or None, "context" if "context" in axes else None
    fsdp, tensor = (axis if axis in axes else None for axis in ("fsdp", "tensor"))
    specs = PartitionSpec(fsdp, tensor), PartitionSpec(fsdp, tensor), PartitionSpec(tensor, fsdp)

    def spread(x, g, *weights):
        return step(x, g, *(Spread(w, Stored(mesh, rows, spec)) for w, spec in zip(weights, specs)))

    place = lambda part, *spec: jax.device_put(part, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    with dispatch.target(Tpu()), dispatch.recording() as kernels:
        found = jax.jit(spread)(place(x, *rows), place(g, *rows), *(place(w, *spec) for w, spec in zip(weights, specs)))
    assert [choice.backend for choice in kernels] == ["mosaic_tpu"]
    found = [part.weights if isinstance(part, Spread) else part for part in found]
    for mine, theirs in zip(found, alone, strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = (np.asarray(part, np.float64) for part in (mine, theirs))
        assert np.linalg.norm(mine - theirs) < 4e-3 * np.linalg.norm(theirs)


def test_calls_that_do_not_fit_are_left_to_xla():
    def backend(*sizes, dtype=jnp.bfloat16, kind="TPU v6 lite"):
        with dispatch.target(Tpu(kind)):
            return chosen(*sizes, dtype).__name__.rpartition(".")[2]

    assert (
        backend(4096, 1536, 8960)
        == backend(768, 896, 2816)
        == backend(4096, 1536, 8960, kind="TPU v5p")
        == "mosaic_tpu"
    )
    assert backend(4096, 1536, 8960, dtype=jnp.float32) == "xla"
    assert backend(4096, 1500, 8960) == backend(4096, 1536, 8900) == backend(4100, 1536, 8960) == "xla"
    assert (
        backend(4096, 1536, 8960, kind="TPU v5 lite") == backend(4096, 8192, 28672) == backend(256, 896, 2816) == "xla"
    )
    with pytest.raises(ValueError, match=r"it runs on TPUs \(got cpu\)"):
        chosen(4096, 1536, 8960, jnp.bfloat16, backend="mosaic_tpu")


@pytest.mark.parametrize(
    ("kind", "mib", "width"),
    [*(("TPU v6 lite", 128, width) for width in (896, 1536, 3584, 4096)), ("TPU v5p", 64, 896), ("TPU v5p", 64, 2048)],
)
def test_blocks_divide_the_tokens_into_chunks_and_fit_twice_with_room_to_spare(kind, mib, width):
    for tokens in (512, 4096, 6 * 256):
        tiles = Tiles.of(kind, tokens, width)
        assert tokens % tiles.rows == 0 == tiles.rows % tiles.chunk and tiles.rows > tiles.chunk
        blocks = 2 * 2 * (2 * tiles.rows * width + 3 * 256 * width + 3 * tiles.rows * 256)
        assert blocks < tiles.vmem <= mib * 2**20 // 2
