"""A tiny ModernBERT learns which pairs are of one class; its rate, weights and order of rows are as documented."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ModernBertConfig, ModernBertModel
from transformers import PreTrainedTokenizerFast as Fast

from jaxrl_llm.eval import train_pair_encoder as trainer
from jaxrl_llm.rewards.services.hf_classifier import HfClassifier

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An untrained encoder, and pairs that are similar where neither text has a b."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on matrices of this size, threads wait for each other
    place = tmp_path_factory.mktemp("pairs")
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        pad_token_id=0, cls_token_id=2, sep_token_id=3, bos_token_id=2, eos_token_id=3, reference_compile=False,
    )  # fmt: skip
    ModernBertModel(config).save_pretrained(place / "encoder")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    Fast(
        tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(place / "encoder")
    random = np.random.default_rng(0)
    for split, size in (("train", 60), ("val", 20)):
        rows = []
        for _ in range(size):
            first, second = (str(random.choice(list("ab"))) for _ in range(2))
            rows.append(
                {"generation_0": f"{first} c", "generation_1": f"{second} d", "similar": int(first == second == "a")}
            )
        (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield place
    torch.set_num_threads(threads)


def test_an_encoder_learns_its_pairs_and_is_read_as_a_classifier(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out"
    words = [
        "--model",
        str(folder / "encoder"),
        "--pairs",
        str(folder),
        "--out",
        str(out),
        "--steps",
        "20",
        "--rate",
        "1e-2",
        "--batch",
        "16",
    ]
    assert trainer.main([*words, "--budget", "16", "--every", "10"]) == 0
    scores = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [one["step"] for one in scores] == [10, 20] and scores[-1]["accuracy"] == 1.0 and scores[-1]["loss"] < 0.1
    assert capsys.readouterr().out.count('"f1"') == 2
    found = HfClassifier(model=str(out), label="similar", output="probability").classify(
        [("a c", "a d"), ("a c", "b d")]
    )
    assert found.probs[0, 1] > 0.9 > 0.1 > found.probs[1, 1]


def test_the_rate_rises_in_a_line_and_falls_by_a_cosine_to_a_tenth() -> None:
    assert [trainer.rate(step, 2e-5, 10, 80) for step in (0, 9, 10, 80)] == pytest.approx([2e-6, 2e-5, 2e-5, 2e-6])
    assert trainer.rate(45, 2e-5, 10, 80) == pytest.approx(2e-5 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))


def test_classes_weigh_by_their_share_and_rows_come_once_an_epoch_in_both_orders() -> None:
    rows = [([i], int(i < 2)) for i in range(8)]
    assert trainer.weights(rows).tolist() == [8 / 12, 2.0]  # N / (2 N_k): 6 and 2 of 8
    batches = trainer.draws(rows, 4, seed=1)
    first, second, third, fourth = (next(batches) for _ in range(4))
    assert sorted(first + second) == sorted(third + fourth) == rows and first + second != third + fourth
    with pytest.raises(ValueError, match="all the same"):
        trainer.encoded([("a", "b", True)], None, 16)
