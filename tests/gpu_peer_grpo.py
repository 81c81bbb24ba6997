"""Trains with TRL's GRPO on the work of gin/grpo_qwen_coder_0p5b_gsm8k.gin, and prints greedy accuracy before and after.

    python tests/gpu_peer_grpo.py --model FOLDER --data FOLDER_WITH_train.jsonl_AND_test.jsonl --out runs/trl --limit 560

The same prompts, samples a step (1,024), mini-batches (4), rate (6e-6, falling to 0 with time), reward and grading. Needs trl, vllm, liger-kernel
and datasets; docs/measured/peers.md has the versions and what came of it.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import SamplingParams

INSTRUCTION = "\nReason step by step, and put the final answer within \\boxed{}."
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
RATE, SAMPLES, MINIBATCHES = 6e-6, 1024, 4


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    """The problems of a file with their gold answers."""
    found = map(json.loads, (folder / name).read_text().splitlines())
    return [{"question": r["question"], "gold": r["answer"].split("####")[-1].strip().replace(",", "")} for r in found]


def boxed(text: str) -> str | None:
    """What the last box of a response holds."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, end = 1, start + 7
    while end < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start + 7 : end - 1]


def right(text: str, gold: str) -> bool:
    """Whether the number of the last box, else the last number, is the gold one."""
    inside = boxed(text)
    numbers = NUMBER.findall(text if inside is None else inside)
    return bool(numbers) and abs(float(numbers[-1].replace(",", "").rstrip(".")) - float(gold)) < 1e-6


def reward(completions: Sequence[Any], gold: Sequence[str], **_: Any) -> list[float]:
    return [float(right(c[0]["content"], g)) for c, g in zip(completions, gold)]


class Clock(TrainerCallback):
    """Lets the rate fall to 0 with time, and stops when it is over."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._began: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._began = self._began or time.time()
        left = max(0.0, 1 - (time.time() - self._began) / self._limit)
        for group in more["optimizer"].param_groups:
            group["lr"] = RATE * left * min(1.0, (state.global_step + 1) / 4)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.time() - self._began > self._limit


def settings(out: str, batch: int) -> GRPOConfig:
    """TRL's settings of the same work."""
    return GRPOConfig(
        output_dir=out, learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.99, weight_decay=0.0, max_grad_norm=1.0,
        max_steps=100_000, per_device_train_batch_size=batch, gradient_accumulation_steps=SAMPLES // MINIBATCHES // batch,
        generation_batch_size=SAMPLES, num_generations=8, max_completion_length=640, temperature=1.0, beta=0.0,
        scale_rewards="group", num_iterations=1, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=1664, use_liger_kernel=True, bf16=True, gradient_checkpointing=False, logging_steps=1,
        report_to=[], save_strategy="no", seed=0, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--limit", type=float, default=560, help="seconds of steps")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a micro-batch")
    arguments = parser.parse_args()
    ask = lambda question: [{"role": "user", "content": question + INSTRUCTION}]  # noqa: E731
    train = [{"prompt": ask(r["question"]), "gold": r["gold"]} for r in rows(arguments.data, "train.jsonl")]
    test = rows(arguments.data, "test.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    trainer = GRPOTrainer(
        model=arguments.model, args=settings(arguments.out, arguments.batch), train_dataset=Dataset.from_list(train),
        reward_funcs=reward, processing_class=tokenizer, callbacks=[Clock(arguments.limit)],
    )  # fmt: skip
    texts = [
        tokenizer.apply_chat_template(ask(r["question"]), tokenize=False, add_generation_prompt=True) for r in test
    ]

    def evaluate(when: str) -> None:
        trainer.vllm_generation.sync_weights()
        greedy = SamplingParams(temperature=0.0, max_tokens=1024)
        answers = [a.outputs[0].text for a in trainer.vllm_generation.llm.generate(texts, greedy, use_tqdm=False)]
        accuracy = sum(right(a, r["gold"]) for a, r in zip(answers, test)) / len(test)
        print(
            json.dumps(
                {"when": when, "greedy": accuracy, "boxed": sum(boxed(a) is not None for a in answers) / len(test)}
            )
        )

    evaluate("before")
    trainer.train()
    evaluate("after")


if __name__ == "__main__":
    main()
