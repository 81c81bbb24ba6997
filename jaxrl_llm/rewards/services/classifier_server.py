"""Serves a sequence classifier over HTTP: `python -m jaxrl_llm.rewards.services.classifier_server --model FOLDER --label safe`.

    GET  /health                                        {"status", "model_loaded"}
    POST /score     {"texts": [text]}                   {"scores": [float | null], "token_lengths": [int], "count": int}
    POST /classify  {"input": text | [text]}            {"data": [{"index", "probs": [float]}]}, the shape of vLLM

A text is a string, a pair of strings, or a list of chat messages. The texts of concurrent requests are worked on in
common batches. A score that is not finite is null.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request

from jaxrl_llm import command_line
from jaxrl_llm.rewards.services import http_service
from jaxrl_llm.rewards.services.hf_classifier import HfClassifier
from jaxrl_llm.rewards.services.http_service import Batcher, Refused


class _Result(NamedTuple):
    score: float | None
    probs: list[float]
    tokens: int


def application(classifier: HfClassifier, token: str = "", wait_s: float = 0.005) -> FastAPI:
    """Returns the service of `classifier`; the batches of its queue have at most `classifier.batch` texts."""

    def work(texts: list[Any]) -> list[_Result]:
        found = classifier.classify(texts)
        scores = [score if math.isfinite(score) else None for score in classifier.read(found)]
        return [_Result(*one) for one in zip(scores, found.probs.tolist(), found.tokens.tolist())]

    app = http_service.guarded(token)
    batcher = Batcher(work, classifier.batch, wait_s)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "model_loaded": classifier.loaded}

    @app.post("/score")
    async def score(request: Request) -> dict[str, Any]:
        texts = (await http_service.body_of(request)).get("texts")
        if not isinstance(texts, list):
            raise Refused("`texts` must be a list")
        results: Sequence[_Result] = await http_service.while_there(request, batcher.submit(checked(texts)))
        return {
            "scores": [result.score for result in results],
            "token_lengths": [result.tokens for result in results],
            "count": len(results),
        }

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        given = (await http_service.body_of(request)).get("input")
        if not isinstance(given, str | list):
            raise Refused("`input` must be a text or a list of texts")
        asked = checked([given] if isinstance(given, str) else given)
        results = await http_service.while_there(request, batcher.submit(asked))
        return {"data": [{"index": i, "probs": result.probs} for i, result in enumerate(results)]}

    return app


def checked(texts: list[Any]) -> list[Any]:
    """Returns the texts if each is a string, a pair of strings or a list of messages; raises Refused otherwise."""
    for i, text in enumerate(texts):
        pair = isinstance(text, list) and len(text) == 2 and all(isinstance(one, str) for one in text)
        messages = (
            isinstance(text, list)
            and len(text) > 0
            and all(
                isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("role", "content")) for one in text
            )
        )
        if not (isinstance(text, str) or pair or messages):
            raise Refused(
                f"text {i} must be a string, a pair of strings or a list of messages whose role and content are strings"
            )
        parts = [text] if isinstance(text, str) else [p for one in text for p in (one.values() if messages else [one])]
        if not all(_unicode(part) for part in parts if isinstance(part, str)):
            raise Refused(f"text {i} is no Unicode text: it holds half of a surrogate pair")
    return texts


def _unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    """Reads the command line, loads the model and serves it."""
    parser = command_line.parser("rewards.services.classifier_server", __doc__)
    parser.add_argument("--model", required=True, help="folder or Hugging Face id")
    parser.add_argument("--label", default="", help="label whose output is the score, by name or index")
    parser.add_argument("--output", default="logit", choices=["logit", "probability"])
    parser.add_argument("--sign", type=float, default=1.0, help="-1 negates the score")
    parser.add_argument("--max_tokens", type=int, default=1024)
    parser.add_argument("--keep", default="start", choices=["start", "end"], help="which end of a longer text is read")
    parser.add_argument(
        "--cls", default="", help="token added to the end of every text, at which the model's head reads"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    http_service.options(parser, port=50050)
    given = parser.parse_args(argv)
    token = http_service.token_of(given.host, given.token_env)
    classifier = HfClassifier(
        model=given.model, label=given.label, output=given.output, sign=given.sign, max_tokens=given.max_tokens,
        keep=given.keep, cls=given.cls, batch=given.batch, device=given.device, dtype=given.dtype,
    )  # fmt: skip
    classifier.load()
    print(f"serving {given.model} on http://{given.host}:{given.port}", flush=True)
    http_service.serve(application(classifier, token), given.host, given.port)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
