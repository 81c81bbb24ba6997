"""Compares the settings of a resumed run with those that its run folder was made with, and refuses changes that affect what is learned.

RUN_DIR/settings.json holds every field of every component by its path, such as `stages[rl].algorithm.kl_coef`. A start whose settings differ
resumes where the difference cannot affect what is learned (limits, cadence, paths, learning rates, servers, mesh), records it in
RUN_DIR/changes.jsonl with its step, and is refused otherwise, unless it is asked to take the new settings from here on.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxrl_llm.distributed.processes import Processes
from jaxrl_llm.metrics.run_folder import append_lines, commit, replace_text

SETTINGS, CHANGES = "settings.json", "changes.jsonl"

# Settings that may change from one start to the next: what is learned does not depend on them, or is meant to (rates). Data and tokenizer
# are recognised by their content (StageTrainer.contents), wherever they lie and however they are made.
FREE = re.compile(
    r"(run_dir|stop_after_s|stop_limit_s|profile_steps|(mesh|hosts|checkpoints|writers|watch|sampler)\b.*)"
    r"|stages\[[^]]+\]\.("
    r"data\b.*|teacher\.path|evaluate_every|score_every|gap_\w+|max_skipped|show_\w+|(offload_reference|reference_dtype)|held_out\b.*|evaluations\b.*|packing\.(rows|tail|row_tokens)"
    r"|(environment|agent|reward)\b.*\.(urls?|token_env|sessions|wait_s|idle_s|workers|start_s)|agent\.taskset\.python"
    r"|episodes\.(concurrency|stop_after|close_s|gateway\b.*)"
    r"|(critic_)?optimizer\.(learning_rate|warmup_steps|schedule|final_fraction|offload|max_grad_norm)"
    r")"
    r"|tokenizer\b.*|policy\.(pretrained|compute_dtype|remat|scan_unroll|bitwise)"
)
AHEAD = re.compile(r"stages\[([^]]+)\]\.max_staleness")
STEPS = re.compile(r"stages\[([^]]+)\]\.steps")
LONGEST = 2000  # characters of a value; a longer one, such as a data set given as a list, is kept as its hash


@dataclass(frozen=True)
class Change:
    """A setting that differs.

    Attributes:
      name: its path.
      was: its value when the run folder was written, as text; "absent" where there was none.
      now: its value at this start.
    """

    name: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, is {self.now}"


def settings_of(run: object) -> dict[str, str]:
    """Returns {path: value as text} of every field of a run and of the components in it."""
    return dict(_flat("", run))


def defaults_of(run: object) -> set[str]:
    """Returns the paths of all fields of a run and of the components in it that hold their default values."""
    found: set[str] = set()

    def look(path: str, value: object) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            for f in fields(value):
                if not f.compare:
                    continue
                name, x = f"{path}.{f.name}".removeprefix("."), getattr(value, f.name)
                default = f.default_factory() if callable(f.default_factory) else f.default
                if type(x) is type(default) and repr(x) == repr(default):
                    found.update(inner for inner, _ in _flat(name, x))
                look(name, x)
        elif isinstance(value, Mapping):
            for key, x in value.items():
                look(f"{path}[{key}]", x)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            for i, x in enumerate(value):
                look(f"{path}[{getattr(x, 'name', i)}]", x)

    look("", run)
    return found


def _flat(path: str, value: object) -> Sequence[tuple[str, str]]:
    if is_dataclass(value) and not isinstance(value, type):
        inner = [(f"{path}.{f.name}".removeprefix("."), getattr(value, f.name)) for f in fields(value) if f.compare]
        kind = [] if not path else [(path, type(value).__qualname__)]
        return [*kind, *(pair for name, x in inner for pair in _flat(name, x))]
    if isinstance(value, Mapping):
        return [pair for key, x in value.items() for pair in _flat(f"{path}[{key}]", x)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and any(is_dataclass(x) for x in value):
        return [pair for i, x in enumerate(value) for pair in _flat(f"{path}[{getattr(x, 'name', i)}]", x)]
    return [(path, _kept(re.sub(r" at 0x[0-9a-f]+", "", repr(value))))]


def _kept(text: str) -> str:
    """Returns a value as it is kept: its beginning, its length and a hash where it is long."""
    if len(text) <= LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:80]}... ({len(text)} characters, {digest})"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Returns the settings that differ, in the order of their names."""
    names = sorted(before.keys() | now.keys())
    pairs = [(name, before.get(name, "absent"), now.get(name, "absent")) for name in names]
    return [Change(name, was, value) for name, was, value in pairs if was != value]


def refused(found: Sequence[Change], stages: Sequence[str], stage: int) -> list[Change]:
    """Returns the changes that a run in the stage of number `stage` cannot take up silently.

    The steps of that stage and of those after it may change; those of a finished one would shift all that follow.
    """

    def free(change: Change) -> bool:
        steps = STEPS.fullmatch(change.name)
        if steps is not None:
            return steps[1] in stages[stage:]
        return FREE.fullmatch(change.name) is not None

    return [change for change in found if not free(change)]


def read(run_dir: Path) -> dict[str, str] | None:
    """Returns the settings that the folder was made with; None for a folder of an earlier version."""
    file = run_dir / SETTINGS
    return {n: _kept(v) for n, v in json.loads(file.read_text()).items()} if file.is_file() else None


def compare(run_dir: Path, run: Any, step: int | None, stage: int, *, as_new: bool) -> list[Change]:
    """Compares a start with its run folder and returns the changes; nothing is written.

    Args:
      run_dir: the folder.
      run: the run.
      step: the checkpoint that it resumes from; None where there is none.
      stage: number of the stage that the checkpoint is in.
      as_new: whether settings that affect what is learned are taken up too.

    Raises:
      ValueError: such a setting differs; the message has both values and the way out.
    """
    before = read(run_dir)
    found = [] if before is None or step is None else changes(before, settings_of(run))
    # A folder of an earlier version lacks the fields that were added since; their defaults keep the earlier behaviour.
    absent = defaults_of(run) if any(change.was == "absent" for change in found) else set()
    found = [change for change in found if not (change.was == "absent" and change.name in absent)]
    bent = refused(found, [s.name for s in run.stages], stage)
    shifted = [c for c in bent if STEPS.fullmatch(c.name) or _drops(c, run.stages[stage].name)]
    if shifted or (bent and not as_new):
        listed = "; ".join(map(str, shifted or bent))
        way = "" if shifted else ", add --resume_as_new to go on from the checkpoint with the new settings"
        raise ValueError(
            f"{run_dir} holds a run with other settings, at step {step}: {listed}. Set them as they were{way}, or set RUN_DIR to another "
            "folder"
        )
    return found


def _drops(change: Change, stage: str) -> bool:
    """Returns whether a change in the present stage would lose what was sampled ahead."""
    found = AHEAD.fullmatch(change.name)
    return found is not None and found[1] == stage and change.now == "0"


def compared(processes: Processes, run_dir: Path, run: Any, step: int | None, stage: int) -> list[Change]:
    """What `compare` finds on process 0, which alone reads and writes the folder; what it refuses is refused on all of them."""
    found: list[Change] = []
    refusal = ""
    if processes.main:
        try:
            found = compare(run_dir, run, step, stage, as_new=run.resume_as_new)
        except ValueError as error:
            refusal = str(error)
    if refusal := processes.broadcast(refusal):
        raise ValueError(refusal)
    return found


def note(run_dir: Path, run: Any, found: Sequence[Change], step: int | None, stage: int) -> None:
    """Writes the settings of a run and what `compare` found to change in them after `step`, in the stage of number `stage`."""
    bent = refused(found, [s.name for s in run.stages], stage)
    _note(run_dir, found, step, bent)
    replace_text(run_dir / SETTINGS, json.dumps(settings_of(run), indent=1) + "\n")


def _note(run_dir: Path, found: Sequence[Change], step: int | None, bent: Sequence[Change]) -> None:
    if not found:
        return
    time = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [
        {"time": time, "step": step, "name": c.name, "was": c.was, "is": c.now, "bends": c in bent, "commit": commit()}
        for c in found
    ]
    append_lines(run_dir / CHANGES, "".join(json.dumps(row) + "\n" for row in rows))


def recognised(
    stage: str, host: Mapping[str, Any], contents: Mapping[str, str], bases: Mapping[str, float], *, as_new: bool
) -> None:
    """Compares the data, the tokenizer and the frozen weights of a stage with those that a checkpoint knows.

    Args:
      stage: name of the stage.
      host: the host's state in the checkpoint.
      contents: {"data": hash, "tokenizer": hash} of this start.
      bases: {model name: mean |weight|} of the frozen weights of this start.
      as_new: whether other data is taken up.

    Raises:
      ValueError: one of them is another.
    """
    for name, content in host.get("contents", {}).items():
        if contents.get(name, content) != content and not (as_new and name == "data"):
            raise ValueError(
                f"the {name} of stage {stage!r} is another one than the checkpoint's (its content has changed): restore it, "
                "or set RUN_DIR to another folder; other data goes on with --resume_as_new"
            )
    for name, size in host.get("bases", {}).items():
        if not math.isclose(bases.get(name, math.nan), size, rel_tol=1e-4):
            raise ValueError(
                f"the checkpoint was trained with other frozen weights of the {name}: set SEED and sources.PolicySource, or "
                "TEACHER_PATH for a teacher, as they were, or give the run another RUN_DIR"
            )
