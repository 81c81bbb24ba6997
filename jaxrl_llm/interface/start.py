"""Starts runs from Python: `rl.train(algorithm="gspo", ...)`, and each algorithm by its own name."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm import launch
from jaxrl_llm.distributed.xla_flags import on_cpu
from jaxrl_llm.interface import kept_functions, several_rewards
from jaxrl_llm.interface.composition import compose, names

if TYPE_CHECKING:
    from jaxrl_llm.interface.python_run import PythonRun

DATA = "data.jsonl"


def train(*files: str | os.PathLike[str], bindings: Mapping[str, Any] | None = None, **settings: Any) -> "PythonRun":
    """Composes a run, which `.train()` or `for step in run:` then trains.

    Without files, `model`, `data` and, for algorithms that learn from samples, `reward` are needed.

    Args:
      files: gin files, by path or by their names in the package ("grpo_gsm8k"), or a run folder to open again.
      bindings: {"grpo.GRPO.clip_high": 0.3, ...}, any field of any component.
      settings: components by name and macros in lower case:
        model: a Hugging Face folder or id, "tiny" (random parameters, one token per byte), or a name in gin/models. On a CPU, pretrained models
          compute in float32.
        data: a .jsonl, .json, .parquet or .csv file, a folder or a Hugging Face id, a list of mappings, or a name in gin/data. A tenth of
          the rows is held out and answered at evaluations; `eval_data` names other rows for that.
        reward: a function (prompt, text) or (prompt, text, COLUMN, ...), "file.py:name", or a name in gin/rewards; several of these as
          {"right": right, "short": (short, 0.1)} or [(right, 1.0), (short, 0.1)], summed with their weights.
        algorithm, sampler, tokenizer, adapters, schedule, writers: names in their folders of gin/.
        run_dir: the run folder, which an earlier start may have begun; by default the first new one of runs/ALGORITHM, runs/ALGORITHM-2, ...
        steps, group_size, learning_rate, seed, ...: macros of gin/base.gin.

    Raises:
      ValueError: a name or a value is wrong; the message says which, and what is allowed.
    """
    launch.prepare()
    given = {**settings, **(bindings or {})}
    if not files or "run_dir" in given or "RUN_DIR" in given:
        folder = Path(
            given.pop("RUN_DIR", None) or given.pop("run_dir", None) or _new_folder(given.get("algorithm", "grpo"))
        )
        given["run_dir"] = str(folder)
    else:
        folder = _new_folder(Path(os.fspath(files[0])).stem)
        if any(callable(x) or _rows(x) or _functions(x) for x in given.values()):
            given["run_dir"] = str(folder)
    given = {name: _kept(name, value, folder) for name, value in given.items()}
    composed = compose([os.fspath(file) for file in files], given, cpu=on_cpu())
    from jaxrl_llm.interface.python_run import opened  # imports JAX, which then reads its environment

    return opened(composed.files, composed.lines)


def algorithm(name: str) -> Callable[..., "PythonRun"]:
    """Returns `train` with an algorithm of gin/algorithms."""
    if name not in names("algorithms"):
        raise AttributeError(f"jaxrl_llm has no {name!r}, and gin/algorithms has no {name}.gin")
    found = partial(train, algorithm=name)
    found.__doc__ = train.__doc__
    return found


def _new_folder(name: str) -> Path:
    """Returns the first folder of runs/NAME, runs/NAME-2, ... that does not exist."""
    number, folder = 1, Path("runs") / name
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _rows(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(x, Mapping) for x in value)


def _functions(value: Any) -> list[Callable[..., Any]]:
    """Returns the functions among several rewards."""
    if not isinstance(value, Mapping | list | tuple) or _rows(value):
        return []
    held = value.values() if isinstance(value, Mapping) else value
    items = [x for item in held for x in (item if isinstance(item, list | tuple) else [item])]
    return list(dict.fromkeys(x for x in items if callable(x)))


def _kept(name: str, value: Any, folder: Path) -> Any:
    """Returns the value in a form that gin can hold: functions and lists of rows are written to the run folder."""
    if callable(value):
        return kept_functions.named([value], folder)[0]
    if name == "reward" and (functions := _functions(value)):
        names = dict(zip(functions, kept_functions.named(functions, folder), strict=True))
        parts = several_rewards.parts(value)
        return {part.name: (names.get(part.reward, part.reward), part.weight) for part in parts}
    if name in ("data", "eval_data") and _rows(value):
        return str(_written(folder / (DATA if name == "data" else f"eval_{DATA}"), value))
    return value


def _written(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows as JSON lines, unless the file already holds them.

    Raises:
      ValueError: a row cannot be written, or the file holds other rows.
    """
    try:
        text = "".join(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the rows of `data` must be mappings of texts, numbers and lists: {error}") from error
    if file.is_file() and file.read_text() != text:
        raise ValueError(f"{file} holds other rows, which this run was begun with: give them, or another run_dir")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
