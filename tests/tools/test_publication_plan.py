"""The simulator of publications: against arithmetic by hand, measured rows (docs/measured/vllm.md), and adapters as they are written."""

import json
from dataclasses import replace

import jax
import pytest

from jaxrl_llm.models.qwen3 import Qwen3
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.servers.publisher import named
from jaxrl_llm.tools import plan
from jaxrl_llm.tools.planning.publication import ROUTES, Rates, lora_bytes, seconds

ROUND = Rates(
    write=10, store=20, link=5, relay=4, read=50, load=100, steps=1, digest=25, copy=8, window=8, ahead=16, learners=2,
    learner_gpus=1, gpus=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        # 1000 bytes to 3 hosts of 2 servers of 2 GPUs: each GPU holds 500.
        (
            "store",
            {"write": 50, "spread": 400, "stage": 0, "commit": 5, "steps": 1},
        ),  # one host's link, of which two copies come
        ("learner", {"write": 50, "spread": 600, "stage": 0, "commit": 5, "steps": 1}),  # six copies from two links
        # The second host is 16 bytes behind the first, which reads so many of the store at a time, and the third 8 bytes behind the second.
        ("relays, store", {"write": 50, "spread": 250 + 4 + 2, "stage": 10, "commit": 5, "steps": 1}),
        ("relays, learner", {"write": 50, "spread": 250 + 2 * 2, "stage": 10, "commit": 5, "steps": 1}),
        ("adapters", {"write": 1, "spread": 6, "stage": 0, "commit": 0, "steps": 1}),
    ],
)
def test_a_publication_is_the_sum_of_its_parts_by_hand(route, wanted):
    assert seconds(1000, 3, 2, route, ROUND, adapter=10) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("route", "changed", "wanted"),
    [
        # 500 bytes pass at 4 a second while 500 are copied at 8, and two hosts are behind by 16 and 8 bytes, or by 8 each.
        ("relays, store", 0.5, 125 + 4 + 2),
        ("relays, learner", 0.5, 125 + 2 + 2),
        ("relays, store", 0.25, 93.75 + 4 + 2),  # 750 bytes are copied in longer than 250 pass
        ("relays, store", 0.01, 123.75 + 2.5 + 2),  # ten bytes are less than what the first host reads at a time
        ("relays, store", 0.004, 124.5 + 1 + 1),  # each host passes the four bytes on when it has them all
        ("relays, store", 0.0, 125),
    ],
)
def test_relays_pass_on_what_has_changed_and_copy_the_rest(route, changed, wanted):
    whole = seconds(1000, 3, 2, route, ROUND)
    assert seconds(1000, 3, 2, route, ROUND, changed=changed) == pytest.approx(whole | {"spread": wanted})


def test_relays_are_as_slow_as_digests_and_as_the_wait_for_a_turn():
    """Of 1000 bytes, digests of 2 bytes a second take 500 s on a host, and the learner's two hosts list 4 a second. With 8 bytes under way
    in a wait of 4 s, 2 bytes pass a second, and each of two hosts waits once more."""
    slow = seconds(1000, 3, 2, "relays, store", replace(ROUND, digest=2))
    assert (slow["write"], slow["spread"]) == (250, 500 + 4 + 2)
    assert seconds(1000, 3, 2, "relays, store", replace(ROUND, wait=4))["spread"] == 500 + 4 + 2 + 2 * 4
    assert seconds(1000, 1, 2, "relays, store", replace(ROUND, wait=4), changed=0.75)["spread"] == 375
    assert seconds(1000, 3, 2, "store", replace(ROUND, digest=2, wait=4)) == seconds(1000, 3, 2, "store", ROUND)


@pytest.mark.parametrize(
    ("nbytes", "gpus", "whole"),
    [(3.087e9, 1, 1.25), (16.381e9, 2, 3.18)],
)
def test_publications_on_one_host_are_within_a_tenth_of_what_was_measured(nbytes, gpus, whole):
    """Learner and server on the same H200s, by a folder in memory: nothing passes a link."""
    here = Rates(store=1e15, link=1e15, learner_gpus=gpus, gpus=gpus)
    assert sum(seconds(nbytes, 1, 1, "store", here).values()) == pytest.approx(whole, rel=0.1)


def test_adapters_have_the_bytes_of_two_factors_of_each_matrix():
    sizes = Qwen3(vocabulary_size=64, width=16, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=40)
    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.models.policy import Policy

    policy = Policy(sizes, Partitioner.create(MeshConfig(), jax.devices()[:1]))
    shapes = {name: x.shape for name, x in jax.eval_shape(named, policy.sizes()).items()}
    matrices = [shape for name, shape in shapes.items() if "_proj" in name and len(shape) == 2]
    assert len(matrices) == 3 * 7
    assert lora_bytes(sizes, 4) == sum(2 * 4 * sum(shape) for shape in matrices)
    experts = SHAPES["qwen3-30b-a3b"]
    assert lora_bytes(experts, 1) == 2 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512) + 3 * 128 * (2048 + 768))


def test_the_table_has_a_row_for_each_model_and_number_of_hosts(tmp_path, capsys):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"relay": 5e9, "store": 3e9}))
    assert plan.main(["--publication", f"--rates={file}", "--hosts=1,32"]) == 0
    rates, changed, head, *rows = capsys.readouterr().out.splitlines()
    assert changed.split()[:2] == ["changed", "1"]
    assert "relay 5e+09" in rates and "store 3e+09" in rates and all(route in head for route in ROUTES)
    assert [row.split()[0] for row in rows[::2]] == ["qwen3-8b", "qwen3-32b", "llama3-70b", "qwen3-30b-a3b"]
    assert [row.split()[2:4] for row in rows[4:6]] == [["1", "1"], ["32", "32"]]


@pytest.mark.parametrize(
    ("content", "said"),
    [({"disk": 1}, "must hold some of"), ({"link": "fast"}, "rates are numbers"), ({"link": 0}, "rates must be above 0"), ([], "must hold")],
)  # fmt: skip
def test_rates_that_are_none_are_refused(tmp_path, content, said):
    (tmp_path / "r.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said):
        Rates.read_from(str(tmp_path / "r.json"))


def test_fewer_changed_bytes_take_fewer_seconds_by_relays_alone(capsys):
    def rows(*more: str) -> list[list[str]]:
        assert plan.main(["--publication", "--hosts=8", *more]) == 0
        return [line.split()[4:] for line in capsys.readouterr().out.splitlines()[3:]]

    for whole, part in zip(rows(), rows("--changed=0.1"), strict=True):
        assert [a == b for a, b in zip(whole, part, strict=True)] == [True, True, False, False, True]
        assert float(part[2]) < float(whole[2]) and float(part[3]) < float(whole[3])
    with pytest.raises(SystemExit):
        plan.main(["--publication", "--changed=2"])
    assert "a share of 0 to 1 (got 2)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan.main(["--gin_file=gin/quickstart.gin", "--changed=0.5"])
    assert "add --publication, or leave it out" in capsys.readouterr().err


def test_a_plan_is_of_one_thing(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--publication", "--compare=x"])
    assert "one of the three" in capsys.readouterr().err
