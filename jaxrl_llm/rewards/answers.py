"""Extracts the answer of a response: boxed, after a mark, in tags or after its thought; and reads numbers from it."""

import re
from fractions import Fraction

_NUMBERS = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")
_MIXED = re.compile(r"([-+]?)(\d+) ?\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")
_RATIO = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)")


def boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...} with balanced braces; None without one."""
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
    """Returns the rest of the line after the last `mark`; None without one."""
    _, found, rest = text.rpartition(mark)
    return rest.strip().split("\n", 1)[0] if found else None


def tagged(text: str) -> str | None:
    """Returns the content of the last <answer>...</answer>; None without a closed one."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def thought(text: str, opened: bool = False) -> tuple[str, str | None]:
    """Splits a text into (chain of thought, output): the text between the first <think> and the next </think>, and the rest.

    Without <think> the thought begins at the start of the text; without </think> it is the whole rest and the output is None.
    Without either tag the output is None too.

    Args:
      opened: whether the prompt has opened <think>, so that a text without </think> is all thought; otherwise a text without
        <think> has no output, as in Classmate-CoT.
    """
    _, begun, rest = text.partition("<think>")
    inside, ended, output = (rest if begun else text).partition("</think>")
    if not ended or not (begun or opened):
        return inside, None
    return inside, output.strip()


def last_number(text: str) -> Fraction | None:
    """Returns the last decimal number of the text, which may have thousands separators; None without one."""
    found = _NUMBERS.findall(text)
    return _decimal(found[-1]) if found else None


def only_number(text: str) -> Fraction | None:
    """Returns the one number that a short text names, which may be a fraction or mixed number; None for no or several numbers."""
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
