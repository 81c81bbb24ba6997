"""Semantic distances by embeddings: against pairs written out, a server's answers, and its failures."""

import asyncio

import numpy as np
import pytest
from builders import make_prompt, make_rollout

from jaxrl_llm.rewards.embeddings import HashedWords, SemanticDistance, ServedEmbedder, distances
from jaxrl_llm.rewards.service import Service


def test_the_distance_is_the_mean_over_the_others_of_one_less_the_cosine():
    e = np.random.default_rng(0).normal(size=(5, 3))
    cosine = lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b))  # noqa: E731
    expected = [np.mean([1 - cosine(e[i], e[j]) for j in range(5) if j != i]) for i in range(5)]
    np.testing.assert_allclose(distances(e), expected, atol=1e-12)
    assert distances(e[:1]).tolist() == [0]
    assert distances(np.array([[1.0, 0], [0, 0]])).tolist() == [1, 1]


def scored(embedder, *texts):
    rollouts = [make_rollout(make_prompt(), [1], text=text) for text in texts]
    return asyncio.run(SemanticDistance(embedder=embedder).score(rollouts))


def test_texts_of_the_same_words_are_near_and_of_other_words_far():
    found = scored(HashedWords(), "the cat sat", "The cat sat!", "dogs run far").parts["semantic_distance"]
    np.testing.assert_allclose(found, [0.5, 0.5, 1.0], atol=1e-12)


class Answers(Service):
    """Gives one answer to any call."""

    async def post(self, path, body, read):
        from jaxrl_llm.rewards.wrap import Failed

        assert path == "/v1/embeddings" and body["model"] == "m"
        try:
            return read({"data": [{"index": i, "embedding": e} for i, e in self.limit_s]})
        except ValueError as error:
            raise Failed(str(error)) from error


@pytest.mark.parametrize(
    ("rows", "valid"),
    [([(1, [0.0, 2]), (0, [3.0, 0])], True), ([(0, [1.0, 0])], False), ([(0, [1.0]), (1, [1.0, 2])], False)],
)
def test_a_servers_embeddings_are_taken_in_the_order_of_the_texts_or_refused(rows, valid):
    service = Answers(urls=("http://127.0.0.1:9",))
    object.__setattr__(service, "limit_s", rows)
    found = scored(ServedEmbedder(service=service, model="m"), "a", "b")
    assert found.valid["semantic_distance"].tolist() == [valid, valid]
    if valid:
        assert found.parts["semantic_distance"].tolist() == [1, 1]
        embedded = asyncio.run(ServedEmbedder(service=service, model="m").embed(["a", "b"]))
        assert embedded.tolist() == [[3, 0], [0, 2]]


def test_a_server_that_is_down_makes_the_group_invalid():
    service = Service(urls=("http://127.0.0.1:9",), tries=1)
    assert not scored(ServedEmbedder(service=service, model="m"), "a", "b").valid["semantic_distance"].any()
