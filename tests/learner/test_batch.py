"""A step's groups on the host: the unpacked fields, padding, mini-batches and the counts that divide their losses."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from builders import make_group, make_prompt, make_rollout
from jax.sharding import PartitionSpec

from jaxrl_llm.algorithms.batch import Advantages
from jaxrl_llm.algorithms.sft import SFT
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.experience import Group, unscored
from jaxrl_llm.learner.batch import Batch, bare, filled, to_device
from jaxrl_llm.learner.packing import Packing

PACKING = Packing(row_tokens=8, rows=2, sequences_per_row=2)
NAN = float("nan")


def three_groups() -> list[Group]:
    """Of 3, 2 and 1 rollouts; the second has no main reward, the fourth is greedy, the fifth is an environment's."""
    a, b, c = (make_prompt(n, t, source=s) for n, t, s in (("a", [1, 2], "x"), ("b", [3], "y"), ("c", [4, 5, 6], "x")))
    span = {"thought": np.array([True, False, False])}
    return [
        make_group(
            [
                make_rollout(a, [7, 8, 9], mask=[1, 0, 1], logprobs=[-1, 0, -3], spans=span),
                make_rollout(a, [7]),
                make_rollout(a, [8, 8], finish="length"),
            ],
            {"main": [1, NAN, 3], "style": [2, 2, 4], "log/length": [5, 5, 5]},
            {"main": [True, False, True]},
            weights={"style": 0.5},
        ),
        make_group(
            [make_rollout(b, [9, 9], role="greedy"), make_rollout(b, [1, 1], mask=[0, 0], finish="length")],
            {"main": [6, 7]},
        ),
        make_group([make_rollout(c, [2, 2, 2, 2])], {"main": [-1]}),
    ]


def build(groups: list[Group], **changes: int) -> Batch:
    sizes = {"minibatches": 1, "response_tokens": 4, "capacity": 8} | changes
    return Batch.build(groups, PACKING, sources=["x", "y"], **sizes)


def sequences_and_advantages(batch: Batch, groups: int):
    sequences = batch.sequences({}, {}, groups)
    return sequences, jax.device_get(SFT().advantages(jax.tree.map(np.asarray, sequences)))


def test_the_fields_of_the_view_written_out():
    fields = build(three_groups()).fields
    expected = {
        "reward": [2, 1, 5, 6, 7, -1, 0, 0],  # main + style / 2; what is invalid adds nothing
        "valid": [1, 0, 1, 1, 1, 1, 0, 0],
        "greedy": [0, 0, 0, 1, 0, 0, 0, 0],
        "truncated": [0, 0, 1, 0, 1, 0, 0, 0],  # the last response has as many tokens as fit, and ends by itself
        "group": [0, 0, 0, 1, 1, 2, 2, 2],
        "source": [0, 0, 0, 1, 1, 0, 0, 0],
        "side": [0] * 8,
        "mask": [[1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0] * 4, [1] * 4, [0] * 4, [0] * 4],
        "sampler_logprobs": [
            [-1, 0, -3, 0], [-0.5, 0, 0, 0], [-0.5, -0.5, 0, 0], [-0.5, -0.5, 0, 0], [-0.5, -0.5, 0, 0], [-0.5] * 4,
            [0] * 4, [0] * 4,
        ],
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_array_equal(fields[name], values, err_msg=name)
    assert fields["parts"].keys() == {"main", "style"}
    np.testing.assert_array_equal(fields["parts"]["main"], [1, 0, 3, 6, 7, -1, 0, 0])
    np.testing.assert_array_equal(fields["parts"]["style"], [2, 2, 4, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(fields["spans"]["thought"], [[True, False, False, False]] + [[False] * 4] * 7)


def test_invalid_greedy_and_unchosen_tokens_and_padding_leave_statistics_and_loss():
    sequences, assigned = sequences_and_advantages(build(three_groups()), groups=4)
    np.testing.assert_array_equal(sequences.counted, [1, 0, 1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(assigned.loss_mask.sum(1), [2, 0, 2, 0, 0, 4, 0, 0])


def test_streams_that_were_not_scored_are_zeros_or_absent():
    sequences = build(three_groups()).sequences({"values": np.ones((8, 4), np.float32)}, {"kl_coef": 0.5}, 3)
    assert not sequences.old_logprobs.any() and not sequences.entropy.any() and sequences.old_logprobs.shape == (8, 4)
    assert (
        sequences.ref_logprobs is None
        and sequences.values.all()
        and sequences.controls == {"kl_coef": 0.5}
        and sequences.groups == 3
    )


def test_more_sequences_than_the_view_holds_are_refused():
    with pytest.raises(ValueError, match=r"6 sequences are more than the batch holds \(5\)"):
        build(three_groups(), capacity=5)


@pytest.mark.parametrize(
    ("minibatches", "members"), [(1, [range(6)]), (2, [range(5), [5]]), (3, [range(3), [3, 4], [5]])]
)
def test_a_mini_batch_is_a_set_of_whole_groups(minibatches, members):
    found = build(three_groups(), minibatches=minibatches).minibatches
    held = [sorted(i for rows in mini for i in rows.members.tolist() if i >= 0) for mini in found]
    assert held == [list(m) for m in members]


def test_counts_are_those_of_the_mini_batch_over_all_its_micro_batches():
    batch = build(three_groups(), minibatches=2)
    sequences, assigned = sequences_and_advantages(batch, groups=3)
    first, second = (filled(mini, sequences, assigned, constant=10.0) for mini in batch.minibatches)
    assert [len(first), len(second)] == [2, 1]  # five sequences, four to a micro-batch
    for part in first:
        assert part.counts == {
            "tokens": 4,
            "sequences": 2,
            "pairs": 1,
            "constant": 20,
            "one": 1,
            "read": 4,
            "routed": 13,
        }
    # A prompt and all but the last token of a response are read: 4 + 2 + 3 + 2 + 2 positions, and 6.
    assert second[0].counts == {
        "tokens": 4,
        "sequences": 1,
        "pairs": 1,
        "constant": 10,
        "one": 1,
        "read": 4,
        "routed": 6,
    }
    assert sum(int(part.mask.sum()) for part in first) == 4 and int(second[0].mask.sum()) == 4


def test_a_mini_batch_without_anything_to_learn_divides_by_one():
    group = make_group([make_rollout(make_prompt(source="x"), [1, 2])], {"main": [0]}, {"main": [False]})
    batch = build([group])
    sequences, assigned = sequences_and_advantages(batch, groups=1)
    (part,) = filled(batch.minibatches[0], sequences, assigned, constant=10.0)
    assert part.counts.pop("routed") == len(make_prompt().tokens) + 1  # the prompt and the first of two tokens are read
    assert set(part.counts.values()) == {1.0} and not part.mask.any()


def test_packed_streams_follow_their_tokens():
    batch = build(three_groups(), minibatches=2)
    sequences, assigned = sequences_and_advantages(batch, groups=3)
    aux = np.arange(32, dtype=np.float32).reshape(8, 4)
    assigned = replace(assigned, aux={"place": aux}, returns=-aux)
    found = np.full((8, 4), NAN, np.float32)
    for rows, part in zip(
        batch.rows, [b for mini in batch.minibatches for b in filled(mini, sequences, assigned, 1.0)]
    ):
        rows.gather(part.aux["place"], found)
        np.testing.assert_array_equal(part.returns, -part.aux["place"])
        assert part.mask.dtype == bool and part.aux["place"].dtype == np.float32 and part.weights is None
        for local, row in enumerate(rows.members):
            assert row < 0 or (part.group[local] == sequences.group[row] and part.side[local] == 0)
            if row >= 0:
                tokens = part.targets[(part.sequence == local) & (part.targets >= 0)]
                np.testing.assert_array_equal(tokens, batch.rollouts[row].tokens)
    lengths = np.array([len(r.tokens) for r in batch.rollouts] + [0, 0])
    np.testing.assert_array_equal(found, np.where(np.arange(4) < lengths[:, None], aux, NAN))
    unpacked = batch.unpack([rows.scatter(aux) for rows in batch.rows])
    np.testing.assert_array_equal(unpacked, np.where(np.arange(4) < lengths[:, None], aux, 0))


def test_the_halves_of_a_pair_share_a_micro_batch_and_count_once():
    pairs = []
    for i in range(5):
        prompt = make_prompt(str(i), [1, 2], source="x")
        responses = [make_rollout(prompt, range(3 + i % 2)), make_rollout(prompt, range(2))]
        pairs.append(unscored(responses, (1, -1)))
    batch = build(pairs, capacity=10)
    np.testing.assert_array_equal(batch.fields["side"], [1, -1] * 5)
    for rows in batch.rows:
        held = set(rows.members[rows.members >= 0].tolist())
        assert all((i ^ 1) in held for i in held)  # 2k and 2k + 1 are a pair
    sequences = batch.sequences({}, {}, 5)
    mask = batch.fields["mask"].copy()
    mask[4:6] = False  # a pair that has nothing to learn
    parts = filled(batch.minibatches[0], sequences, Advantages(advantages=mask.astype(np.float32), loss_mask=mask), 1.0)
    assert {float(p.counts["pairs"]) for p in parts} == {4.0} and {float(p.counts["sequences"]) for p in parts} == {8.0}
    sides = np.concatenate([p.side for p in parts])
    assert (sides == 1).sum() == (sides == -1).sum() == 5


def test_an_unscored_group_is_valid_and_worth_nothing():
    group = unscored([make_rollout(make_prompt(), [3])])
    assert group.total().tolist() == [0] and group.valid().tolist() == [True]


def test_rows_lie_over_data_and_fsdp_and_positions_over_context():
    partitioner = Partitioner.create(MeshConfig(data=2, fsdp=1, context=2), jax.devices()[:4])
    rows = build(three_groups(), minibatches=3).rows[0]
    batch = to_device(bare(rows), partitioner)
    assert batch.tokens.sharding.spec == batch.mask.sharding.spec == PartitionSpec("data", "context")
    assert batch.group.sharding.is_fully_replicated
    np.testing.assert_array_equal(batch.tokens, rows.tokens)
    np.testing.assert_array_equal(batch.mask, rows.targets >= 0)
