"""The embedded sampler on simulated devices."""

import numpy as np
import pytest

from jaxrl_llm.experience import SamplingParams

# Devices, mesh sizes, and fields of the sampler.
MESHES = {
    "data": (2, {"data": 2, "fsdp": 1}, {}),
    "fsdp": (4, {"fsdp": 4}, {"gather_weights": True}),
    "tensor": (2, {"fsdp": 1, "tensor": 2}, {}),
    "context": (2, {"fsdp": 1, "context": 2}, {}),
    "three axes": (8, {"data": 2, "fsdp": 2, "tensor": 2}, {}),
}


@pytest.fixture(scope="module")
def one_device(tiny, prefixes, draw):
    return [draw(tiny, prefixes, 2, SamplingParams(max_tokens=6, temperature=t)) for t in (0.0, 1.0)]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_draws_the_tokens_of_one_device(make, prefixes, draw, one_device, mesh):
    devices, sizes, fields = MESHES[mesh]
    model = make(devices, **sizes)
    for temperature, expected in zip((0.0, 1.0), one_device):
        groups = draw(model, prefixes, 2, SamplingParams(max_tokens=6, temperature=temperature), **fields)
        for group, expected_group in zip(groups, expected):
            for completion, other in zip(group, expected_group):
                assert completion.tokens.tolist() == other.tokens.tolist()
                np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-4)
