"""Countdown's reward: 1 where the answer is arithmetic over exactly the given numbers that equals the target (TinyZero's task)."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.wrap import PlainReward, judge_each

_ALLOWED = re.compile(r"[\d+\-*/() ]{1,200}")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


@dataclass(frozen=True, kw_only=True)
class Countdown(PlainReward):
    """Evaluates the equation exactly, without executing it; `numbers` and `target` are columns of the prompt, or in its `ground_truth`, where prepared rows have them.

    Attributes:
      attempt: score of a wrong answer in tags.
      every_number: whether each number must be used exactly once; False allows leaving numbers out.
    """

    attempt: float = 0.1
    every_number: bool = True

    async def score(self, rollouts: Sequence[Rollout], stats: Mapping[str, np.ndarray] | None = None) -> Scores:
        """Returns part "countdown", 1, `attempt` or 0 [G]; invalid where the prompt has no numbers or target."""
        del stats
        return judge_each("countdown", self.judge, rollouts)

    def judge(self, prompt: Prompt, text: str) -> float:
        """Returns 1 for a right equation in <answer></answer>, `attempt` for a wrong one, 0 for none.

        Raises:
          ValueError: the prompt lacks its columns.
        """
        truth = prompt.extra.get("ground_truth")
        given = {**prompt.extra, **(truth if isinstance(truth, Mapping) else {})}
        missing = {"numbers", "target"} - set(given)
        if missing:
            raise ValueError(f"prompt {prompt.id!r} has no {sorted(missing)} in `extra`")
        equation = answers.tagged(text)
        if equation is None:
            return 0.0
        return 1.0 if self.right(equation, given["numbers"], given["target"]) else self.attempt

    def right(self, equation: str, numbers: Sequence[int], target: int) -> bool:
        """Returns whether the left side of `equation` uses the numbers as allowed and equals `target`."""
        left = equation.partition("=")[0].strip()
        if not _ALLOWED.fullmatch(left):
            return False
        used, given = sorted(map(int, re.findall(r"\d+", left))), sorted(int(n) for n in numbers)
        fits = used == given if self.every_number else all(used.count(n) <= given.count(n) for n in used)
        return fits and value(left) == Fraction(str(target))


def value(expression: str) -> Fraction | None:
    """Returns the exact value of +, -, *, / over whole numbers; None where the expression has none."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        return _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    raise ValueError("only +, -, *, / of whole numbers")
