"""The command jaxrl: fast help, the same runs as launch, completion, and a project that trains as it is."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from click.testing import CliRunner

from jaxrl_llm import launch
from jaxrl_llm.interface import commands, completion

VERBS = {"train", "eval", "plan", "doctor", "bench", "chat", "export", "import", "view", "serve", "new"}
ENVIRONMENT = {**tiny_run.environment(), "PYTHONPATH": str(tiny_run.ROOT)}
JAXRL = [sys.executable, "-m", "jaxrl_llm.interface.commands"]


def jaxrl(*arguments: str, folder: Path = tiny_run.ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*JAXRL, *arguments], cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=500
    )


def processor_seconds(*command: str) -> float:
    """User and system seconds of a command, which a busy machine changes less than the clock's; the second of two calls."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *command], cwd=tiny_run.ROOT, env=ENVIRONMENT, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "words",
    [
        "interface.commands --help", "interface.commands train --help", "interface.commands doctor --help",
        "interface.commands plan --help", "launch --help", "tools.plan --help",
    ],
)  # fmt: skip
def test_help_is_fast(words):
    module, *arguments = words.split()
    assert processor_seconds("-m", f"jaxrl_llm.{module}", *arguments) < 0.5


# What takes a second or more to import, or is imported by what does.
HEAVY = ("jax", "numpy", "flax", "optax", "orbax", "transformers", "tensorboardX", "gin", "aiohttp", "pyarrow", "rich")


@pytest.mark.parametrize(
    "words",
    [
        ("interface.commands", "--help"), ("interface.commands", "train", "--help"), ("interface.commands", "plan", "--help"),
        ("interface.commands", "doctor", "--help"), ("launch", "--help"), ("tools.plan", "--help"), ("tools.doctor", "--help"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_help_imports_nothing_heavy(words):
    module, *arguments = words
    program = (
        f"import runpy, sys, atexit\nsys.argv[1:] = {arguments!r}\n"
        f"atexit.register(lambda: print('heavy:', [m for m in {HEAVY!r} if m in sys.modules]))\n"
        f"runpy.run_module('jaxrl_llm.{module}', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tiny_run.ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert "usage" in done.stdout.lower() and done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_every_verb_is_there_and_helps_itself():
    shown = CliRunner().invoke(commands.main, ["--help"])
    assert shown.exit_code == 0 and set(commands.main.commands) == VERBS
    for verb in ("train", "eval", "new", "serve"):
        assert CliRunner().invoke(commands.main, [verb, "--help"]).exit_code == 0
    service = jaxrl("serve", "sandbox", "--help")  # the service's own
    assert service.returncode == 0 and "--port" in service.stdout


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("plan", "usage: jaxrl plan [FILE]... [NAME=VALUE]... [OPTIONS]"),
        ("chat", "usage: jaxrl chat [-h]"),
        ("view", "usage: jaxrl view [-h]"),
        ("serve sandbox", "usage: jaxrl serve sandbox [-h]"),
    ],
)
def test_the_help_of_a_verb_names_what_was_typed(words, usage):
    shown = CliRunner().invoke(commands.main, [*words.split(), "--help"], prog_name="jaxrl")
    assert shown.exit_code == 0 and shown.stdout.startswith(usage)


def flags_of(monkeypatch, *arguments: str) -> list[str]:
    """What `launch` is called with."""
    called = []
    monkeypatch.setattr(launch, "main", lambda argv, alone: called.append(argv) or 0)
    done = CliRunner().invoke(commands.main, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return called[0]


def test_train_calls_launch_with_the_files_and_bindings_that_mean_the_same(monkeypatch):
    words = ["gin/grpo_gsm8k.gin", "group_size=16", "algorithm=gspo", "reward=my_file.py:my_reward", "data=my.jsonl"]
    assert flags_of(monkeypatch, "train", *words, "--resume_as_new") == [
        "--gin_file=gin/grpo_gsm8k.gin", "--gin_file=gin/data/rows.gin", "--gin_file=gin/algorithms/gspo.gin",
        "--gin_file=gin/rewards/function.gin", "--gin=DATA_SOURCE = 'my.jsonl'", "--gin=REWARD_FUNCTION = 'my_file.py:my_reward'",
        "--gin=EVALUATION_LIMIT = 256", "--gin=GROUP_SIZE = 16", "--resume_as_new",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "folder"),
    [("run_dir=runs/mine", "runs/mine"), ("RUN_DIR=runs/mine", "runs/mine"), ("algorithm=gspo", "runs/gspo")],
)
def test_a_run_without_files_is_in_the_folder_that_is_named_or_in_that_of_its_algorithm(monkeypatch, word, folder):
    flags = flags_of(monkeypatch, "train", "model=tiny", "data=my.jsonl", "reward=my.py:mine", word)
    assert [flag for flag in flags if "RUN_DIR" in flag] == [f"--gin=RUN_DIR = {folder!r}"]


def test_eval_takes_the_sets_of_gin_eval_by_name(monkeypatch):
    assert flags_of(monkeypatch, "eval", "gsm8k", "model=runs/x", "data=d", "out_dir=o", "samples=4", "--dry_run") == [
        "--gin_file=gin/eval/gsm8k.gin", "--gin=MODEL_PATH = 'runs/x'", "--gin=DATA_PATH = 'd'", "--gin=OUT_DIR = 'o'",
        "--gin=SAMPLES = 4", "--dry_run",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_dry_run_of_plain_names_is_that_of_the_bindings(capfd, tmp_path):
    """The whole plan, which names every setting, is the same as that of launch with quoted bindings."""
    plain = [
        "train",
        "quickstart",
        "algorithm=gspo",
        "group_size=16",
        "gspo.GSPO.clip_high=0.5",
        f"run_dir={tmp_path}/r",
    ]
    done = jaxrl(*plain, "--dry_run")
    assert done.returncode == 0, done.stderr
    files = ["--gin_file=gin/quickstart.gin", "--gin_file=gin/algorithms/gspo.gin"]
    bindings = ["--gin=GROUP_SIZE=16", "--gin=gspo.GSPO.clip_high=0.5", f"--gin=RUN_DIR='{tmp_path}/r'"]
    command = [sys.executable, "-m", "jaxrl_llm.launch", *files, *bindings, "--dry_run"]
    other = subprocess.run(command, cwd=tiny_run.ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.stdout == other.stdout and "16 rollouts" in done.stdout and "GSPO" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "quikstart"], ("error: quikstart", "quickstart")),
        (["train", "quickstart", "algorithm=gps"], ("error: gps", "gpg")),
        (["train", "quickstart", "profile_steps=[1"], ("error: [1 is no Python literal",)),
        (["train", "reward=exact"], ("error: no model",)),
        (["plan", "quikstart"], ("error: quikstart",)),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(arguments, words):
    done = CliRunner().invoke(commands.main, arguments)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


def test_commands_get_their_arguments_as_they_are(monkeypatch):
    from jaxrl_llm.tools import doctor, export

    called = []
    monkeypatch.setattr(export, "main", lambda argv: called.append(argv))
    monkeypatch.setattr(doctor, "main", lambda argv: called.append(argv))
    CliRunner().invoke(commands.main, ["export", "runs/x", "--out", "model", "--best"], catch_exceptions=False)
    CliRunner().invoke(commands.main, ["doctor", "quickstart", "seed=1", "--run_dir", "runs"], catch_exceptions=False)
    CliRunner().invoke(commands.main, ["doctor"], catch_exceptions=False)
    assert called == [
        ["runs/x", "--out", "model", "--best"],
        ["--gin_file=gin/quickstart.gin", "--gin=SEED = 1", "--run_dir", "runs"],
        [],
    ]


@pytest.mark.parametrize(
    ("words", "incomplete", "some"),
    [
        ([], "quick", {"quickstart"}),
        ([], "gin/base", {"gin/base.gin"}),
        (["quickstart"], "group_", {"group_size="}),
        (["quickstart"], "sft_", {"sft_steps=", "sft_learning_rate="}),
        (["quickstart"], "algo", {"algorithm="}),
        (["quickstart"], "algorithm=gs", {"algorithm=gspo"}),
        (["quickstart", "algorithm", "="], "gs", {"gspo"}),  # as bash splits it
        (["quickstart", "reward"], "=", {"exact", "gsm8k", "maths"}),
        ([], "model=ti", {"model=tiny"}),
        ([], "tokenizer=b", {"tokenizer=byte"}),
        ([], "reward=tests/tiny_re", {"reward=tests/tiny_reward.py"}),
    ],
)
def test_completion_offers(words, incomplete, some, monkeypatch):
    monkeypatch.chdir(tiny_run.ROOT)
    offered = {item.value for item in completion.items(words, incomplete)}
    assert some <= offered
    begun = "" if incomplete == "=" else incomplete
    assert all(text.startswith(begun) for text in offered)


def test_the_shell_gets_verbs_and_words():
    def completed(words: str, number: int) -> set[str]:
        asked = {"_JAXRL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        program = "from jaxrl_llm.interface.commands import main; main(prog_name='jaxrl')"
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tiny_run.ROOT, env=ENVIRONMENT | asked, capture_output=True, text=True
        )
        return {line.partition(",")[2] for line in done.stdout.splitlines()}

    assert completed("jaxrl ", 1) == VERBS
    assert "group_size=" in completed("jaxrl train quickstart group", 3)
    assert "gspo" in completed("jaxrl train quickstart algorithm = gs", 5)


def test_what_plans_and_helps_imports_no_http_server():
    program = "import sys, jaxrl_llm.tools.planning.run_plan, jaxrl_llm.tools.planning.fleets; print('aiohttp' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tiny_run.ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_new_project_is_tested_and_learns_as_it_is_written(tmp_path):
    made = jaxrl("new", "letters", folder=tmp_path)
    assert made.returncode == 0 and "jaxrl train run.gin" in made.stdout
    project = tmp_path / "letters"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reward.py"]
    tested = subprocess.run(command, cwd=project, env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert tested.returncode == 0 and "2 passed" in tested.stdout
    done = jaxrl("train", "run.gin", "steps=6", folder=project)
    assert done.returncode == 0, done.stderr
    rewards = [row["reward/mean"] for row in tiny_run.rows(project / "runs/letters") if "reward/mean" in row]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] > 0
    again = jaxrl("new", "letters", folder=tmp_path)
    assert again.returncode == 1 and "error: letters exists" in again.stderr
