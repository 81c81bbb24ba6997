"""RL post-training of language models in JAX.

`import jaxrl_llm as rl` gives every algorithm of gin/algorithms by its name, `rl.grpo(model=..., data=..., reward=..., steps=20)`, and
`rl.train(algorithm="gspo", ...)`; nothing else is imported before they are asked for (`interface/start.py` says what they take).

Axis letters of every shape:

    B  rows of a packed micro-batch       T  tokens of a row, or of a sequence
    S  sequences of a step, or slots      N  prompts
    G  rollouts of one prompt             V  vocabulary entries
    D  width of the residual stream       F  width of the MLP
    H  query heads                        K  key/value heads
    C  width of a head                    L  layers
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
_ALGORITHMS = Path(__file__).parent / "gin" / "algorithms"


class _Called(ModuleType):
    """The package `jaxrl_llm.train`, which gin files import, called as the function `rl.train`."""

    def __call__(self, *files: Any, **settings: Any) -> Any:
        return importlib.import_module("jaxrl_llm.interface.start").train(*files, **settings)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train":
            value.__class__ = _Called
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Returns the function that runs an algorithm, by its name; `train` is the package of that name."""
    if name == "train":
        return importlib.import_module("jaxrl_llm.train")
    if not name.startswith("_") and (_ALGORITHMS / f"{name}.gin").is_file():
        return importlib.import_module("jaxrl_llm.interface.start").algorithm(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "train", *(file.stem for file in _ALGORITHMS.glob("*.gin"))})
