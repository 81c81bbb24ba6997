"""Every service on loopback under load, as a table: `python -m tests.chaos.load_services [--seconds 6] [--clients 16] [--only sandbox]`.

Each service is a process of its own, beside this one with its clients. The classifiers have random weights: what is measured is
their size, not their verdicts. The letters that TokenBuncher's stand-in counts need no model: they are the price of HTTP alone.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parent.parent
HERE = [str(TESTS.parent), *(str(TESTS / name) for name in ("samplers", "rewards", "eval"))]
sys.path[:0] = HERE
from jaxrl_llm.rewards.services.load_test import SERVICES, TEXT, Call, load, started  # noqa: E402  its path is set above

TOKEN = "a token of more than sixteen letters"
ROLLOUTS = 2000
HEAD = "| service | clients | requests | failed | requests/s | p50 | p99 | bytes of an answer |\n|---|---|---|---|---|---|---|---|"
GENERATE = {
    "model": "policy", "token_ids": [1, 2, 3], "stream": False,
    "sampling_params": {"n": 1, "max_tokens": 64, "temperature": 1.0, "seed": 1, "min_tokens": 64, "stop_token_ids": []},
}  # fmt: skip


def call(name: str, token: str = "") -> Call:
    path, body, _ = SERVICES[name]
    return Call(path=path, body=body, token=token)


def write_deberta(folder: Path) -> str:
    """A random DeBERTa-v3 of the sizes of its "xsmall", of two labels; the vocabulary alone is small."""
    from tiny_classifier import WORDS, tokenizer
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=len(WORDS), hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
        type_vocab_size=0, position_biased_input=False, id2label={0: "unsafe", 1: "safe"}, label2id={"unsafe": 0, "safe": 1},
    )  # fmt: skip
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer(folder, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    return str(folder)


def write_llama(folder: Path) -> str:
    """A random reward model of Llama's shape, 12 M parameters."""
    from tiny_classifier import WORDS, tokenizer
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer(folder, pad_token="[PAD]")
    return str(folder)


@contextlib.contextmanager
def sandbox(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    with started("jaxrl_llm.rewards.services.sandbox", []) as url:
        yield url, {"sandbox, a program and two tests (a run each)": call("sandbox")}


@contextlib.contextmanager
def deberta(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    with started(
        "jaxrl_llm.rewards.services.classifier_server", ["--model", write_deberta(folder), "--label", "safe"]
    ) as url:
        shape = "DeBERTa-v3-xsmall's shape, random weights"
        yield url, {f"classifier /score, {shape}": call("score"), f"pairs /classify, {shape}": call("classify")}


@contextlib.contextmanager
def llama(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    with started("jaxrl_llm.rewards.services.classifier_server", ["--model", write_llama(folder)]) as url:
        yield url, {"reward model /score, Llama's shape, 12 M, random weights": call("score")}


@contextlib.contextmanager
def letters(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    with started("jaxrl_llm.rewards.letters", []) as url:
        yield url, {"letters /score": Call(path="/score", body={"texts": [TEXT]})}


@contextlib.contextmanager
def proxy(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    with (
        started("fake_vllm", []) as server,
        started("jaxrl_llm.samplers.vllm_proxy", ["--server", server], {"JAXRL_LLM_TOKEN": TOKEN}) as url,
    ):
        yield (
            url,
            {
                "vLLM proxy /health": Call(path="/health", token=TOKEN),
                "vLLM proxy /generate, 64 tokens of a stand-in for vLLM": Call(
                    path="/generate", body=GENERATE, token=TOKEN
                ),
            },
        )


@contextlib.contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, Mapping[str, Call]]]:
    from viewer_rows import rollout, write_run

    rows = [rollout(str(i // 8), TEXT, (i % 8) / 8) for i in range(ROLLOUTS // 4)]
    write_run(folder / "run", dict.fromkeys(range(4), rows))
    with started("jaxrl_llm.eval.viewer", [str(folder / "run")]) as url:
        yield (
            url,
            {
                "viewer /api/runs": Call(path="/api/runs"),
                f"viewer /api/groups, {ROLLOUTS} rollouts": Call(path="/api/groups?run=run&step=1&q=fox"),
            },
        )


STARTS: Sequence[Callable[[Path], contextlib.AbstractContextManager[tuple[str, Mapping[str, Call]]]]] = (
    sandbox, deberta, llama, letters, proxy, viewer,
)  # fmt: skip


def lines(clients: int, seconds: float, only: Sequence[str]) -> Iterator[str]:
    """A row of the table for each call of each service."""
    for start in STARTS:
        if only and start.__name__ not in only:
            continue
        with tempfile.TemporaryDirectory() as folder, start(Path(folder)) as (url, calls):
            for name, sent in calls.items():
                asyncio.run(load(url, sent, 8, 1))  # what is loaded at the first call
                found = asyncio.run(load(url, sent, 10**6, clients, seconds))
                p50, p99 = found["p50_ms"], found["p99_ms"]
                yield (
                    f"| {name} | {clients} | {found['requests']:.0f} | {found['failed']:.0f} | {found['requests_per_s']:.1f} | "
                    f"{p50:.1f} ms | {p99:.1f} ms | {found['bytes']:.0f} |"
                )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.load_services", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each kind of request")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--only", action="append", default=[], choices=[start.__name__ for start in STARTS])
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([*HERE, os.environ.get("PYTHONPATH", "")])
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {asked.seconds:g} s each\n"
    )
    print(HEAD)
    for line in lines(asked.clients, asked.seconds, asked.only):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
