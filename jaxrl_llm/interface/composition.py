"""Translates plain names to gin: `algorithm="gspo", data="my.jsonl", group_size=16` become gin files and bindings.

Python and the command line compose a run here, and `command_line.build` builds it from the result, as from any gin file. A word of
`WORDS` names a component, by the name of its file in gin/ or by a path; every other name is a macro, in lower or upper case; a name
with a dot is a binding.
"""

import ast
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.command_line import PACKAGE
from jaxrl_llm.interface import several_rewards
from jaxrl_llm.interface.several_rewards import FUNCTION, REFERENCE

EVALUATED = 256  # prompts that an evaluation answers by default
SETTING = re.compile(r"(?P<name>[A-Za-z_][\w./]*)=(?P<value>.*)", re.DOTALL)
PRETRAINED = "gin/models/pretrained.gin"
OWN = "tokenizer.PretrainedTokenizer"  # the component that reads a pretrained model's own tokenizer
LIMITS = ("PROMPT_LIMIT", "RESPONSE_LIMIT")
LIMIT = 512  # tokens, the default of both in gin/base.gin
ON_CPU = 1024  # positions of a micro-batch
FLOAT32 = {"sources.PolicySource.compute_dtype": "float32"}


@dataclass(kw_only=True)
class Composition:
    """The gin files and bindings of a run.

    Attributes:
      files: gin files, in their order.
      bindings: {name: value}, which override the files; a text that is a gin reference is written as one.
    """

    files: list[str] = field(default_factory=list)
    bindings: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The bindings as gin text, such as "GROUP_SIZE = 16"; raises ValueError where a value cannot be written."""
        return [f"{name} = {literal(name, value)}" for name, value in self.bindings.items()]

    def add(self, more: "Composition") -> None:
        self.files += more.files
        self.bindings |= more.bindings


def compose(files: Sequence[str], given: Mapping[str, Any], *, cpu: bool = False) -> Composition:
    """Composes a run of gin files and plain names.

    Args:
      files: names or paths of gin files, or a run folder; without any, gin/base.gin with the embedded sampler and GRPO.
      given: words, macros and bindings with their values; a word whose value is None counts as not given.
      cpu: whether the run is for a CPU: a pretrained model that a word names computes in float32, since CPUs emulate bfloat16, and a run
        without gin files has rows no longer than a sequence may be.

    Raises:
      ValueError: a file or a component does not exist.
    """
    words = {word: given[word] for word in WORDS if given.get(word) is not None}
    composed = Composition(files=[gin_file(name) for name in files])
    if not files:
        if "model" not in words:
            raise ValueError('no model is given: give model="FOLDER", a Hugging Face id, or "tiny"')
        if "data" not in words:
            raise ValueError('no data is given: give data="FILE.jsonl", or the name of a file in gin/data')
        words = {"sampler": "embedded", "algorithm": "grpo", **words}
        composed = Composition(files=["gin/base.gin"], bindings={} if "reward" in words else {"REWARD": None})
        composed.bindings |= _short_rows(given) if cpu else {}
    for word, choose in WORDS.items():  # in this order: later ones override earlier ones
        if word in words:
            composed.add(choose(words[word]))
        if word == "model" and "PRETRAINED" in composed.bindings and OWN in str(words.get("tokenizer", OWN)):
            composed.add(
                Composition(files=["gin/data/pretrained_tokenizer.gin"], bindings={f"{OWN}.path": "%PRETRAINED"})
            )
    if cpu and PRETRAINED in composed.files:
        composed.bindings |= FLOAT32
    if "data" in words:
        composed.bindings |= _evaluated(composed, words)
    composed.bindings |= {binding_name(name): value for name, value in given.items() if name not in WORDS}
    return composed


def evaluation(files: Sequence[str], given: Mapping[str, Any]) -> Composition:
    """Composes a standalone evaluation from a file of gin/eval; `model` and `data` are its MODEL_PATH and DATA_PATH.

    Raises:
      ValueError: a file does not exist.
    """
    paths = {"model": "MODEL_PATH", "data": "DATA_PATH"}
    bindings = {paths.get(name) or binding_name(name): value for name, value in given.items()}
    return Composition(files=[gin_file(name, "eval") for name in files], bindings=bindings)


def _short_rows(given: Mapping[str, Any]) -> dict[str, int]:
    """Returns a micro-batch's shape for a CPU, where attention costs the square of a row, and an empty row as much as a full one."""
    limits = [next((x for name, x in given.items() if binding_name(name) == limit), LIMIT) for limit in LIMITS]
    if "packed_sft" in str(given.get("algorithm")) or not all(isinstance(limit, int) for limit in limits):
        return {}  # chunks of documents are as long as rows; a reference has no value yet
    tokens = max(sum(limits), 1)
    return {"ROW_TOKENS": tokens, "ROWS": max(ON_CPU // tokens, 1)}


def _evaluated(composed: Composition, words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the evaluation of a run on its own data: held-out prompts are answered, or held-out responses scored where there is no reward."""
    chosen = [(PACKAGE / file).read_text() for file in composed.files if file.startswith("gin/data/")]
    known = "EVAL_DATA" in composed.bindings or any(re.search(r"^EVAL_DATA\s*=", text, re.MULTILINE) for text in chosen)
    if composed.bindings.get("REWARD", "") is None or not known:
        unseen = {"HELD_OUT": "%EVAL_DATA"} if known else {}
        return {"train.Stage.evaluations": (), "BEST": None, **unseen}
    return {"EVALUATION_LIMIT": EVALUATED}


def gin_file(name: str | os.PathLike[str], folder: str = "") -> str:
    """Returns the path of a gin file or run folder that a user names: that path, or a file of the package, such as "quickstart".

    Raises:
      ValueError: there is no such file; the message has the nearest names.
    """
    text = os.fspath(name)
    if Path(text).exists():
        return text
    stem = text.removeprefix("gin/").removeprefix(f"{folder}/").removesuffix(".gin")
    place = f"gin/{folder}/{stem}.gin" if folder else f"gin/{stem}.gin"
    if (PACKAGE / place).is_file():
        return place
    near = difflib.get_close_matches(stem, names(folder), n=3, cutoff=0.5)
    meant = f"; near it are {', '.join(near)}" if near else ""
    raise ValueError(f"{text} is no gin file or run folder, and the package has no {place}{meant}")


def names(folder: str = "") -> list[str]:
    """Returns the names of the package's gin files in a folder of gin/, without their endings."""
    return sorted(file.stem for file in (PACKAGE / "gin" / folder).glob("*.gin"))


def binding_name(name: str) -> str:
    """Returns the name of a binding: a macro in upper case, and a name with a dot unchanged."""
    return name if "." in name or "/" in name else name.upper()


def value(text: str) -> Any:
    """Parses what a user writes after `name=`: a Python literal, or else a text, which needs no quotes.

    Raises:
      ValueError: the text begins like a list, a mapping or a tuple but is not one.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        if text[:1] in ("[", "(", "{", "'", '"'):
            raise ValueError(
                f"{text} is no Python literal: write lists as ['a', 'b'], mappings as {{'a': 1}}, and texts without quotes"
            ) from error
        return text


def literal(name: str, value: Any) -> str:
    """Writes a value as gin text; raises ValueError where gin cannot hold it."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and REFERENCE.fullmatch(value):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(name, key)}: {literal(name, held)}" for key, held in value.items()) + "}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of NumPy or JAX
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError(
            f"{name} must be text, a number, True, False, None, or a list or mapping of these (got {type(value).__name__}): "
            "a component is named by its gin file, or as a reference such as '@gspo.GSPO()'"
        )
    return text


# -- words -------------------------------------------------------------------------------------------------------------


def _named(folder: str, macro: str) -> Callable[[Any], Composition]:
    """Returns the word of a component that can be named only by a file of gin/FOLDER, a user's gin file, or a reference."""

    def choose(value: Any) -> Composition:
        if _reference(value):
            return Composition(bindings={macro: value})
        return Composition(files=[gin_file(value, folder)])

    return choose


def _reference(value: Any) -> bool:
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None


def _own(value: Any, folder: str) -> Composition | None:
    """Returns the composition of a gin file, by its path or by its name in gin/FOLDER; None for any other value."""
    if isinstance(value, str) and ((PACKAGE / "gin" / folder / f"{value}.gin").is_file() or value.endswith(".gin")):
        return Composition(files=[gin_file(value, folder)])
    return None


def _model(value: Any) -> Composition:
    """Composes a file of gin/models with random parameters, "tiny", or a Hugging Face folder or id."""
    if value == "tiny":
        return Composition(files=["gin/models/qwen3_tiny.gin", "gin/data/byte_tokenizer.gin"])
    if _reference(value):
        return Composition(bindings={"MODEL": value})
    if (own := _own(value, "models")) is not None:
        return own
    return Composition(files=[PRETRAINED], bindings={"PRETRAINED": os.fspath(value)})


def _tokenizer(value: Any) -> Composition:
    """Composes "byte", "char" or another tokenizer of gin/data, or a Hugging Face folder or id."""
    if _reference(value):
        return Composition(bindings={"TOKENIZER": value})
    if (PACKAGE / f"gin/data/{value}_tokenizer.gin").is_file():
        return Composition(files=[f"gin/data/{value}_tokenizer.gin"])
    path = {f"{OWN}.path": os.fspath(value)}
    return Composition(files=["gin/data/pretrained_tokenizer.gin"], bindings=path)


def _data(value: Any) -> Composition:
    """Composes a file of gin/data, or a source of rows.Rows: a file, a folder, a Hugging Face id."""
    if _reference(value):
        return Composition(bindings={"DATA": value})
    return _own(value, "data") or Composition(files=["gin/data/rows.gin"], bindings={"DATA_SOURCE": _place(value)})


def _eval_data(value: Any) -> Composition:
    """Composes other rows for evaluations, so that all of the data is learned from."""
    if _reference(value):
        return Composition(bindings={"EVAL_DATA": value})
    rows = {"eval_data/rows.Rows.source": _place(value), "eval_data/rows.Rows.split": "train", "HELDOUT_SHARE": 0.0}
    return Composition(bindings={"EVAL_DATA": "@eval_data/rows.Rows()", **rows})


def _place(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _reward(value: Any) -> Composition:
    """Composes a file of gin/rewards, a function as "file.py:name" or "package.module:name", or several of these with weights."""
    if parts := several_rewards.parts(value):
        files, bindings = several_rewards.bindings(parts, lambda name: gin_file(name, "rewards"))
        return Composition(files=files, bindings=bindings)
    if _reference(value):
        return Composition(bindings={"REWARD": value})
    if isinstance(value, str) and FUNCTION.fullmatch(value) and not Path(value).is_file():
        return Composition(files=["gin/rewards/function.gin"], bindings={"REWARD_FUNCTION": value})
    if isinstance(value, str) and value.endswith(".py"):
        raise ValueError(f"reward={value} names no function of the file: give {value}:NAME")
    return _own(value, "rewards") or Composition(files=[gin_file(value, "rewards")])


# Words, and the folders of gin/ whose files they name.
NAMED = {
    "model": "models", "data": "data", "sampler": "samplers", "algorithm": "algorithms", "reward": "rewards", "adapters": "adapters",
    "schedule": "schedules", "writers": "writers",
}  # fmt: skip
WORDS: dict[str, Callable[[Any], Composition]] = {
    "model": _model,
    "tokenizer": _tokenizer,
    "data": _data,
    "eval_data": _eval_data,
    "sampler": _named("samplers", "SAMPLER"),
    "algorithm": _named("algorithms", "ALGORITHM"),
    "reward": _reward,
    "adapters": _named("adapters", "sources.PolicySource.lora"),
    "schedule": _named("schedules", "SCHEDULE"),
    "writers": _named("writers", "train.Run.writers"),
}
