"""Compiles a loop over layers whose weights are split over all devices of a target that is not attached, and prints how they are gathered.

python tests/compiled_gathers.py v5p:4x4x4
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrl_llm.distributed import topology


def main(target: str) -> None:
    """Prints [kind, whether asynchronous, executions, bytes, devices] of each exchange, as JSON."""
    topology.prepare(target)
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxrl_llm.distributed import hlo
    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner

    mesh = Partitioner.create(MeshConfig(), topology.devices(target)).mesh
    layers, tokens, wide, width = 3, 1024, 4096, 8192

    def array(dtype, shape, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def step(x, weights):
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        up, down = (w.astype(x.dtype) for w in weights)
        h = jax.lax.with_sharding_constraint(jax.nn.relu(jnp.einsum("btd,dm->btm", x, up)), rows)
        return jax.lax.with_sharding_constraint(x + jnp.einsum("btm,md->btd", h, down), rows), None

    weights = (
        array(jnp.float32, (layers, width, wide), None, "fsdp"),
        array(jnp.float32, (layers, wide, width), None, None, "fsdp"),
    )
    lowered = jax.jit(lambda x, w: jax.lax.scan(step, x, w)[0]).lower(
        array(jnp.bfloat16, (mesh.size, tokens, width), "fsdp"), weights
    )
    found = hlo.Program(lowered.compile().as_text()).collectives
    print(json.dumps([[c.kind, c.asynchronous, c.times, c.bytes, c.devices] for c in found]))


if __name__ == "__main__":
    main(sys.argv[1])
