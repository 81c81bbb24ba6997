"""Prefilled prompts copied into slots: NumPy's result, on any mesh and in both layouts of a cache, and nothing else written."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from sampler_cases import built

from jaxrl_llm.kernels import dispatch
from jaxrl_llm.samplers.embedded import decode

SLOTS, LENGTH, ROWS, TOKENS = 16, 12, 8, 4
AT, FROM = np.array([3, 15, 0, 8, SLOTS, SLOTS], np.int32), np.array([7, 0, 0, 5, 0, 0], np.int32)  # the last are none


@dataclass(frozen=True)
class Chip:
    platform: str
    device_kind: str


@pytest.mark.parametrize("platform", ["gpu", "tpu", "cpu"])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_only_the_named_slots_are_written(mesh: dict[str, int], platform: str) -> None:
    policy = built(8 if mesh else 1, **mesh).policy
    rng = np.random.default_rng(0)
    with dispatch.target(Chip(platform, platform)):
        shapes = policy.cache_shapes(SLOTS, LENGTH, None), policy.cache_shapes(ROWS, TOKENS, None)
        old, new = ({n: rng.normal(size=x.shape).astype(np.float32) for n, x in one.items()} for one in shapes)
        seen, tokens = rng.integers(0, 2, (SLOTS, 24)) > 0, rng.integers(0, 24, (ROWS, TOKENS), dtype=np.int32)
        tokens[5, 2:] = decode.NO_TOKEN
        cache, block = (
            {n: jax.device_put(x, one[n].sharding) for n, x in arrays.items()}
            for arrays, one in zip((old, new), shapes)
        )
        found, marked = decode.place(cache, seen.copy(), block, tokens, AT, FROM, policy=policy)
    want, marks = {n: x.copy() for n, x in old.items()}, seen.copy()
    for slot, row in list(zip(AT, FROM))[:4]:
        for name, entries in want.items():
            if platform == "tpu":
                entries[:, slot, :, :TOKENS] = new[name][:, row]
            else:
                entries[:, slot, :TOKENS] = new[name][:, row]
        marks[slot] = np.isin(np.arange(24), tokens[row])
    for name, entries in want.items():
        np.testing.assert_array_equal(np.asarray(found[name]), entries)
    np.testing.assert_array_equal(np.asarray(marked), marks)
