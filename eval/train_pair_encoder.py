"""Trains an encoder such as ModernBERT to decide whether two texts are equivalent: DARLING's classifier for chat (arXiv 2509.02534).

    python -m jaxrl_llm.eval.train_pair_encoder --pairs data_sets/partition_pairs --out classifier [--device cuda]

Rows {generation_0, generation_1, similar} in train.jsonl and val.jsonl, each pair in both orders. As in the authors' training: AdamW, a
learning rate that rises over 10 steps to 2e-5 and falls by a cosine to a tenth of it at step 80, 64 pairs per step, classes weighted by
N / N_k and validation every 10 steps; the encoder of the best F1 is kept (theirs was of step 70). It trains in PyTorch (the extra
`serve`), since the project's own models read from left to right; gin/darling_partition_classifier.gin trains one of those in JAX.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.data.similar_pairs import Labelled, SimilarPairs
from jaxrl_llm.rewards.monitor import detection
from jaxrl_llm.rewards.pairs import pair_ids

Row = tuple[list[int], int]  # token ids of a pair, and its class

LABELS = {0: "different", 1: "similar"}


def rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Returns the learning rate of a step, from 0: a linear rise, then a cosine to a tenth of the peak at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def encoded(labelled: Sequence[Labelled], tokenizer: Any, budget: int) -> list[Row]:
    """Returns both orders of each pair, as [CLS] a [SEP] b [SEP] of at most `budget` tokens.

    Raises:
      ValueError: all pairs are of one class, or the tokenizer lacks these marks.
    """
    if len({similar for *_, similar in labelled}) < 2:
        raise ValueError(f"{len(labelled)} pairs with labels that are all the same: a classifier needs both classes")
    marks = tokenizer.cls_token, tokenizer.sep_token
    return [
        (pair_ids(tokenizer, pair, marks, budget), int(similar))
        for a, b, similar in labelled
        for pair in ((a, b), (b, a))
    ]


def weights(rows: Sequence[Row]) -> np.ndarray:
    """Returns the weight of each class, N / (2 N_k); the weights' mean over the rows is 1."""
    counts = np.bincount([label for _, label in rows], minlength=2)
    return len(rows) / (2 * counts)


def draws(rows: Sequence[Row], batch: int, seed: int) -> Iterator[list[Row]]:
    """Yields batches without end; each epoch visits all rows in a new order."""
    random, left = np.random.default_rng(seed), list[int]()
    while True:
        while len(left) < batch:
            left += random.permutation(len(rows)).tolist()
        yield [rows[i] for i in left[:batch]]
        left = left[batch:]


def logits(model: Any, rows: Sequence[Row], pad: int, device: str) -> Any:
    """Returns the model's outputs [n, 2] for rows, which are padded on the right; it computes in bfloat16 on a GPU."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([own + [pad] * (longest - len(own)) for own, _ in rows], device=device)
    mask = torch.tensor([[1] * len(own) + [0] * (longest - len(own)) for own, _ in rows], device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
        return model(input_ids=ids, attention_mask=mask).logits.float()


def learn(model: Any, batch: Sequence[Row], of_class: np.ndarray, pad: int, options: argparse.Namespace) -> float:
    """Adds the gradient of a batch's mean weighted cross-entropy, by micro-batches; returns the loss."""
    import torch

    total = 0.0
    for start in range(0, len(batch), options.micro):
        rows = batch[start : start + options.micro]
        labels = torch.tensor([label for _, label in rows], device=options.device)
        each = torch.nn.functional.cross_entropy(logits(model, rows, pad, options.device), labels, reduction="none")
        loss = (each * torch.tensor(of_class, device=options.device, dtype=each.dtype)[labels]).sum() / len(batch)
        loss.backward()
        total += float(loss.detach())
    return total


def judged(model: Any, rows: Sequence[Row], pad: int, options: argparse.Namespace) -> dict[str, float]:
    """Computes counts, precision, recall, F1 and accuracy of the more likely class."""
    import torch

    model.eval()
    with torch.no_grad():
        said = [
            float(x)
            for start in range(0, len(rows), options.micro)
            for x in logits(model, rows[start : start + options.micro], pad, options.device).argmax(-1)
        ]
    model.train()
    truth = np.array([label for _, label in rows], np.float64)
    found = np.array(said, np.float64)
    return {**detection(found, truth, np.ones(len(rows), bool)), "accuracy": float((found == truth).mean())}


def train(options: argparse.Namespace) -> list[dict[str, float]]:
    """Trains and keeps the best encoder with its tokenizer in `options.out`; returns the scores, which scores.jsonl there also holds."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("training an encoder needs PyTorch: pip install 'jaxrl-llm[serve]'") from error
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    read = lambda split: SimilarPairs(path=options.pairs, tokenizer=None, split=split).labelled()  # noqa: E731
    rows, held_out = (encoded(read(split), tokenizer, options.budget) for split in ("train", "val"))
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model,
        num_labels=2,
        id2label=LABELS,
        label2id={v: k for k, v in LABELS.items()},
        trust_remote_code=False,
    ).to(options.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    of_class, pad, best, found = weights(rows), int(tokenizer.pad_token_id or 0), -1.0, []
    batches = draws(rows, options.batch, options.seed)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options.rate, options.warmup, options.steps)
        loss = learn(model, next(batches), of_class, pad, options)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.every and step + 1 < options.steps:
            continue
        scores = {"step": step + 1, "loss": loss, **judged(model, held_out, pad, options)}
        found.append(scores)
        print(json.dumps(scores), flush=True)
        if scores["f1"] > best:
            best = scores["f1"]
            model.save_pretrained(options.out)
            tokenizer.save_pretrained(options.out)
    (Path(options.out) / "scores.jsonl").write_text("".join(json.dumps(scores) + "\n" for scores in found))
    return found


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.train_pair_encoder", __doc__)
    parser.add_argument("--model", default="answerdotai/ModernBERT-base", help="encoder: a folder or Hugging Face id")
    parser.add_argument("--pairs", required=True, help="folder with train.jsonl and val.jsonl")
    parser.add_argument("--out", required=True, help="folder of the trained classifier")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rate", type=float, default=2e-5, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps over which the rate rises")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--micro", type=int, default=16, help="pairs in one pass")
    parser.add_argument("--budget", type=int, default=2048, help="most tokens of a pair")
    parser.add_argument("--every", type=int, default=10, help="steps between looks at the validation pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    train(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
