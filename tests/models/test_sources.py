"""A policy comes from an architecture or from a folder, and errors name the binding to set."""

import jax
import numpy as np
import pytest

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_weights
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sources import PolicySource

TINY = Qwen3(vocabulary_size=16, width=8, layers=1, heads=2, kv_heads=1, head_width=4, mlp_width=8)


def one_device():
    return Partitioner.create(MeshConfig(fsdp=1), jax.devices()[:1])


def test_a_pretrained_folder_gives_its_own_architecture_and_parameters(tmp_path):
    source = PolicySource(architecture=TINY)
    policy = source.policy(one_device())
    params = source.params(policy, jax.random.key(3))
    hf_weights.save(policy, params, tmp_path / "model")
    again = PolicySource(pretrained=str(tmp_path / "model"), compute_dtype="bfloat16", remat="full")
    loaded = again.policy(one_device())
    assert (loaded.architecture, loaded.compute_dtype, loaded.remat) == (TINY, "bfloat16", "full")
    got = again.params(loaded, jax.random.key(4))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(params)):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_exactly_one_origin_is_asked_for():
    with pytest.raises(ValueError, match=r"`architecture` or `pretrained` \(got neither\)"):
        PolicySource()
    with pytest.raises(ValueError, match=r"`architecture` or `pretrained` \(got both\)"):
        PolicySource(architecture=TINY, pretrained="x")


def test_a_name_that_is_neither_folder_nor_id_is_refused(tmp_path):
    source = PolicySource(pretrained=str(tmp_path / "gone"))
    with pytest.raises(
        FileNotFoundError, match=r"no folder and no Hugging Face id: set sources.PolicySource.pretrained"
    ):
        source.policy(one_device())
