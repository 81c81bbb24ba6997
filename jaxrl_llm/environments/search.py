"""A search over one's own corpus as a tool: BM25 over the passages of a file, by bm25s."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.environments import tools
from jaxrl_llm.experience import Prompt


@dataclass(frozen=True, kw_only=True)
class Search:
    """The tool `search`, which answers with the passages that match a query best.

    Attributes:
      corpus: a JSONL file whose rows have a column of text, or a text file with a passage a line.
      column: the column of text of a JSONL file.
      passages: most passages of an answer.
      most_text: most characters of a passage; a longer one is cut off.
    """

    corpus: str
    column: str = "text"
    passages: int = 3
    most_text: int = 600

    def __post_init__(self) -> None:
        components.at_least(self, 1, "passages", "most_text")

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool's schema in OpenAI's form, with one argument, the query."""
        return tools.function(
            "search", "Finds the passages of the corpus that match a query best.", query="what to look for"
        )

    def use(self, prompt: Prompt, seed: int) -> "Search":
        """Returns the tool itself, which keeps no state for a rollout."""
        del prompt, seed
        return self

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Returns the best passages, numbered; raises ValueError for a corpus that cannot be read."""
        query = tools.text_argument(arguments, "query")
        found = index(self.corpus, self.column).best(query, self.passages)
        lines = [f"[{number}] {text[: self.most_text]}" for number, text in enumerate(found, 1)]
        return "\n".join(lines) or "nothing found"

    async def close(self) -> None:
        """Does nothing, since no resource is held."""


class Index:
    """The passages of a corpus with a BM25 index over their words."""

    def __init__(self, texts: list[str]) -> None:
        import bm25s

        self.texts, self._split = texts, functools.partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self._ranks = bm25s.BM25()
        self._ranks.index(self._split(texts), show_progress=False)

    def best(self, query: str, count: int) -> list[str]:
        """Returns at most `count` passages that share a word with the query, the best first."""
        words = self._split(query, return_ids=False)
        if not words[0]:
            return []
        places, scores = self._ranks.retrieve(words, k=min(count, len(self.texts)), show_progress=False)
        return [self.texts[int(p)] for p, score in zip(places[0], scores[0], strict=True) if score > 0]


@functools.cache
def index(corpus: str, column: str) -> Index:
    """Returns the index of a file, made once; raises ValueError with the file and the row that cannot be read."""
    path = Path(corpus).expanduser()
    if not path.is_file():
        raise ValueError(f"Search.corpus: there is no file {str(path)!r}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return Index(lines)
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            texts.append(str(json.loads(line)[column]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, row {number}: no JSON object with the column {column!r} ({error!r})") from error
    return Index(texts)
