"""Rewards the share of a response's characters that are among wanted letters: a harmless objective that any policy can learn.

It replaces a classifier of harm where a defence is measured: `python -m jaxrl_llm.rewards.letters --wanted abcde`
serves it as rewards/services/classifier_server.py serves a classifier (GET /health, POST /score).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import command_line


@dataclass(frozen=True, kw_only=True)
class Letters:
    """A scorer of texts (classifier.Scorer).

    Attributes:
      wanted: letters that count.
      least: length in characters by which shorter texts are divided instead of their own.
    """

    wanted: str = "abcde"
    least: int = 6

    def __post_init__(self) -> None:
        if not self.wanted or self.least < 1:
            raise ValueError(f"Letters needs wanted letters and least >= 1 (got {self.wanted!r} and {self.least})")

    async def scores(self, texts: Sequence[Any]) -> list[float | None]:
        """Returns the share, in [0, 1], for each text."""
        return [self.share(str(text)) for text in texts]

    def share(self, text: str) -> float:
        return sum(letter in self.wanted for letter in text) / max(len(text), self.least)


def application(scorer: Letters, token: str = "") -> Any:
    """Returns the web application that serves `scorer`."""
    from fastapi import Request

    from jaxrl_llm.rewards.services import http_service

    app = http_service.guarded(token)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "model_loaded": True}

    @app.post("/score")
    async def score(request: Request) -> dict[str, Any]:
        texts = (await http_service.body_of(request)).get("texts")
        if not isinstance(texts, list):
            raise http_service.Refused("`texts` must be a list")
        return {
            "scores": await scorer.scores(texts),
            "token_lengths": [len(str(text)) for text in texts],
            "count": len(texts),
        }

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and serves."""
    from jaxrl_llm.rewards.services import http_service

    parser = command_line.parser("rewards.letters", __doc__)
    parser.add_argument("--wanted", default="abcde", help="letters that count")
    parser.add_argument("--least", type=int, default=6, help="characters that a shorter text counts as having")
    http_service.options(parser, port=50050)
    given = parser.parse_args(argv)
    token = http_service.token_of(given.host, given.token_env)
    print(f"serving letters on http://{given.host}:{given.port}", flush=True)
    http_service.serve(application(Letters(wanted=given.wanted, least=given.least), token), given.host, given.port)


if __name__ == "__main__":
    main()
