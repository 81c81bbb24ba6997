"""Each rank reads of each tensor what vLLM's loaders will take from it."""

import numpy as np
import pytest
from served_model import HIDDEN, LAYER, SHAPES, Served, kind

from jaxrl_llm.publication.vllm_targets import targets_of


def test_one_rank_loads_every_tensor_whole_in_the_order_of_the_layers():
    targets = targets_of(Served())
    assert {name: target.shape for name, target in targets.items()} == SHAPES
    assert list(targets) == list(SHAPES)
    assert all(target.whole and target.counted for target in targets.values())


def test_a_tied_head_is_no_tensor_of_its_own():
    assert set(targets_of(Served(tied=True))) == set(SHAPES) - {"lm_head.weight"}


ALL = slice(0, HIDDEN)


@pytest.mark.parametrize(
    ("name", "boxes"),
    [
        ("model.embed_tokens.weight", [(slice(0, 32), ALL), (slice(32, 64), ALL), (slice(64, 96), ALL), (slice(96, 100), ALL)]),
        (f"{LAYER}self_attn.q_proj.weight", [(slice(4 * r, 4 * r + 4), ALL) for r in range(4)]),
        (f"{LAYER}self_attn.k_proj.weight", [(slice(0, 4), ALL), (slice(0, 4), ALL), (slice(4, 8), ALL), (slice(4, 8), ALL)]),
        (f"{LAYER}self_attn.v_proj.bias", [(slice(0, 4),), (slice(0, 4),), (slice(4, 8),), (slice(4, 8),)]),
        (f"{LAYER}self_attn.o_proj.weight", [(ALL, slice(4 * r, 4 * r + 4)) for r in range(4)]),
        (f"{LAYER}mlp.up_proj.weight", [(slice(8 * r, 8 * r + 8), ALL) for r in range(4)]),
        (f"{LAYER}mlp.down_proj.weight", [(ALL, slice(8 * r, 8 * r + 8)) for r in range(4)]),
        (f"{LAYER}input_layernorm.weight", [(ALL,)] * 4),
    ],
)  # fmt: skip
def test_each_of_four_ranks_loads_its_part(name, boxes):
    targets = [targets_of(Served(rank, 4))[name] for rank in range(4)]
    assert [target.box for target in targets] == boxes
    assert {target.shape for target in targets} == {SHAPES[name]}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_ranks_count_covers_every_divided_tensor_once(ranks):
    for name, shape in SHAPES.items():
        counted = np.zeros(shape, int)
        targets = [targets_of(Served(rank, ranks))[name] for rank in range(ranks)]
        for target in targets:
            counted[target.box] += target.counted
        assert (counted == (ranks if targets[0].whole else 1)).all(), name


def test_layers_of_unknown_kinds_are_refused():
    model = Served()
    model.model["layers"][0]["mlp"]["experts"] = kind("FusedMoE")("w13_weight")
    with pytest.raises(NotImplementedError, match=r"mlp.experts.*FusedMoE.*w13_weight.*not quantized"):
        targets_of(model)
    model.model["layers"][0]["mlp"]["experts"] = kind("FusedMoE")("weight")
    with pytest.raises(NotImplementedError, match="kind FusedMoE, not one of QKVParallelLinear"):
        targets_of(model)
