"""A reward that a user writes as a plain function, in a file, in an importable module or in Python."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import found_function
from jaxrl_llm.rewards.blocking import Workers
from jaxrl_llm.rewards.wrap import PlainReward, none_judged, part, report

# Names of the parameter that gets the response of one rollout.
TEXTS = ("text", "completion", "response")
# Parameters of functions that take the rollouts of a group at once, as TRL's do.
TOGETHER = ("completions", "completion_ids")
# Arguments that TRL's trainers pass beside the columns, for functions that name them: there is no trainer here, and they log nothing.
TRAINERS: Mapping[str, Any] = {
    "trainer_state": None, "log_extra": lambda column, values: None, "log_metric": lambda name, value: None,
}  # fmt: skip
_THREAD = Workers(1, "reward function")  # one for all plain functions, which may know of each other

Run = Callable[[Callable[[], Any]], Awaitable[Any]]

FORMS = (
    "(prompt, text), (prompt, text, **columns), (prompt, text, COLUMN, ...), or TRL's (prompts, completions, **columns), plain or async; "
    "parameters are given by name"
)


@dataclass(frozen=True, kw_only=True)
class Function(PlainReward):
    """Scores with a function (prompt, text, columns) -> float, bool or None, or TRL's (prompts, completions, columns) -> list of these.

    `prompt` is what the row has, a text or a list of messages. Columns are the further columns of the row, and `reference`, the gold
    answer. None and a response on which the function fails are invalid, which is not 0: they are counted and not learned from.

    A plain function is called in a thread, once at a time and in the order of the rollouts, so that a slow one holds up other rewards alone.
    One that waits for something should be async.

    Attributes:
      function: a callable, "path/to/file.py:name" or "package.module:name"; a file may import what lies beside it.
      name: the part's name in metrics; empty takes the function's name.
      thread: False calls a plain function in the main thread, as one needs that sets signals (math_verify does, for its limits of time);
        sampling and agents wait for it then.
      content: a hash of the function and of what it uses of its own module, by which a resumed run recognises it; its
        name where Python does not know its source.
    """

    function: Callable[..., Any] | str = field(compare=False)  # `content` is compared: a file may be moved
    name: str = ""
    thread: bool = True
    content: str = field(init=False, repr=False, default="")
    _call: "Call" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = found_function.load(self.function)
        object.__setattr__(self, "_call", Call.of(found))
        object.__setattr__(self, "content", found_function.content(found))

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns one part, float64 [G]."""
        del stats
        name = self.name or self._call.name
        run = _THREAD.run if self.thread and not self._call.waits else _here
        return await (_all if self._call.together else _each)(name, self._call, rollouts, run)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A reward function and how it is called.

    Attributes:
      function: the function.
      parameters: its parameters by name, without the one for further columns.
      columns: whether it takes every column.
      together: whether it takes all rollouts of a group as lists, as TRL's do.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    columns: bool
    together: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Call":
        """Reads the function's signature; raises ValueError where it is none of FORMS."""
        try:
            taken = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"function.Function.function: {function!r} has no signature; a reward function takes {FORMS}"
            ) from error
        named = {n: p for n, p in taken.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        columns = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        together = not named.keys().isdisjoint(TOGETHER)
        if not together and not any(name in named for name in TEXTS):
            raise ValueError(
                f"function.Function.function: {getattr(function, '__name__', function)}{inspect.signature(function)} takes no `text`: a reward "
                f"function takes {FORMS}"
            )
        return cls(function=function, parameters=named, columns=columns, together=together)

    @property
    def waits(self) -> bool:
        """Whether the function is async."""
        called = getattr(self.function, "__call__", None)  # noqa: B004 - of an object whose call is async
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    @property
    def name(self) -> str:
        """The function's name, or "function" for one without."""
        name = getattr(self.function, "__name__", "")
        return name if name.isidentifier() else "function"

    def arguments(self, values: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments: those of `values` that the function asks for, and the columns.

        Raises:
          ValueError: a parameter without a default is neither; the message names the columns.
        """
        given = {name: value for name, value in values.items() if name in self.parameters}
        rest = {n: v for n, v in columns.items() if n not in given and (self.columns or n in self.parameters)}
        missing = [n for n, p in self.parameters.items() if n not in given and n not in rest and p.default is p.empty]
        if missing:
            raise ValueError(
                f"the reward function {self.name!r} asks for the column {missing[0]!r}, and the row has {sorted(columns)}: rename the "
                "parameter or the column, or give the parameter a default"
            )
        return given | rest


def asked(prompt: Prompt) -> Any:
    """Returns the prompt as its row has it: a text, or a list of messages."""
    if "prompt" in prompt.extra:
        return prompt.extra["prompt"]
    if prompt.messages is not None and len(prompt.messages) > 1:
        return [dict(message) for message in prompt.messages]
    return prompt.question


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Returns the further columns of a prompt's row, and its reference."""
    reference = {"reference": prompt.reference} if prompt.reference else {}
    return {**reference, **{name: value for name, value in prompt.extra.items() if name != "prompt"}}


async def _each(name: str, call: Call, rollouts: Sequence[Rollout], run: Run) -> Scores:
    """Calls the function once for each rollout; async calls run at the same time."""

    def called(rollout: Rollout) -> Any:
        """What the function returns, or the error that it raises."""
        prompt = rollout.prompt
        values = {"prompt": asked(prompt), **dict.fromkeys(TEXTS, rollout.text)}
        # The response goes to one parameter alone; a column of that name is not passed, columns of the other names are.
        taken = next(t for t in TEXTS if t in call.parameters)
        values = {n: v for n, v in values.items() if n in ("prompt", taken)}
        try:
            found = call.function(**call.arguments(values, columns_of(prompt)))
            return found if inspect.isawaitable(found) else number(found)
        except Exception as error:  # a user's function may raise anything
            return _noted(error)

    async def judged(found: Any) -> float | None:
        if isinstance(found, Exception):
            raise found
        return number(await _awaited(found))

    returned = await run(lambda: [called(rollout) for rollout in rollouts])
    results = await asyncio.gather(*map(judged, returned), return_exceptions=True)
    failures = [(result, rollout) for result, rollout in zip(results, rollouts) if isinstance(result, BaseException)]
    for failure, _ in failures:
        if not isinstance(failure, Exception):  # a cancellation is no failure of the function
            raise failure
    report(name, failures, f"{len(failures)} of {len(rollouts)} responses")
    return part(name, [None if isinstance(result, BaseException) else result for result in results])


async def _all(name: str, call: Call, rollouts: Sequence[Rollout], run: Run) -> Scores:
    """Calls the function once for all rollouts of a group, in TRL's form: completions are messages where the prompt is."""
    prompts = [asked(rollout.prompt) for rollout in rollouts]
    said = [
        r.text if isinstance(p, str) else [{"role": "assistant", "content": r.text}] for p, r in zip(prompts, rollouts)
    ]
    rows = [columns_of(rollout.prompt) for rollout in rollouts]
    columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(c for row in rows for c in row)}
    tokens = [rollout.tokens.tolist() for rollout in rollouts]
    values = {"prompts": prompts, "completions": said, "completion_ids": tokens}
    given = {name: value for name, value in TRAINERS.items() if name in call.parameters}
    if call.columns:
        columns = {**columns, **{n: v for n, v in values.items() if n not in call.parameters}}
    try:
        found = await _awaited(await run(lambda: call.function(**call.arguments({**values, **given}, columns))))
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__") or len(found) != len(rollouts):
            size = f" of {len(found)}" if hasattr(found, "__len__") else ""
            raise TypeError(
                f"the reward function {name!r} returned {type(found).__name__}{size} for {len(rollouts)} completions: a list with one "
                "number, bool or None for each is wanted"
            )
        return part(name, [number(value) for value in found])
    except Exception as error:  # a user's function may raise anything
        return none_judged(name, rollouts, _noted(error))


def _noted(error: Exception) -> Exception:
    """The error, with what to do where it says that signals are set in the main thread alone."""
    if "signal" in str(error):
        error.add_note("plain reward functions are called in a thread: set function.Function.thread=False for this one")
    return error


async def _here(function: Callable[[], Any]) -> Any:
    return function()


async def _awaited(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value


def number(value: Any) -> float | None:
    """Converts a returned value to a float; None stays. Raises TypeError for any other value."""
    if value is None or isinstance(value, bool | int | float):
        return None if value is None else float(value)
    if getattr(value, "size", None) == 1 or type(value).__module__ == "torch":
        value = value.item()  # a scalar of NumPy, JAX or PyTorch
    if not isinstance(value, bool | int | float):
        raise TypeError(
            f"a reward function returns a number, a bool or None (got {type(value).__name__} {str(value)[:80]!r})"
        )
    return float(value)
