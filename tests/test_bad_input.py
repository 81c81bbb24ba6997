"""Bad input ends early, with one line that names the binding, file or row, and leaves nothing half-written."""

import os
from pathlib import Path

import pytest
import tiny_run

from jaxrl_llm import command_line, launch

TINY = tiny_run.GIN_FILE


def fails(
    capsys: pytest.CaptureFixture[str],
    run_dir: Path,
    *words: str,
    gin_file: str = TINY,
    dry: bool = True,
    **more: object,
) -> str:
    """Runs launch in this process; asserts the exit code, the words in the message, and that no run folder appeared."""
    flags = [f"--gin={b}" for b in tiny_run.bindings(run_dir, **more)]
    code = launch.main([f"--gin_file={gin_file}", *flags, *(["--dry_run"] if dry else [])])
    message = capsys.readouterr().err
    assert code == 1
    assert message.startswith("error: ")
    for word in words:
        assert word in message
    return message


def test_an_unknown_binding_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "clip_hi", "grpo.GRPO", **{"grpo.GRPO.clip_hi": 0.3})
    assert not (tmp_path / "run").exists()


def test_a_macro_that_nothing_reads_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path, "--gin=GRUOP_SIZE=8: nothing reads GRUOP_SIZE here; is GROUP_SIZE meant?", GRUOP_SIZE=8)
    fails(capsys, tmp_path, "--gin=ELSEWHERE=1: nothing reads ELSEWHERE here\n", ELSEWHERE=1)
    file, inner = tmp_path / "mine.gin", tmp_path / "inner.gin"
    inner.write_text("# GRUOP_SIZE = 4\ngroup_size = 4\n")
    file.write_text(f"include '{TINY}'\ninclude '{inner}'\n")
    fails(capsys, tmp_path, f"{inner} line 2: nothing reads group_size here; is GROUP_SIZE meant?", gin_file=str(file))


def test_a_macro_that_is_read_in_a_binding_overridden_later_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "mine.gin"
    file.write_text(f"include '{TINY}'\nMINE = 3\nSTEPS = %MINE\nSTEPS = 4\n")
    run, _ = command_line.build([str(file)], tiny_run.bindings(tmp_path / "run"))
    assert run.stages[-1].steps == 4


def test_all_that_gin_calls_operative_may_be_set_on_the_command_line_and_files_may_set_more(tmp_path: Path) -> None:
    file = tmp_path / "mine.gin"
    others = "from jaxrl_llm.algorithms import ppo\nppo.PPO.clip_high = 0.3\ntrain.Stage.steps = 3\n"
    file.write_text(
        f"from __gin__ import dynamic_registration\nfrom jaxrl_llm import train\n{others}include '{TINY}'\n"
    )
    later = "tiny_reward.early_letters.text = 'a function that is handed on is called when the run is built'"
    given = [*tiny_run.bindings(tmp_path / "run"), later]
    run, _ = command_line.build([str(file)], given)
    used = command_line.load_gin().operative_config_str(max_line_length=120)
    again, _ = command_line.build([str(file)], [*given, used])
    assert used.count("\n") > 100 and command_line.load_gin().operative_config_str(max_line_length=120) == used
    assert again.stages == run.stages


def test_a_component_that_no_file_imports_is_found_by_its_module(tmp_path: Path) -> None:
    bindings = tiny_run.bindings(tmp_path / "run", ALGORITHM="@gspo.GSPO()", **{"gspo.GSPO.kl_coef": 0.5})
    run, config = command_line.build([TINY], bindings)
    assert (type(run.stages[-1].algorithm).__name__, run.stages[-1].algorithm.kl_coef) == ("GSPO", 0.5)
    (tmp_path / "config.gin").write_text(config)
    again, same = command_line.build([str(tmp_path)])
    assert again.stages[-1].algorithm == run.stages[-1].algorithm and same == config


def test_a_function_where_a_reward_is_meant_is_told_of_the_component_for_functions(tmp_path: Path) -> None:
    done = tiny_run.launch(tmp_path / "run", REWARD="@tiny_reward.early_letters")  # without the suite's checks of types
    assert done.returncode == 1 and "must be a reward component (got " in done.stderr
    assert "gin/rewards/function.gin and set REWARD_FUNCTION = 'FILE.py:NAME'" in done.stderr


def test_files_of_the_package_are_found_from_any_folder_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # gin looks for gin/base.gin here first
    for _ in range(2):
        command_line.build([TINY], tiny_run.bindings(tmp_path / "run"))
    assert not caplog.records


def test_a_missing_gin_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch.main([f"--gin_file={tmp_path}/none.gin"]) == 1
    assert "none.gin" in capsys.readouterr().err


def test_a_gin_file_without_a_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "empty.gin"
    file.write_text("SEED = 1\n")
    assert launch.main([f"--gin_file={file}"]) == 1
    assert "RUN" in capsys.readouterr().err


def test_a_missing_value_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch.main([f"--gin_file={tiny_run.ROOT}/gin/base.gin"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_group_of_one_is_refused_where_the_estimator_compares(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails(capsys, tmp_path / "run", "GRPO needs group_size >= 2 (got 1)", "GROUP_SIZE", GROUP_SIZE=1)


def test_prompts_that_do_not_split_into_mini_batches_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails(capsys, tmp_path / "run", "prompts_per_step (4)", "3 mini-batches", MINIBATCHES=3)


def test_rows_that_do_not_divide_over_the_mesh_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "train.Packing.rows (6)", "multiples of 8", ROWS=6)


def test_a_mesh_that_does_not_fit_the_devices_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "mesh", "8 devices", **{"train.MeshConfig.tensor": 3})


def test_a_row_too_short_for_the_longest_sequence_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fails(capsys, tmp_path / "run", "row_tokens >= 27", PROMPT_LIMIT=16, RESPONSE_LIMIT=12, ROW_TOKENS=20)


def test_a_filter_before_the_rewards_statistics_is_refused() -> None:
    class Waiting:
        needs_stats = True

        async def score(self, rollouts: object, stats: object = None) -> object:
            raise AssertionError("not asked")

    from jaxrl_llm.algorithms.grpo import GRPO
    from jaxrl_llm.data.sorting import Sorting
    from jaxrl_llm.learner.optimizer import Optimizer
    from jaxrl_llm.rollouts.collect import DynamicSampling
    from jaxrl_llm.train.stage import Stage

    with pytest.raises(ValueError, match="FILTER"):
        Stage(
            name="rl", algorithm=GRPO(), data=Sorting(), optimizer=Optimizer(), steps=1, group_size=2, reward=Waiting(), filter=DynamicSampling()
        )  # fmt: skip


def test_filtered_training_samples_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "top_k", "plain tempered softmax", **{"rl/experience.SamplingParams.top_k": 5})


def test_prompts_that_are_all_too_long_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "none of 64 rows is left", "max_prompt_tokens", dry=False, PROMPT_LIMIT=4)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fails(capsys, tmp_path / "run", "TOKENIZER", "vocabulary 8", dry=False, **{"qwen3.Qwen3.vocabulary_size": 8})


def test_a_folder_without_weights_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    more = {
        "sources.PolicySource.architecture": None,
        "sources.PolicySource.pretrained": repr(str(tmp_path / "model")),
    }
    fails(capsys, tmp_path / "run", str(tmp_path / "model"), **more)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_folder_without_permission_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    fails(capsys, tmp_path / "locked" / "run", "RUN_DIR", dry=False)


def test_a_run_folder_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(capsys, tmp_path / "file" / "run", "RUN_DIR", dry=False)


def test_a_malformed_row_names_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": \n')
    file = tmp_path / "bad.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\nfrom jaxrl_llm.data import gsm8k\n"
        f"include '{TINY}'\nDATA = @gsm8k.GSM8K()\ngsm8k.GSM8K.path = {str(bad)!r}\n"
    )
    fails(capsys, tmp_path / "run", "bad.jsonl", "2", gin_file=str(file))


def test_a_dataset_without_rows_or_column_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text, word in (("", "empty.jsonl"), ('{"problem": "1+1?"}\n', "question")):
        (tmp_path / "empty.jsonl").write_text(text)
        file = tmp_path / "bad.gin"
        file.write_text(
            "from __gin__ import dynamic_registration\nfrom jaxrl_llm.data import gsm8k\n"
            f"include '{TINY}'\nDATA = @gsm8k.GSM8K()\ngsm8k.GSM8K.path = '{tmp_path}/empty.jsonl'\n"
        )
        fails(capsys, tmp_path / "run", word, gin_file=str(file))
