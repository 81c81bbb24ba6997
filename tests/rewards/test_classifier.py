"""Sequence classifiers of random weights against transformers, in this process and behind HTTP."""

import asyncio
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file, save_file
from tiny_classifier import WORDS, tokenizer, write_bert
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from jaxrl_llm.experience import Prompt, Rollout, Scores
from jaxrl_llm.rewards.classifier import Classifier, Served
from jaxrl_llm.rewards.pairs import Classify
from jaxrl_llm.rewards.service import Service
from jaxrl_llm.rewards.services.classifier_server import application, checked
from jaxrl_llm.rewards.services.hf_classifier import HfClassifier
from jaxrl_llm.rewards.services.http_service import Batcher, Refused, token_of

Serve = Callable[[FastAPI], str]
Score = Callable[..., Scores]

TEXTS = ["the cat sat", "a mat", "it was good and the cat sat on a mat", "", "bad " * 40]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model shaped like Llama, of one label, whose tokenizer has no padding token."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, initializer_range=0.5, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer(folder, eos_token="[SEP]", bos_token="[CLS]")
    return folder


def ids(text: str, most: int = 1024) -> list[int]:
    """[CLS] words [SEP], the words cut so that all fit."""
    return [2, *(WORDS.index(word) if word in WORDS else 1 for word in text.split())][: most - 1] + [3]


def alone(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """transformers' own logits of one row, without padding."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].double().numpy()


def test_logits_are_those_of_transformers_for_each_text_alone(bert: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(bert).eval()
    expected = np.stack([alone(model, ids(text, 24)) for text in TEXTS])
    found = HfClassifier(model=str(bert), label="safe", max_tokens=24, batch=2).classify(TEXTS)
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)
    odds = np.exp(expected[:, 1] - expected[:, 0])
    np.testing.assert_allclose(found.probs[:, 1], odds / (1 + odds), atol=1e-4)
    assert found.tokens.tolist() == [5, 4, 12, 2, 24]
    assert np.ptp(expected[:, 1]) > 0.1  # the model tells the texts apart


def test_a_reward_model_without_padding_token_reads_each_rows_last_token(llama: Path) -> None:
    model = LlamaForSequenceClassification.from_pretrained(llama).eval()
    expected = [float(alone(model, ids(text))[0]) for text in TEXTS]
    reward = HfClassifier(model=str(llama), batch=8)
    np.testing.assert_allclose(asyncio.run(reward.scores(TEXTS)), expected, atol=1e-4)
    chat = [{"role": "user", "content": "it was"}, {"role": "assistant", "content": "good"}]
    rendered = ids("user it was assistant good")[1:-1]  # the template has no special tokens
    np.testing.assert_allclose(reward.score_now([chat]), [float(alone(model, rendered)[0])], atol=1e-4)
    probability = HfClassifier(model=str(llama), output="probability").score_now(TEXTS)
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-np.array(expected))), atol=1e-4)


def renamed(folder: Path, to: Path, name: str) -> Path:
    """The model with another name of its head "score", or without one."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    head = weights.pop("score.weight")
    save_file(weights | ({name: head} if name else {}), to / "model.safetensors", {"format": "pt"})
    return to


def test_a_head_under_athenes_name_is_read_at_the_token_that_ends_the_text(llama: Path, tmp_path: Path) -> None:
    model = LlamaForSequenceClassification.from_pretrained(llama).eval()
    athene = renamed(llama, tmp_path / "athene", "v_head.weight")
    mark = WORDS.index("mat")
    chat = [{"role": "user", "content": "it was"}, {"role": "assistant", "content": "good good good good"}]
    rendered = ids("user it was assistant good good good good")[1:-1]
    for most, kept in ((64, rendered), (5, rendered[:4])):  # the mark is never cut off
        found = HfClassifier(model=str(athene), cls="mat", max_tokens=most).score_now([chat])
        np.testing.assert_allclose(found, [float(alone(model, [*kept, mark])[0])], atol=1e-4)
    with pytest.raises(ValueError, match="cls must be a token of"):
        HfClassifier(model=str(athene), cls="<none>").load()


def test_a_checkpoint_without_a_head_is_refused(llama: Path, tmp_path: Path) -> None:
    headless = renamed(llama, tmp_path / "headless", "")
    with pytest.raises(ValueError, match=r"has no weights \['score.weight'\], which would be random"):
        HfClassifier(model=str(headless)).load()


def test_the_label_must_be_one_of_the_models(bert: Path) -> None:
    logits = HfClassifier(model=str(bert), label="1").classify(TEXTS[:2]).logits
    negated = HfClassifier(model=str(bert), label="safe", sign=-1).score_now(TEXTS[:2])
    assert negated == (-logits[:, 1]).tolist()
    for label in ("harmless", ""):
        with pytest.raises(ValueError, match=r"label must be one of \{0: 'unsafe', 1: 'safe'\}"):
            HfClassifier(model=str(bert), label=label).load()


def post(url: str, body: Any, token: str = "") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_server_scores_as_the_classifier_does(bert: Path, serve: Serve, score: Score) -> None:
    classifier = HfClassifier(model=str(bert), label="safe", sign=-1, batch=4)
    url = serve(application(classifier))
    expected = classifier.score_now(TEXTS)
    status, answer = post(f"{url}/score", {"texts": TEXTS})
    assert status == 200 and answer["count"] == 5 and answer["token_lengths"][:4] == [5, 4, 12, 2]
    np.testing.assert_allclose(answer["scores"], expected, atol=1e-4)
    reward = Classifier(scorer=Served(service=Service(urls=(url,))))
    np.testing.assert_allclose(score(reward, TEXTS).parts["classifier"], expected, atol=1e-4)
    assert post(f"{url}/score", {"texts": []})[1]["scores"] == []
    with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
        assert json.load(response) == {"status": "healthy", "model_loaded": True}


def test_bad_requests_are_refused_with_a_reason(bert: Path, serve: Serve) -> None:
    url = serve(application(HfClassifier(model=str(bert), label="safe"), token="secret")) + "/score"
    assert post(url, {"texts": ["a"]}) == (401, {"error": "a bearer token is needed"})
    assert post(url, {"texts": ["a"]}, "wrong")[0] == 401
    assert post(url, {"texts": ["a"]}, "secret")[0] == 200
    for body, reason in [
        ({"text": "a"}, "`texts` must be a list"),
        ({"texts": "a"}, "`texts` must be a list"),
        ({"texts": [1]}, "text 0 must be a string"),
        ({"texts": ["a", ["a", "b", "c"]]}, "text 1 must be a string"),
        (b"no json", "the body is no JSON"),
        ([1], "must be a JSON object"),
    ]:
        status, answer = post(url, body, "secret")
        assert status == 400 and reason in answer["error"]


def test_pairs_are_classified_in_process_and_over_http_in_the_shape_of_vllm(bert: Path, serve: Serve) -> None:
    model = BertForSequenceClassification.from_pretrained(bert).eval()
    pairs = [("the cat", "a mat sat"), ("good", "bad")]
    classifier = HfClassifier(model=str(bert))

    def direct(a: str, b: str) -> float:
        first, second = ids(a), ids(b)[1:]
        kinds = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.inference_mode():
            return float(model(torch.tensor([first + second]), token_type_ids=kinds).logits.softmax(-1)[0, 1])

    expected = [direct(*pair) for pair in pairs]
    np.testing.assert_allclose(asyncio.run(classifier.similar(pairs)), expected, atol=1e-4)
    service = Service(urls=(serve(application(HfClassifier(model=str(bert), label="safe"))),))
    served = Classify(service=service, form="pair", batch=1)
    np.testing.assert_allclose(asyncio.run(served.similar(pairs)), expected, atol=1e-4)


def test_pairs_are_sent_as_ids_or_words_within_their_budget(bert: Path) -> None:
    service = Service(urls=("http://127.0.0.1:9",))
    tokens = Classify(service=service, tokenizer=str(bert), cls="[CLS]", sep="[SEP]", budget=7)
    assert tokens.sent("the cat sat", "a") == [2, 4, 5, 3, 8, 3]
    words = Classify(service=service, form="words", cls="<s>", sep="</s>", budget=7)
    assert words.sent("the\ncat sat", "a") == "<s> the cat </s> a </s>"
    with pytest.raises(ValueError, match=r"cls and sep of pairs must be tokens of"):
        Classify(service=service, tokenizer=str(bert)).sent("a", "b")
    with pytest.raises(ValueError, match=r"needs Classify.tokenizer"):
        Classify(service=service)


def test_a_text_that_cannot_be_worked_on_fails_alone() -> None:
    """Requests share batches: what is wrong with one of them does not reach the others."""

    def work(items: list[str]) -> list[str]:
        if "bad" in items:
            raise ValueError("bad")
        return [item.upper() for item in items]

    async def run() -> list[Any]:
        batcher = Batcher(work, size=8, wait_s=0.05)
        return await asyncio.gather(*(batcher.submit([t]) for t in ("a", "bad", "b")), return_exceptions=True)

    first, refused, last = asyncio.run(run())
    assert (first, last) == (["A"], ["B"]) and isinstance(refused, Refused) and refused.status == 500


@pytest.mark.parametrize(
    "text", ["\ud800", ["a", "\udfff"], [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": None}]]
)
def test_texts_that_are_no_unicode_or_no_messages_are_refused(text: Any) -> None:
    with pytest.raises(Refused, match=r"text 1 (is no Unicode|must be a string)"):
        checked(["fine", text])


def test_requests_share_batches_and_a_failure_concerns_its_own() -> None:
    sizes: list[int] = []
    go = threading.Event()

    def work(items: list[int]) -> list[int]:
        go.wait(60)
        sizes.append(len(items))
        if -1 in items:
            raise RuntimeError("no")
        return [10 * item for item in items]

    async def run() -> None:
        batcher = Batcher(work, size=4, wait_s=0.0, most_waiting=8)
        first = asyncio.create_task(batcher.submit([1]))
        await asyncio.sleep(0.05)  # the first is at work, the others wait
        rest = [asyncio.create_task(batcher.submit(items)) for items in ([2, 3], [4, 5], [-1])]
        await asyncio.sleep(0.05)
        with pytest.raises(Refused, match=r"5 texts are waiting already"):
            await batcher.submit([6] * 4)
        go.set()
        assert await first == [10] and await rest[0] == [20, 30] and await rest[1] == [40, 50]
        with pytest.raises(Refused, match=r"RuntimeError: no"):
            await rest[2]
        assert await batcher.submit([7]) == [70]

    asyncio.run(run())
    assert sizes == [1, 4, 1, 1]


def test_an_open_address_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_of("127.0.0.1", "") == token_of("::1", "") == token_of("localhost", "") == ""
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match=r"can be reached from other machines"):
            token_of(host, "")
    with pytest.raises(ValueError, match=r"REWARD_TOKEN_OF_A_TEST is not set"):
        token_of("127.0.0.1", "REWARD_TOKEN_OF_A_TEST")
    monkeypatch.setenv("REWARD_TOKEN_OF_A_TEST", "secret")
    assert token_of("0.0.0.0", "REWARD_TOKEN_OF_A_TEST") == "secret"


def test_what_a_classifier_sees_is_a_choice() -> None:
    def of(prompt: Prompt, sees: Any) -> Any:
        nothing = np.zeros(0, np.float32)
        rollout = Rollout(
            prompt=prompt, tokens=nothing.astype(np.int32), sampler_logprobs=nothing, mask=nothing > 0,
            versions=nothing.astype(np.int32), finish="stop", text="good",
        )  # fmt: skip
        return Classifier(scorer=Served(service=Service(urls=("http://127.0.0.1:9",))), sees=sees).shown(rollout)

    chat = Prompt(id="c", messages=[{"role": "user", "content": "it was"}])
    assert of(chat, "response") == "good" and of(chat, "pair") == ["it was", "good"]
    assert of(chat, "chat") == [{"role": "user", "content": "it was"}, {"role": "assistant", "content": "good"}]
    with pytest.raises(ValueError, match=r"prompt 't' is no chat"):
        of(Prompt(id="t", text="it was"), "chat")
