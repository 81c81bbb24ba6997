"""Compiles the gradients of a tiny model whose heads two devices share, for a target that is not attached, and prints its sums over devices.

python tests/compiled_heads.py v6e:2x2 HEADS KV_HEADS
"""

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrl_llm.distributed import topology

TOKENS = 128


def main(target: str, heads: int, kv_heads: int) -> None:
    """Prints {narrow_sums, added: what all-reduces in the loop over layers add}, as JSON."""
    topology.prepare(target)
    import jax
    import jax.numpy as jnp

    from jaxrl_llm.distributed import hlo
    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.models.qwen2 import Qwen2
    from jaxrl_llm.tools import programs

    size = Qwen2(
        vocabulary_size=256,
        width=256,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128,
        mlp_width=512,
        tied=True,
    )
    with programs.on(target) as there:
        partitioner = Partitioner.create(MeshConfig(tensor=2), there.devices)
        policy = Policy(size, partitioner, "bfloat16", "full")
        rows = (partitioner.mesh.size // 2, TOKENS)
        numbers = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=partitioner.sharding(("batch", "length"), rows))

        def loss(params, *places):
            return jnp.sum(jnp.square(policy.hidden(params, *places).astype(jnp.float32)))

        lowered = jax.jit(jax.grad(loss)).lower(policy.abstract(), *[numbers] * 3)
        program = hlo.Program(lowered.compile().as_text())
    sums = [one.operands for one in program.collectives if one.kind == "all-reduce" and one.looped]
    added = sorted(set(re.findall(r"\w+\[[\d,]*\]", " ".join(sums))))
    print(json.dumps({"narrow_sums": program.narrow_sums, "added": added}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
