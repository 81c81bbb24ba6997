"""Parses several rewards with weights: `reward={"right": right, "short": (short, 0.1)}` in Python, `reward=a.py:right,b.py:short*0.1` in a shell.

They become one `weighted.Weighted`, whose parts have scopes of their own, so that a gin file can hold them.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.command_line import PACKAGE

FUNCTION = re.compile(r"[^:,*=]+:[A-Za-z_]\w*")  # file.py:name, or package.module:name
REFERENCE = re.compile(r"[@%][\w./]+(\(\))?")  # a component or a macro of gin
PIECE = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)\s*=)?\s*(?P<reward>[^*=]+?)\s*(?:\*(?P<weight>[^*=]*))?")
BOUND = re.compile(r"^REWARD\s*=\s*@([\w./]+\(\))", re.MULTILINE)
FORMS = (
    "several rewards are {'NAME': REWARD, 'OTHER': (REWARD, WEIGHT)}, [REWARD, (REWARD, WEIGHT)] or, in a shell, "
    "reward=FILE.py:NAME,FILE.py:OTHER*0.1"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of several rewards.

    Attributes:
      name: its name in metrics.
      reward: a function, "file.py:name", the name of a file in gin/rewards, or a gin reference.
      weight: its weight in the sum; a part of weight 0 is only logged.
    """

    name: str
    reward: Any
    weight: float = 1.0


def parts(value: Any) -> list[Part]:
    """Returns the rewards that a value names where they are several or weighted; [] for a single reward without a weight.

    Raises:
      ValueError: a part has no reward, a weight is not a number, or two parts have one name.
    """
    if isinstance(value, str):
        if Path(value).exists() or REFERENCE.fullmatch(value) or not set(value) & {",", "*", "="}:
            return []
        named = [_piece(piece) for piece in value.split(",")]
    elif isinstance(value, Mapping):
        named = [(name, *_weighed(item)) for name, item in value.items()]
    elif isinstance(value, Sequence):
        pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float)
        named = [("", *_weighed(item)) for item in ([value] if pair else value)]
    else:
        return []
    found = [Part(name=name or _own_name(reward), reward=reward, weight=weight) for name, reward, weight in named]
    names = [part.name for part in found]
    if wrong := [name for name in names if not str(name).isidentifier() or name == "log"]:
        raise ValueError(f"reward: {wrong[0]!r} cannot name a part, which takes a Python name other than log; {FORMS}")
    if not names or len(set(names)) < len(names):
        twice = f"two parts are named {max(names, key=names.count)!r}" if names else "there is no part"
        raise ValueError(f"reward: {twice}; name each: {FORMS}")
    return found


def _piece(text: str) -> tuple[str, str, float]:
    """Parses "NAME=REWARD*WEIGHT" as (name, reward, weight); name and weight may be left out."""
    found = PIECE.fullmatch(text)
    if found is None:
        raise ValueError(f"reward: {text!r} is no reward with a weight; {FORMS}")
    try:
        weight = 1.0 if found["weight"] is None else float(found["weight"])
    except ValueError as error:
        raise ValueError(f"reward: {found['weight']!r} in {text!r} is no weight; {FORMS}") from error
    return found["name"] or "", found["reward"], _finite(weight)


def _weighed(item: Any) -> tuple[Any, float]:
    """Returns a part's reward and its weight."""
    reward, weight = item if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2 else (item, 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"reward: {weight!r} is no weight; {FORMS}")
    if not callable(reward) and not (isinstance(reward, str) and reward):
        raise ValueError(f"reward: {reward!r} is no function, no 'FILE.py:NAME' and no name in gin/rewards; {FORMS}")
    return reward, _finite(float(weight))


def _finite(weight: float) -> float:
    if not math.isfinite(weight):
        raise ValueError(f"reward: a weight must be finite (got {weight}); {FORMS}")
    return weight


def _own_name(reward: Any) -> str:
    """Returns a function's name, a file's stem, or the module of a component."""
    if callable(reward):
        return getattr(reward, "__name__", "")
    if REFERENCE.fullmatch(reward):
        return reward.strip("@%()").rpartition("/")[2].partition(".")[0]
    return reward.rpartition(":")[2] if FUNCTION.fullmatch(reward) else Path(reward).stem


def bindings(found: Sequence[Part], gin_file: Callable[[str], str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the gin files and bindings of several rewards, all of which are given by name.

    Args:
      found: the parts.
      gin_file: returns the path of a name in gin/rewards.

    Raises:
      ValueError: there is no such file, or it binds no component to REWARD.
    """
    files: list[str] = []
    references: dict[str, str] = {}
    bound: dict[str, Any] = {}
    for part in found:
        if REFERENCE.fullmatch(part.reward):
            references[part.name] = part.reward
        elif FUNCTION.fullmatch(part.reward):
            references[part.name] = f"@{part.name}/function.Function()"
            bound |= {
                f"{part.name}/function.Function.function": part.reward,
                f"{part.name}/function.Function.name": part.name,
            }
        else:
            file = gin_file(part.reward)
            files.append(file)
            references[part.name] = _component(file, part.name)
    # It has a scope of its own, since a part may be a Weighted too, as that of gin/rewards/r1_zero.gin.
    whole = {
        "REWARD": "@several_rewards/weighted.Weighted()",
        "several_rewards/weighted.Weighted.parts": references,
        "several_rewards/weighted.Weighted.weights": {part.name: part.weight for part in found},
    }
    return files, bound | whole


def _component(file: str, scope: str) -> str:
    """Returns the reference that a file of gin/rewards binds to REWARD, in a scope of its own."""
    path = Path(file) if Path(file).is_file() else PACKAGE / file
    found = BOUND.search(path.read_text())
    if found is None:
        raise ValueError(f"reward: {file} does not bind REWARD to a component, as in REWARD = @exact.Exact()")
    return f"@{found[1]}" if "/" in found[1] else f"@{scope}/{found[1]}"
