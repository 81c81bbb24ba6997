"""The moderation classifier agrees with transformers on random weights, label by label; texts are placeholders."""

import asyncio
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from builders import make_prompt, make_rollout

from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models.reward_models import Moderation

LABELS = [f"category_{i}" for i in range(14)]
SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a tokenizer, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("moderation")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES,
        id2label=dict(enumerate(LABELS)),
        problem_type="multi_label_classification",
        attn_implementation="eager",
    )
    model = transformers.LlamaForSequenceClassification(config).float().eval()
    model.save_pretrained(folder)
    ByteTokenizer().load().save_pretrained(folder)
    return folder, model


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    create = Partitioner.create.__func__
    monkeypatch.setattr(
        Partitioner, "create", classmethod(lambda cls, *_: create(cls, MeshConfig(), jax.devices()[:1]))
    )


RESPONSES = ["a placeholder", "", "another placeholder of more words, which is longer"]


def rollouts() -> list[Any]:
    return [make_rollout(make_prompt("the question?"), [1], text=text) for text in RESPONSES]


@pytest.mark.parametrize(("question", "most"), [(False, 512), (True, 512), (True, 70)])
def test_probabilities_are_those_of_transformers(classifier, question, most):
    folder, model = classifier
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = "the question?" if question else ""
    found = asyncio.run(Moderation(folder=str(folder), question=question, max_tokens=most, rows=2).score(rollouts()))
    for i, response in enumerate(RESPONSES):
        text = f"BEGINNING OF CONVERSATION: USER: {asked} ASSISTANT:{response}{tokenizer.eos_token}"
        tokens = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"]
        length = len(tokenizer(text)["input_ids"])
        with torch.no_grad():
            expected = torch.sigmoid(model(input_ids=tokens).logits[0]).numpy()
        np.testing.assert_allclose([found.parts[f"log/{name}"][i] for name in LABELS], expected, atol=2e-6)
        assert found.parts["harmful"][i] == float(expected.max() > 0.5)
        assert found.parts["log/cut"][i] == float(length > most)
    assert set(found.parts) == {"harmful", "log/cut", *(f"log/{name}" for name in LABELS)}


def test_the_threshold_decides(classifier):
    folder, _ = classifier
    high = asyncio.run(Moderation(folder=str(folder)).score(rollouts()))
    most = max(high.parts[f"log/{name}"].max() for name in LABELS)
    strict = asyncio.run(Moderation(folder=str(folder), threshold=float(most)).score(rollouts()))
    assert strict.parts["harmful"].tolist() == [0, 0, 0]


def test_a_folder_that_cannot_moderate_is_refused(classifier, tmp_path):
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "language")
    ByteTokenizer().load().save_pretrained(tmp_path / "language")
    with pytest.raises(ValueError, match="no sequence classifier"):
        asyncio.run(Moderation(folder=str(tmp_path / "language")).score(rollouts()))
    transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=1)).save_pretrained(
        tmp_path / "one"
    )
    ByteTokenizer().load().save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=r"names . labels in config\.json"):
        asyncio.run(Moderation(folder=str(tmp_path / "one")).score(rollouts()))
    with pytest.raises(ValueError, match="threshold must be in"):
        Moderation(folder="x", threshold=1.5)
