"""The blocks of code in Markdown pages, and what the comments above them ask for.

A comment on the lines above a fence says what a reader does not need to see:

    <!-- file: NAME -->        the block is written to this file of the page's folder
    <!-- ci: OLD => NEW -->    tests run the block with the first such text replaced, mostly to make it small
    <!-- needs: WHAT -->       tests do not run it
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"^(?P<marks>(?:<!--[^\n]*-->\n)*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- (\w+): (.*?) -->")
WRITTEN = ("gin", "json", "python")  # languages of files
RUN = ("bash", "python")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
      line: its first line in the page, from 1.
      language: what the fence names; empty for none.
      code: its text.
      marks: {kind: value} of the comments above it.
    """

    line: int
    language: str
    code: str
    marks: Mapping[str, str]

    @property
    def runs(self) -> bool:
        return self.language in RUN and not {"needs", "file"} & set(self.marks)

    @property
    def small(self) -> str:
        """The code as tests run it.

        Raises:
          ValueError: a text that is to be replaced is not there.
        """
        code = self.code
        if "ci" in self.marks:
            old, arrow, new = self.marks["ci"].partition(" => ")
            if not arrow or old not in code:
                raise ValueError(f"line {self.line}: the block has no {old!r} that `ci` could replace")
            code = code.replace(old, new, 1)
        return code


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            line=text.count("\n", 0, found.start("code")),
            language=found["language"],
            code=found["code"],
            marks=dict(MARK.findall(found["marks"])),
        )
        for found in FENCE.finditer(text)
    ]
