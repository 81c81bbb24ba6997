"""Plain names become gin files and bindings, in Python and on the command line alike."""

from pathlib import Path

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.interface import composition
from jaxrl_llm.interface.commands import _given as given
from jaxrl_llm.interface.composition import Composition, compose, literal, value

ROOT = Path(__file__).parents[2]
PAIRS = [{"prompt": f"say {n}", "chosen": f"{n}!", "rejected": "no"} for n in range(4)]


@pytest.mark.parametrize(
    ("word", "name", "meant"),
    [
        ("group_size=16", "group_size", 16),
        ("learning_rate=1e-6", "learning_rate", 1e-6),
        ("GROUP_SIZE=16", "GROUP_SIZE", 16),
        ("grpo.GRPO.clip_high=0.3", "grpo.GRPO.clip_high", 0.3),
        ("rl/train.Stage.old_logprobs=sampler", "rl/train.Stage.old_logprobs", "sampler"),
        ("run_dir=runs/a=b", "run_dir", "runs/a=b"),
        ("pretrained=Qwen/Qwen2.5-0.5B", "pretrained", "Qwen/Qwen2.5-0.5B"),
        ("reward=my_file.py:my_reward", "reward", "my_file.py:my_reward"),
        ("profile_steps=(5,)", "profile_steps", (5,)),
        ("profile_steps=[5, 6]", "profile_steps", [5, 6]),
        ("filter=None", "filter", None),
        ("greedy=False", "greedy", False),
        ("name='123'", "name", "123"),
        ("name=", "name", ""),
        ("text=it's", "text", "it's"),
        ("weights={'a': 1}", "weights", {"a": 1}),
        ("ALGORITHM=@gspo.GSPO()", "ALGORITHM", "@gspo.GSPO()"),
    ],
)
def test_a_setting_needs_no_quotes(word, name, meant):
    files, settings = given([word])
    assert not files
    assert settings == {name: meant} and type(settings[name]) is type(meant)


def test_words_without_a_name_are_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd=name.gin").write_text("")
    assert given(["quickstart", "odd=name.gin", "./a/b.gin", "seed=1"]) == (
        ["quickstart", "odd=name.gin", "./a/b.gin"], {"seed": 1},
    )  # fmt: skip


@pytest.mark.parametrize("text", ["[a, b]", "{'a': b}", "(1", "'open"])
def test_a_broken_literal_is_refused(text):
    with pytest.raises(ValueError, match="Python literal"):
        value(text)


@pytest.mark.parametrize("name", ["quickstart", "quickstart.gin", "gin/quickstart.gin"])
def test_the_packages_files_go_by_their_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert composition.gin_file(name) == "gin/quickstart.gin"


def test_a_file_that_is_not_there_is_told_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"quikstart .*quickstart"):
        composition.gin_file("quikstart")
    with pytest.raises(ValueError, match=r"gps.*gin/algorithms/gps\.gin.*gpg"):
        compose(["quickstart"], {"algorithm": "gps"})
    with pytest.raises(ValueError, match=r"reward=mine\.py names no function.*mine\.py:NAME"):
        compose(["quickstart"], {"reward": "mine.py"})
    with pytest.raises(ValueError, match=r"mathz.*maths"):
        compose(["quickstart"], {"reward": "mathz"})


def test_component_words_are_the_gin_files_and_bindings_that_mean_the_same():
    words = {"algorithm": "gspo", "reward": "my_file.py:my_reward", "data": "my.jsonl", "group_size": 16}
    assert compose(["gin/grpo_gsm8k.gin"], words) == Composition(
        files=["gin/grpo_gsm8k.gin", "gin/data/rows.gin", "gin/algorithms/gspo.gin", "gin/rewards/function.gin"],
        bindings={
            "DATA_SOURCE": "my.jsonl", "REWARD_FUNCTION": "my_file.py:my_reward", "EVALUATION_LIMIT": 256, "GROUP_SIZE": 16,
        },
    )  # fmt: skip


def test_a_pretrained_model_computes_in_float32_on_a_cpu_alone():
    words = {"model": "owner/name", "data": "sums"}
    on_cpu, elsewhere = (compose([], words, cpu=cpu).bindings for cpu in (True, False))
    assert on_cpu == elsewhere | {"sources.PolicySource.compute_dtype": "float32", "ROW_TOKENS": 1024, "ROWS": 1}
    assert elsewhere["PRETRAINED"] == "owner/name" and elsewhere["tokenizer.PretrainedTokenizer.path"] == "%PRETRAINED"
    asked = {"sources.PolicySource.compute_dtype": "bfloat16"}
    assert compose([], words | asked, cpu=True).bindings["sources.PolicySource.compute_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"prompt_limit": 32, "RESPONSE_LIMIT": 32}, (64, 16)),
        ({"response_limit": 700}, (1212, 1)),
        ({"response_limit": 88, "rows": 3}, (600, 3)),
        ({"prompt_limit": "%RESPONSE_LIMIT"}, (None, None)),
        ({"response_limit": 32, "algorithm": "packed_sft"}, (None, None)),
    ],
)
def test_rows_are_no_longer_than_a_sequence_on_a_cpu_alone(given, shape):
    words = {"model": "tiny", "data": "sums", "reward": "exact"} | given
    found = compose([], words, cpu=True).bindings
    assert (found.get("ROW_TOKENS"), found.get("ROWS")) == shape
    assert "ROW_TOKENS" not in compose([], words, cpu=False).bindings
    assert "ROW_TOKENS" not in compose(["gin/quickstart.gin"], given, cpu=True).bindings


@pytest.mark.parametrize(
    ("tokenizer", "kind", "path"),
    [
        (None, "PretrainedTokenizer", "owner/name"),
        ("byte", "ByteTokenizer", None),
        ("@tokenizer.ByteTokenizer()", "ByteTokenizer", None),
        ("other/name", "PretrainedTokenizer", "other/name"),
        ("@tokenizer.PretrainedTokenizer()", "PretrainedTokenizer", "owner/name"),
    ],
)
def test_a_pretrained_model_brings_its_tokenizer_unless_another_is_named(tokenizer, kind, path):
    composed = compose(
        [], {"model": "owner/name", "data": "sums", "reward": "exact", "tokenizer": tokenizer, "steps": 2}
    )
    run, _ = command_line.build(composed.files, composed.lines)
    assert (type(run.tokenizer).__name__, getattr(run.tokenizer, "path", None)) == (kind, path)


@pytest.mark.parametrize(
    ("platforms", "gpus", "tpus", "cpu"),
    [("cpu", 1, 0, True), ("", 0, 0, True), ("", 1, 0, False), ("", 0, 4, False), ("cuda,cpu", 1, 0, False)],
)
def test_what_counts_as_a_cpu(monkeypatch, platforms, gpus, tpus, cpu):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(xla_flags, "gpus", lambda: gpus)
    monkeypatch.setattr(xla_flags, "tpus", lambda: tpus)
    assert xla_flags.on_cpu() is cpu


def test_a_run_without_files_needs_a_model_and_data():
    with pytest.raises(ValueError, match="no model"):
        compose([], {"data": "my.jsonl"})
    with pytest.raises(ValueError, match="no data"):
        compose([], {"model": "tiny"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("runs/x", "'runs/x'"), (Path("a/b"), "'a/b'"), (1e-6, "1e-06"), ((1, 2), "(1, 2)"), (None, "None"), ("%SEED", "%SEED"),
        ("@a/rows.Rows()", "@a/rows.Rows()"), ("50%", "'50%'"),
    ],
)  # fmt: skip
def test_values_as_gin_text(given, text):
    assert literal("X", given) == text


def test_a_number_of_numpy_is_a_number_and_an_object_is_refused():
    import numpy as np

    assert literal("X", np.float64(0.5)) == "0.5" and literal("X", np.int32(3)) == "3"
    with pytest.raises(ValueError, match=r"GROUP_SIZE must be text.*got object"):
        literal("GROUP_SIZE", object())


def rows_for(name: str, folder: Path) -> dict[str, object]:
    """The settings that an algorithm needs beside its name: rows of its kind, and a teacher where it has one."""
    import json

    kinds = {
        "documents": [{"prompt": "a b", "completion": "c d"}], "demonstrations": [{"prompt": "a", "completion": "b"}],
        "pairs": PAIRS, "labelled": [{"prompt": "a", "completion": "b", "label": True}],
    }  # fmt: skip
    offline = {"packed_sft": "documents", "sft": "demonstrations", "kto": "labelled"}
    offline |= dict.fromkeys(
        ("dpo", "cdpo", "cpo", "hinge", "ipo", "orpo", "robust_dpo", "simpo", "reward_model", "pair_classifier", "apo_zero", "apo_down",
         "bco_pair", "discopop", "exo_pair", "nca_pair", "sppo_hard"), "pairs"
    )  # fmt: skip
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in kinds.get(offline.get(name, ""), PAIRS)))
    settings: dict[str, object] = {"model": "tiny", "data": str(data), "steps": 2, "run_dir": str(folder / "run")}
    if name == "distill" or name.startswith("gkd"):
        settings["teacher_path"] = str(folder)
    if name not in offline:
        settings["reward"] = "exact"
    return settings


@pytest.mark.parametrize("name", composition.names("algorithms"))
def test_every_algorithm_builds_by_its_name(name, tmp_path):
    import jaxrl_llm as rl

    run = getattr(rl, name)(**rows_for(name, tmp_path))
    (stage,) = run.run.stages
    text = (ROOT / f"gin/algorithms/{name}.gin").read_text()
    assert f"@{type(stage.algorithm).__module__.rpartition('.')[2]}.{type(stage.algorithm).__name__}()" in text
    assert stage.samples == ("reward" in rows_for(name, tmp_path)) and stage.steps == 2
    assert bool(stage.evaluations) == stage.samples
    assert (stage.held_out is None) == stage.samples
    assert rl.train(algorithm=name, **rows_for(name, tmp_path)).config == run.config


def test_an_algorithm_that_samples_asks_for_a_reward(tmp_path):
    import jaxrl_llm as rl

    with pytest.raises(ValueError, match=r"GRPO learns from samples.*no reward"):
        rl.grpo(**rows_for("dpo", tmp_path))


def test_a_name_that_is_no_algorithm_is_an_attribute_error():
    import jaxrl_llm as rl

    with pytest.raises(AttributeError, match="no attribute 'gropo'"):
        rl.gropo  # noqa: B018
    assert {"grpo", "dpo", "sft", "ppo", "train"} <= set(dir(rl))


def test_the_train_package_is_called_as_the_function():
    import jaxrl_llm as rl
    from jaxrl_llm import train
    from jaxrl_llm.interface import start

    assert rl.train is train and train.Run.__module__ == "jaxrl_llm.train.run"
    assert callable(train) and callable(start.train)
