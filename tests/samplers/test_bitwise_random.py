"""The bitwise mode on models, samplers and packings drawn at random: each recorded log-prob is the learner's, as bits."""

from dataclasses import replace

import numpy as np
import pytest
from bitwise_cases import (
    Case,
    compiled_as_users_compile,  # noqa: F401  # a fixture of each test here
    learners,
    policy_of,
    recorded,
)

from jaxrl_llm.models.llama3 import Llama3
from jaxrl_llm.models.qwen2 import Qwen2
from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.samplers.embedded import smaller, weights

FAMILIES = (Qwen2, Qwen3, Llama3)


def drawn_at_random(seed, layers):
    """A case, and a row's length and the most sequences of a row."""
    rng = np.random.default_rng(seed)
    pick = lambda *among: among[rng.integers(len(among))]  # noqa: E731
    kv_heads = pick(1, 2, 3)
    architecture = FAMILIES[seed % 3](
        vocabulary_size=int(rng.integers(30, 200)), width=pick(12, 20, 36), layers=layers, heads=kv_heads * pick(1, 2, 3),
        kv_heads=kv_heads, head_width=pick(4, 10, 16), mlp_width=int(rng.integers(8, 70)), tied=pick(True, False),
    )  # fmt: skip
    case = Case(
        policy_of(architecture, pick("float32", "bfloat16")), seed=seed, slots=int(rng.integers(2, 30)),
        chunk=int(rng.integers(1, 10)), temperature=float(rng.uniform(0.6, 1.4)), shrink=pick(0, 2), prefill=pick(24, 8192),
    )  # fmt: skip
    return case, int(rng.integers(50, 200)), int(rng.integers(2, 9))


def test_every_token_of_a_random_model_has_the_learners_log_prob(monkeypatch):
    monkeypatch.setattr(smaller, "FEWEST", 1)
    case, row, most = drawn_at_random(0, layers=1)
    drawn = case.drawn()
    assert len(recorded(drawn)) > 300
    assert np.array_equal(learners(case, drawn, row=row, most=most), recorded(drawn))


@pytest.mark.slow  # its programs take long to compile
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_every_token_of_random_models_has_the_same_bits_in_all_samplers_and_packings(monkeypatch, seed):
    monkeypatch.setattr(smaller, "FEWEST", 1)
    monkeypatch.setattr(weights, "room_apart", lambda policy, params: True)
    case, row, most = drawn_at_random(seed, layers=1 + seed % 2)
    drawn = case.drawn()
    assert len(recorded(drawn)) > 300
    assert np.array_equal(learners(case, drawn, row=row, most=most, seed=seed), recorded(drawn))
    monkeypatch.setattr(weights, "room_apart", lambda policy, params: False)
    others = replace(case, slots=case.slots + 7, chunk=case.chunk + 1, shrink=2 - case.shrink, prefill=32).drawn()
    for (sequence, _, logprobs), (other, _, again) in zip(drawn, others, strict=True):
        assert sequence.tolist() == other.tolist() and logprobs.tolist() == again.tolist()
