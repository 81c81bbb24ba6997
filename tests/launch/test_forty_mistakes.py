"""Forty wrong inputs and more, and what each prints; docs/reference/mistakes.md is the table, which JAXRL_LLM_UPDATE=1 writes anew.

Each is launched in this process as a dry run on a tiny model, ends with exit code 1 and one line, and names what the test lists for it.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from click.testing import CliRunner

from jaxrl_llm import launch
from jaxrl_llm.interface import commands
from jaxrl_llm.tools import fit

PAGE = tiny_run.ROOT / "docs" / "reference" / "mistakes.md"
HEAD = """# Mistakes and what each prints

Written by `JAXRL_LLM_UPDATE=1 python -m pytest tests/launch/test_forty_mistakes.py`, which also checks it. Each line is what `python -m
jaxrl_llm.launch` prints with `--dry_run`, before anything is compiled, and ends with exit code 1.

| what is wrong | what is printed |
|---|---|
"""
COMMANDS_HEAD = """
## Of the command jaxrl

What `jaxrl` prints, in a folder with `rows.jsonl`, `reward.py` and no other file. A mistake of the command's own words (a verb, an option) ends with exit code 2.

| what is typed | what is printed |
|---|---|
"""
CONFIG = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
GOOD_ROWS = [{"prompt": "s:ab=", "answer": "ab"}, {"prompt": "s:ba=", "answer": "ab"}]


@dataclass(frozen=True)
class Mistake:
    """A wrong input.

    Attributes:
      bindings: bindings of the command line.
      names: words that the message must have, the mend among them.
      file: lines of a gin file that includes the tiny run.
      rows: text of rows.jsonl, which own rows read.
      reward: text of reward.py, which an own reward is in.
      model: config.json of a model folder.
    """

    bindings: tuple[str, ...]
    names: tuple[str, ...]
    file: str = ""
    rows: str = ""
    reward: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)


OWN = (
    "from __gin__ import dynamic_registration\nfrom jaxrl_llm.data import rows\ninclude 'gin/data/rows.gin'\n"
    "DATA_SOURCE = 'rows.jsonl'\nrows.Rows.template = 'question_only'\n"
)
SCORED = "include 'gin/rewards/function.gin'\nREWARD_FUNCTION = 'reward.py:score'\n"
SCORE = "def score(prompt, text):\n    return len(text)\n"
GOOD = "".join(json.dumps(row) + "\n" for row in GOOD_ROWS)
FOLDER = ("sources.PolicySource.architecture=None", "sources.PolicySource.pretrained='model'")

MISTAKES: dict[str, Mistake] = {
    "a macro misspelled on the command line": Mistake(("GROUP_SZIE=4",), ("GROUP_SZIE", "is GROUP_SIZE meant?")),
    "a macro misspelled in a file": Mistake((), ("mine.gin line 2", "is GROUP_SIZE meant?"), file="GROUP_SZIE = 4\n"),
    "a macro in lower case": Mistake(("group_size=4",), ("is GROUP_SIZE meant?",)),
    "a macro that this run does not read": Mistake(("JUDGE_MODEL='x'",), ("nothing reads JUDGE_MODEL here",)),
    "a macro that is read and not set": Mistake(("GROUP_SIZE=%GROUPS_SIZE",), ("%GROUPS_SIZE is read and not set", "GROUP_SIZE")),
    "a required macro that nothing sets": Mistake((), ("PRETRAINED (sources.PolicySource.pretrained) must be set: a text, such as",), file="include 'gin/models/pretrained.gin'\n"),
    "an unknown parameter": Mistake(("grpo.GRPO.clip_hi=0.3",), ("has no 'clip_hi'", "is clip_high")),
    "an unknown parameter in a scope": Mistake(("rl/train.Stage.stepps=3",), ("has no 'stepps'", "is steps")),
    "a setting of a component that this run does not build": Mistake(("ppo.PPO.clip_high=0.3",), ("--gin=ppo.PPO.clip_high=0.3: nothing reads ppo.PPO.clip_high here", "builds no ppo.PPO", "of algorithms it builds grpo.GRPO")),
    "a setting of a sampler that this run does not build": Mistake(("vllm.VllmSampler.seeded=False",), ("builds no vllm.VllmSampler", "of samplers it builds embedded.EmbeddedSampler")),
    "a setting that a nearer one replaces": Mistake(("train.Stage.steps=3",), ("nothing reads train.Stage.steps here: rl/train.Stage.steps is set, and nearer",)),
    "a setting in a scope that this run does not build": Mistake(("warmup/train.Stage.steps=3",), ("nothing reads warmup/train.Stage.steps here: the run builds rl/train.Stage",)),
    "an unknown component": Mistake(("grpo.GRPOO.clip=0.3",), ("no component grpo.GRPOO", "is grpo.GRPO")),
    "an unknown component as a value": Mistake(("ALGORITHM=@gspo.GSPOO()",), ("no component gspo.GSPOO", "is gspo.GSPO")),
    "a component that a file does not import": Mistake((), ("mine.gin line 3", "add `from jaxrl_llm.algorithms import gspo`"), file="from __gin__ import dynamic_registration\nALGORITHM = @gspo.GSPO()\n"),
    "a component without @": Mistake(("ALGORITHM=gspo.GSPO()",), ("a component is @gspo.GSPO()",)),
    "an algorithm by its name alone": Mistake(("ALGORITHM='gspo'",), ("Algorithm", "@module.Component()")),
    "a number as a text": Mistake(("GROUP_SIZE='8'",), ("rl/train.Stage.group_size", "got str", "such as GROUP_SIZE=8")),
    "a broken number": Mistake(("STEPS=2.5",), ("whole number", "such as STEPS=2")),
    "a learning rate as a text": Mistake(("LEARNING_RATE='1e-5'",), ("a number", "such as LEARNING_RATE=1e-05")),
    "a text without quotes": Mistake(("RUN_DIR=runs/x",), ("a text needs quotes: RUN_DIR='runs/x'",)),
    "true for True": Mistake(("qwen3.Qwen3.tied=true",), ("it is written True",)),
    "a number for a list": Mistake(("PROFILE_STEPS=3",), ("a list", "such as PROFILE_STEPS=[3]")),
    "one of other choices": Mistake(("rl/train.Optimizer.schedule='linaer'",), ("('constant', 'linear', 'cosine')",)),
    "a binding without a value": Mistake(("GROUP_SIZE",), ("a binding is NAME=VALUE",)),
    "an open bracket": Mistake(("PROFILE_STEPS=[1,",), ("[1, is no value", "['a', 'b']")),
    "a model that is no component": Mistake(("MODEL=None",), ("@sources.PolicySource()", "got None")),
    "a tokenizer that is a text": Mistake(("TOKENIZER='char'",), ("@tokenizer.PretrainedTokenizer()", "got 'char'")),
    "a reward by its name alone": Mistake(("REWARD='exact'",), ("Reward", "@module.Component()")),
    "a group of one": Mistake(("GROUP_SIZE=1",), ("group_size >= 2 (got 1)",)),
    "prompts that mini-batches do not divide": Mistake(("MINIBATCHES=3",), ("set Stage.minibatches to a divisor",)),
    "rows too short for a sequence": Mistake(("ROW_TOKENS=20",), ("set train.Packing.row_tokens >= 27",)),
    "a mesh that does not fit": Mistake(("train.MeshConfig.tensor=3",), ("3", "devices")),
    "rows by a word": Mistake(("ROWS='many'",), ("a whole number >= 1, or 'auto'",)),
    "a seed below zero": Mistake(("SEED=-1",), ("train.Run.seed", ">= 0", "-1")),
    "an architecture that is not supported, and no tokenizer": Mistake((*FOLDER, "TOKENIZER=@tokenizer.PretrainedTokenizer()", "tokenizer.PretrainedTokenizer.path='model'"), ("MixtralForCausalLM is not supported", "Qwen3ForCausalLM"), model=CONFIG),
    "a model folder that does not exist": Mistake((FOLDER[0], "sources.PolicySource.pretrained='modle'"), ("'modle'", "set sources.PolicySource.pretrained")),
    "a run that does not fit the device": Mistake(("ROWS=8192", "ROW_TOKENS=65536", "qwen3.Qwen3.width=512", "PROMPTS_PER_STEP=64"), ("does not fit", "these settings fit: ROWS = ")),
    "a data file that does not exist": Mistake(("DATA_SOURCE='rosw.jsonl'",), ("no data at 'rosw.jsonl'", ".jsonl"), file=OWN, rows=GOOD),
    "a line that is no JSON": Mistake((), ("rows.jsonl:3: malformed JSON",), file=OWN, rows=GOOD + "{'prompt': 1}\n"),
    "a prompt that is a number": Mistake((), ("rows.jsonl:3: column 'prompt' must be a text", "got int 5"), file=OWN, rows=GOOD + '{"prompt": 5}\n'),
    "rows without a prompt": Mistake((), ("no column is recognised as the prompt; the row has ['ask']",), file=OWN, rows='{"ask": "?"}\n'),
    "a reward file that does not exist": Mistake(("REWARD_FUNCTION='rewrad.py:score'",), ("no file 'rewrad.py'",), file=SCORED, reward=SCORE),
    "a reward function that does not exist": Mistake(("REWARD_FUNCTION='reward.py:scoer'",), ("has no 'scoer'; its functions are ['score']",), file=SCORED, reward=SCORE),
    "a reward file that breaks": Mistake((), ("reward.py:1 cannot be run", "No module named 'nmupy'"), file=SCORED, reward="import nmupy\n"),
    "a reward with other parameters": Mistake((), ("score(a, b) takes no `text`", "(prompt, text)"), file=SCORED, reward="def score(a, b):\n    return 1\n"),
}  # fmt: skip

OWN_RUN = "train model=tiny data=rows.jsonl reward=reward.py:score steps=2"
# {what is typed: words that the message must have}
TYPED: dict[str, tuple[str, ...]] = {
    "trian quickstart": ("No such command 'trian'", "'train'"),
    "train quickstart --gruop": ("No such option '--gruop'",),
    "train quickstrat": ("quickstrat is no gin file or run folder", "near it are quickstart"),
    "train quickstart gruop_size=4": ("GRUOP_SIZE", "is GROUP_SIZE meant?"),
    "train quickstart group_size 4": ("group_size is a setting and has no value: write group_size=VALUE",),
    "train quickstart grpo.GRPO.clip_hi=0.3": ("grpo.GRPO has no 'clip_hi'; is clip_high meant?",),
    "train quickstart algorithm=gprpo": ("the package has no gin/algorithms/gprpo.gin", "near it are grpo"),
    "train quickstart profile_steps=[1": ("[1 is no Python literal",),
    f"{OWN_RUN} group_size=two": ("GROUP_SIZE='two'", "a whole number", "such as GROUP_SIZE=8"),
    OWN_RUN.replace("model=tiny ", ""): ("no model is given", 'model="FOLDER"'),
    OWN_RUN.replace("data=rows.jsonl ", ""): ("no data is given", 'data="FILE.jsonl"'),
    OWN_RUN.replace("reward=reward.py:score ", ""): ("GRPO learns from samples", "reward=FILE.py:NAME"),
    OWN_RUN.replace(" steps=2", ""): ("STEPS (rl/train.Stage.steps) must be set", "such as STEPS=8"),
    OWN_RUN.replace("reward.py:", "rewrad.py:"): ("no file 'rewrad.py'",),
    OWN_RUN.replace(":score", ""): ("reward=reward.py names no function of the file: give reward.py:NAME",),
    OWN_RUN.replace(":score", ":scoer"): ("reward.py has no 'scoer'; its functions are ['score']",),
    OWN_RUN.replace("rows.jsonl", "rosw.jsonl"): ("no data at 'rosw.jsonl'",),
    OWN_RUN.replace("rows.jsonl", "noprompt.jsonl"): ("noprompt.jsonl:1: no column is recognised as the prompt", "the row has ['text']"),
    OWN_RUN.replace("tiny", "tinny"): ("'tinny' is no folder and no Hugging Face id",),
    "eval gsm9k model=model": ("the package has no gin/eval/gsm9k.gin", "near it are gsm8k"),
    "eval gsm8k": ("MODEL_PATH (train.TrainedModel.path) must be set",),
    "export nowhere --out model": ("nowhere is no run folder",),
    "chat nowhere": ("nowhere is no folder: give a Hugging Face folder or a run folder",),
    "view nowhere": ("nowhere is no folder: give a run's folder",),
}  # fmt: skip


def prints(mistake: Mistake, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What launch prints for a mistake, without the folder's name."""
    (folder / "mine.gin").write_text(f"include '{tiny_run.GIN_FILE}'\n{mistake.file}")
    (folder / "rows.jsonl").write_text(mistake.rows)
    (folder / "reward.py").write_text(mistake.reward)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(mistake.model))
    given = [f"RUN_DIR='{folder}/run'", "train.Run.stages=[@rl/train.Stage()]", *mistake.bindings]
    assert launch.main(["--gin_file=mine.gin", *(f"--gin={b}" for b in given), "--dry_run"]) == 1
    assert not (folder / "run").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return re.sub(r"0x[0-9a-f]+", "0x...", lines[0].replace(f"{folder}/", "").replace(f"{tiny_run.ROOT}/", ""))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "here", lambda: fit.Device("a device", 2**31))


def table() -> dict[str, str]:
    """{what is wrong: what is printed} of both tables of the page."""
    rows = [line.strip("| ").split(" | `` ", 1) for line in PAGE.read_text().splitlines() if " | `` " in line]
    return {row[0].strip("`"): row[1].removesuffix(" ``").replace("\\|", "|") for row in rows}


def checked(name: str, said: str) -> None:
    """Holds a row of the page to what was printed; JAXRL_LLM_UPDATE=1 writes it first."""
    if os.environ.get("JAXRL_LLM_UPDATE"):
        kept = (table() if PAGE.is_file() else {}) | {name: said}
        told = {n: text.replace("|", chr(92) + "|") for n, text in kept.items()}
        rows = "".join(f"| {n} | `` {told[n]} `` |\n" for n in MISTAKES if n in told)
        typed = "".join(f"| `jaxrl {n}` | `` {told[f'jaxrl {n}']} `` |\n" for n in TYPED if f"jaxrl {n}" in told)
        PAGE.write_text(HEAD + rows + COMMANDS_HEAD + typed)
    assert table()[name] == said, "docs/reference/mistakes.md is old: run with JAXRL_LLM_UPDATE=1"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line_that_names_the_mend(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = prints(MISTAKES[name], tmp_path, capsys)
    for word in MISTAKES[name].names:
        assert word in said
    checked(name, said)


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistake_of_the_command_is_told_in_one_line(typed: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(GOOD)
    (tmp_path / "noprompt.jsonl").write_text('{"text": "?"}\n')
    (tmp_path / "reward.py").write_text(SCORE)
    words = typed.split()
    dry = ["--dry_run"] if words[0] in ("train", "eval") else []
    dry += ["rows=8"] if "steps=2" in words else []  # of the suite's eight devices, each has one
    done = CliRunner().invoke(commands.main, [*words, *dry])
    assert done.exit_code == (2 if typed in ("trian quickstart", "train quickstart --gruop") else 1), done.output
    said = done.stderr.strip().splitlines()[-1].replace(f"{tmp_path}/", "").replace(f"{tiny_run.ROOT}/", "")
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("runs"))
    for word in TYPED[typed]:
        assert word in said
    checked(f"jaxrl {typed}", said)


def test_the_tables_have_forty_mistakes_and_more() -> None:
    assert len(MISTAKES) >= 40 and list(table()) == [*MISTAKES, *(f"jaxrl {typed}" for typed in TYPED)]
