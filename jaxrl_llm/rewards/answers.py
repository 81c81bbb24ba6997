"""Where a response states its answer: boxed, after a mark, in tags, after its thought; and the number or choice there."""

import re
from fractions import Fraction

_NUMBERS = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_MIXED = re.compile(r"([-+]?)(\d+) ?\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")
_RATIO = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)")


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def marked(text: str, mark: str) -> str | None:
    """The rest of the line after the last `mark`; None without one."""
    _, found, rest = text.rpartition(mark)
    return rest.strip().split("\n", 1)[0] if found else None


def tagged(text: str) -> str | None:
    """What stands in the last <answer>...</answer>; None without a closed one."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def thought(text: str, opened: bool = False) -> tuple[str, str | None]:
    """(chain of thought, output): what stands between the first <think> and the </think> after it, and the rest.

    Without <think> the thought begins with the text; without </think> it is the whole rest and the output is None, as
    it is where neither tag stands.

    Args:
      opened: the prompt has opened <think>, so that a text without </think> is thought; else a text without <think>
        has no output, as in Classmate-CoT.
    """
    _, begun, rest = text.partition("<think>")
    inside, ended, output = (rest if begun else text).partition("</think>")
    if not ended or not (begun or opened):
        return inside, None
    return inside, output.strip()


def last_number(text: str) -> Fraction | None:
    """The last decimal number of the text, thousands' commas read; None without one."""
    found = _NUMBERS.findall(text)
    return _decimal(found[-1]) if found else None


def only_number(text: str) -> Fraction | None:
    """The number that a short text names, a fraction or mixed number being one; None where it names none or several."""
    if (mixed := _MIXED.fullmatch(text.strip().strip("$. "))) and int(mixed[4]):
        size = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -size if mixed[1] == "-" else size
    text = _FRACTION.sub(r"\1\2/\3", text)
    if ratio := _RATIO.fullmatch(text.strip().strip("$.% ")):
        below = _decimal(ratio[2])
        return _decimal(ratio[1]) / below if below else None
    found = _NUMBERS.findall(text)
    return _decimal(found[0]) if len(found) == 1 else None


def _decimal(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))
