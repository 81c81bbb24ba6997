"""A random BERT of two labels with a tokenizer of words, as a Hugging Face folder."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification
from transformers import PreTrainedTokenizerFast as Fast

SENTENCE = "the cat sat on a mat and it was good bad user assistant"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *SENTENCE.split()]


def tokenizer(folder: Path, **special: Any) -> None:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = Fast(tokenizer_object=inner, unk_token="[UNK]", **special)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def write_bert(folder: Path) -> Path:
    """Writes the model, of the labels "unsafe" and "safe"."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, initializer_range=0.5, id2label={0: "unsafe", 1: "safe"},
        label2id={"unsafe": 0, "safe": 1},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer(folder, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_input_names=inputs)
    return folder
