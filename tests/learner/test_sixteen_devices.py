"""One update has the same loss and gradients on one and on sixteen devices, in a process that simulates them."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

DEVICES = 16
ALONE = "alone"
MESHES: Mapping[str, Mapping[str, int]] = {
    "fsdp16": {"fsdp": 16},
    "data4_fsdp4": {"data": 4, "fsdp": 4},
    "fsdp4_tensor4": {"fsdp": 4, "tensor": 4},  # more shards than the two key heads
}
LOSS = "loss"
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """{mesh: {"loss" or a parameter's path: the loss, or the parameter's gradient}}"""
    out = tmp_path_factory.mktemp("updates") / "updates.npz"
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, __file__, str(out)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, x in np.load(out).items():
        mesh, _, path = name.partition("/")
        found.setdefault(mesh, {})[path] = x
    return found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.slow
def test_a_mesh_of_sixteen_devices_has_the_loss_and_gradients_of_one(mesh, updates):
    found, alone = updates[mesh], updates[ALONE]
    assert found.keys() == alone.keys()
    np.testing.assert_allclose(found[LOSS], alone[LOSS], rtol=1e-5)
    for path, x in alone.items():
        np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=path)


def write(out: Path) -> None:
    """Writes the loss and the gradients of one update, in float32, of every mesh and of one device."""
    import jax
    from learner_cases import GRPO_CASE, batches_of, first_gradient, fresh_state, leaves, make_batch, make_learner

    from jaxrl_llm.distributed.mesh import MeshConfig

    assert jax.device_count() == DEVICES
    arrays = {}
    for name, sizes in {ALONE: {}, **MESHES}.items():
        learner = make_learner(GRPO_CASE, MeshConfig(**sizes), DEVICES if sizes else 1)
        state, metrics = learner.update(fresh_state(learner), batches_of(learner, make_batch(rows=DEVICES)))
        found = {LOSS: metrics["loss/total"], **leaves(first_gradient(state))}
        arrays |= {f"{name}/{path}": np.asarray(x) for path, x in found.items()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
