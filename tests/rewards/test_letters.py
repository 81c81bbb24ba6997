"""The stand-in objective, in process and behind the protocol of the classifier's server."""

import asyncio

import pytest
from builders import make_prompt, make_rollout
from fastapi.testclient import TestClient

from jaxrl_llm.rewards.classifier import Classifier
from jaxrl_llm.rewards.letters import Letters, application


def test_it_is_the_share_of_wanted_letters_and_short_texts_gain_nothing():
    rollouts = [make_rollout(make_prompt(), [1], text=text) for text in ("aaaaaa", "abxyzw", "ab", "", "aaaaaaaaxx")]
    scores = asyncio.run(Classifier(scorer=Letters(wanted="ab", least=6), maximum=0.9).score(rollouts))
    assert scores.parts["classifier"].tolist() == pytest.approx([0.9, 2 / 6, 2 / 6, 0.0, 0.8])


def test_the_server_answers_as_a_classifier_s_does():
    with TestClient(application(Letters(wanted="a")), base_url="http://localhost") as client:
        assert client.get("/health").json() == {"status": "healthy", "model_loaded": True}
        answer = client.post("/score", json={"texts": ["aaaaaa", "aaabbb"]}).json()
        assert answer == {"scores": [1.0, 0.5], "token_lengths": [6, 6], "count": 2}
        assert client.post("/score", json={"text": "a"}).status_code == 400


def test_nothing_wanted_is_refused():
    with pytest.raises(ValueError, match="Letters needs wanted letters"):
        Letters(wanted="")
