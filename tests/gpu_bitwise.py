"""Checks and measures the bitwise mode on one Hopper GPU.

    PYTHONPATH=. python tests/gpu_bitwise.py [--only=products,stats,norms,attention,model,gradients,run,time,decode_parts,decode_steps,decode,update]

prints a JSON line a row, and exits 1 where a bit differs, a value is wrong or a part fails. `products`, `stats`, `norms` and `attention` compute
rows among others and alone, permuted, and in calls of 1 to 16,384 of them, count the numbers that differ in any bit (expected 0), and compare with
float64; another order of each sum must be seen. `model` draws tokens from a shallow model of 1.5B's width and reads them again as a learner does. `gradients`
(bitwise_gradients.py) computes gradients and updates of four layers of 0.5B's width several times, expected to be the same, and tells what else they were. `run` trains for 20 steps (gpu_bitwise.gin;
MODEL=folder names other weights) and prints gap, ratio and KL of each. `time` sets each product, the head and attention beside the default ones at 1.5B's
shapes; `decode_parts` and `decode_steps` time the products, attention and head of a sampler's token at 0.5B's, by each choice of blocks, whose bits
must be the same, and whole steps; `decode` and `update` run `bench` with and without the mode.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, __file__.rpartition("/")[0])

import bitwise_decode
import bitwise_gradients
from bitwise_decode import CALLS, looped, normal
from bitwise_rows import attention_of, differing, rows_of, wide

from jaxrl_llm.kernels.attention import ordered_gpu as attention_gpu
from jaxrl_llm.kernels.attention.api import attention
from jaxrl_llm.kernels.decode_attention.api import decode_attention
from jaxrl_llm.kernels.ordered import hopper
from jaxrl_llm.kernels.timing import timed
from jaxrl_llm.kernels.token_stats import ordered
from jaxrl_llm.kernels.token_stats.api import token_stats

PARTS = (
    "products",
    "stats",
    "norms",
    "attention",
    "model",
    "gradients",
    "time",
    "run",
    "decode_parts",
    "decode_steps",
    "decode",
    "update",
)
DECODE, UPDATE = ("--repeats=1", "--response_tokens=256"), ("--repeats=3", "--segments=4")
WEIGHTS = (
    (1536, 1536, False),
    (1536, 256, False),
    (1536, 8960, False),
    (8960, 1536, False),
    (896, 4864, False),
    (1000, 200, True),
)
COUNTS = (1, 200, 1000)
WIDTH, VOCABULARY, TEMPERATURE = 1536, 151936, 0.7
BAD: list[str] = []


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def expect(row: dict[str, Any], **limits: float) -> None:
    """Prints a row, and remembers it where a value is beyond its limit, or not a number."""
    wrong = [name for name, most in limits.items() if not row[name] <= most]
    BAD.extend(f"{row['part']}: {name}" for name in wrong)
    say(**row, wrong=wrong)


def among_others(run: Callable[..., Any], rows: Sequence[jax.Array], counts: Sequence[int]) -> dict[str, int]:
    """Bits that differ where `run(*rows)` takes fewer rows from some place, and all of them in another order."""
    rng, total = np.random.default_rng(0), len(rows[0])
    whole, order = np.asarray(run(*rows)), rng.permutation(total)
    found = {"permuted": differing(np.asarray(run(*(x[order] for x in rows))), whole[order])}
    for count in counts:
        first = int(rng.integers(total - count + 1))
        found[f"of {count}"] = differing(run(*(x[first : first + count] for x in rows)), whole[first : first + count])
    return {"rows": total, "differing": sum(found.values()), "where": [n for n, bits in found.items() if bits]}  # type: ignore[dict-item]


# -- each kernel ---------------------------------------------------------------------------------------------------------


def _with(run: Callable[..., Any], *fixed: Any) -> Callable[..., Any]:
    """`run` with its last arguments, which are no constants of its program."""
    return lambda *arrays: run(*arrays, *fixed)


def products() -> None:
    for k, n, turned in WEIGHTS:
        x, w = normal(1, 16384, k), normal(2, *((n, k) if turned else (k, n)), scale=k**-0.5)
        run = _with(jax.jit(functools.partial(hopper.product, turned=turned)), w)
        want = wide(x[:64]) @ (wide(w).T if turned else wide(w))
        ulp = 2.0 ** (np.floor(np.log2(np.abs(want).max(axis=1, keepdims=True))) - 7)
        error = float((np.abs(wide(run(x)[:64]) - want) / ulp).max())
        row = {"part": "products", "k": k, "n": n, "turned": turned, "roundings": error}
        # Another order of the sum is seen, and so is the library's.
        other = _with(
            jax.jit(
                lambda x, w, axis=1 if turned else 0: hopper.product(x[:, ::-1], jnp.flip(w, axis), turned=axis == 1)
            ),
            w,
        )
        row["unseen"] = int(differing(run(x), other(x)) == 0)
        if not turned:
            row["default_differing"] = among_others(_with(jax.jit(jnp.dot), w), [x], COUNTS)["differing"]
        expect(row | among_others(run, [x], COUNTS), roundings=1.0, differing=0, unseen=0)


def of_float64(hidden: Any, head: Any, targets: Any, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies."""
    z = (wide(hidden) @ wide(head).T) / temperature
    z -= z.max(axis=1, keepdims=True)
    logp = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return logp[np.arange(len(z)), np.asarray(targets)], -(np.exp(logp) * logp).sum(axis=1)


def learners(hidden: Any, targets: Any, head: Any, outputs: tuple[str, ...] = ("logprob", "entropy")) -> dict[str, Any]:
    return token_stats(hidden, head, targets, temperature=TEMPERATURE, outputs=outputs, backend="ordered")


def sampled(hidden: Any, head: Any, targets: Any, temperature: Any) -> tuple[Any, Any]:
    """The log-probs and logits of a sampler."""
    read = ordered.read(hidden, head, temperature)
    return ordered.logprobs(read, hidden, head, targets, temperature), read.logits


def stats() -> None:
    for width, vocabulary, tokens in ((WIDTH, VOCABULARY, 4096), (896, 4112, 20000)):
        hidden, head = normal(3, tokens, width), normal(4, vocabulary, width, scale=2 * width**-0.5)
        targets = jax.random.randint(jax.random.key(5), (tokens,), 0, vocabulary)
        found = jax.jit(learners)(hidden, targets, head)
        logprob, entropy = of_float64(hidden[:64], head, targets[:64], TEMPERATURE)
        wanted = {"logprob": logprob, "entropy": entropy}
        errors = {n: float(np.abs(wide(found[n][:64]) - x).max()) for n, x in wanted.items()}
        row = {"part": "stats", "width": width, "vocabulary": vocabulary, **errors}

        @jax.jit
        def read(h: Any, t: Any, w: Any) -> Any:
            return learners(h, t, w, ("logprob",))["logprob"]

        alone = lambda h, t, turned=False, w=head, read=read: read(h, t, w[:, ::-1] if turned else w)  # noqa: E731
        row["unseen"] = int(differing(alone(hidden, targets), alone(hidden[:, ::-1], targets, turned=True)) == 0)
        expect(row | among_others(alone, [hidden, targets], COUNTS), logprob=3e-4, entropy=3e-4, differing=0, unseen=0)
        # Slots of a sampler, the others at other temperatures.
        slots, own = np.arange(256), np.full(256, TEMPERATURE, np.float32)
        own[1::2] = np.random.default_rng(1).uniform(0.5, 2, 128)
        drawn, logits = jax.jit(sampled)(hidden[slots], head, targets[slots], own)
        row = {"differing": differing(np.asarray(drawn)[::2], np.asarray(found["logprob"])[slots][::2])}
        row["logits"] = float(np.abs(np.asarray(logits, np.float64)[:64] - wide(hidden[:64]) @ wide(head).T).max())
        row["permuted"] = differing(jax.jit(sampled)(hidden[7:100], head, targets[7:100], own[7:100])[1], logits[7:100])
        expect({"part": "stats of slots", "vocabulary": vocabulary, **row}, differing=0, logits=1e-4, permuted=0)


def norms() -> None:
    for width in (1536, 896, 128, 64):
        x, scale = normal(6, 16384, width), jax.random.normal(jax.random.key(7), (width,))
        run = _with(jax.jit(hopper.rms_norm, static_argnums=2), scale, 1e-6)
        want = wide(x[:64])
        want = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)
        error = float((np.abs(wide(run(x)[:64]) - want) / (2.0**-8 * np.abs(want) + 1e-9)).max())
        expect(
            {"part": "norms", "width": width, "roundings": error} | among_others(run, [x], COUNTS),
            roundings=1.1,
            differing=0,
        )


# -- attention -----------------------------------------------------------------------------------------------------------


def attentions() -> None:
    for heads, kv_heads, width, window in ((12, 2, 128, None), (14, 2, 64, None), (16, 8, 128, 100)):
        row = {"part": "attention", "heads": heads, "kv_heads": kv_heads, "width": width, "window": window}
        expect(row | attention_of(heads, kv_heads, width, window), packings=0, caches=0, error=0.03)
    decoded = attention_gpu.decoded
    attention_gpu.decoded = functools.partial(_with_keys, 32, decoded.__wrapped__)
    found = attention_of(12, 2, 128, None)["caches"]
    attention_gpu.decoded = decoded
    expect({"part": "attention", "blocks of 32 and of 64 keys": found, "unseen": int(found == 0)}, unseen=0)


def _with_keys(keys: int, run: Callable[..., Any], *arrays: Any, **more: Any) -> Any:
    """`run` with blocks of so many keys."""
    before, attention_gpu.KEYS = attention_gpu.KEYS, keys
    try:
        return run(*arrays, **more)
    finally:
        attention_gpu.KEYS = before


# -- beside the default --------------------------------------------------------------------------------------------------


def seconds(run: Callable[..., Any], *arrays: Any) -> float:
    """Seconds of a call among CALLS of one program, each of which waits for the one before."""
    calls = jax.jit(looped(run))
    return timed(lambda: calls(*arrays), jax.block_until_ready, 3) / CALLS


def times() -> None:
    for rows in (32768, 1024):
        for k, n, _ in WEIGHTS[:4]:
            x, w = normal(8, rows, k), normal(9, k, n, scale=k**-0.5)
            ours, theirs = seconds(jax.jit(hopper.product), x, w), seconds(jax.jit(jnp.dot), x, w)
            flops = 2e-12 * rows * k * n
            say(part="time", rows=rows, k=k, n=n, tflops=flops / ours, default=flops / theirs, share=theirs / ours)
    for rows in (16384, 1024):
        hidden, head = normal(10, rows, WIDTH), normal(11, VOCABULARY, WIDTH, scale=WIDTH**-0.5)
        targets = jnp.zeros(rows, jnp.int32)
        both = [
            seconds(jax.jit(functools.partial(token_stats, outputs=("logprob",), backend=b)), hidden, head, targets)
            for b in ("ordered", "mosaic_gpu")
        ]
        say(part="time", kernel="token_stats", rows=rows, ms=both[0] * 1e3, share=both[1] / both[0])
    for rows, row, many in ((8, 4096, 8), (32, 1024, 1)):
        positions = jnp.tile(jnp.arange(row // many, dtype=jnp.int32), (rows, many))
        segments = jnp.repeat(jnp.arange(1, many + 1, dtype=jnp.int32), row // many)[None].repeat(rows, 0)
        places = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
        arrays = [normal(i, rows, row, heads, 128) for i, heads in enumerate((12, 2, 2))]
        both = [
            seconds(jax.jit(functools.partial(attention, **places, max_segments=many, backend=b)), *arrays)
            for b in ("ordered", "cudnn")
        ]
        share = both[1] / both[0]
        say(part="time", kernel="attention", rows=rows, row=row, segments=many, ms=both[0] * 1e3, share=share)
    cached = [normal(i, 2, 1024, 640, 2, 128) for i in (5, 6)]
    at = jnp.asarray(np.random.default_rng(0).integers(128, 640, 1024), jnp.int32)
    both = [
        seconds(
            jax.jit(functools.partial(decode_attention, backend=b)), normal(7, 1024, 12, 128), *cached, jnp.int32(1), at
        )
        for b in ("ordered", "triton")
    ]
    say(part="time", kernel="decode_attention", slots=1024, ms=both[0] * 1e3, share=both[1] / both[0])


# -- the whole -----------------------------------------------------------------------------------------------------------


def model() -> None:
    """Draws by an engine, and reads the draws in two packings as a learner does."""
    import asyncio
    from dataclasses import replace

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.experience import SamplingParams
    from jaxrl_llm.models.policy import Policy
    from jaxrl_llm.models.sizes import SHAPES
    from jaxrl_llm.samplers.embedded.sampler import EmbeddedSampler

    size = replace(SHAPES["qwen2.5-1.5b"], layers=3)
    policy = Policy(size, Partitioner.create(MeshConfig(), jax.devices()[:1]), "bfloat16", bitwise=True)
    params = jax.tree.map(lambda x: x * 2 if x.ndim > 2 else x, policy.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, size.vocabulary_size, n, dtype=np.int32) for n in rng.integers(1, 200, 24)]

    async def drawn(slots: int) -> list[tuple[np.ndarray, np.ndarray]]:
        engine = EmbeddedSampler(slots=slots, decode_chunk=16).start(policy, None, max_length=400)
        await engine.publish(params, 0)
        found: dict[int, Any] = {}
        async for index, samples in engine.sample(prompts, 4, SamplingParams(max_tokens=150), list(range(24))):
            found[index] = samples
        await engine.close()
        return [(np.concatenate([prompts[i], s.tokens]), np.asarray(s.logprobs)) for i in found for s in found[i]]

    @jax.jit
    def read(params: Any, tokens: Any, positions: Any, segments: Any, targets: Any) -> Any:
        hidden = policy.hidden(params, tokens, positions, segments, max_segments=64)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return token_stats(flat, policy.head(params), targets.reshape(-1), backend="ordered")["logprob"].reshape(
            tokens.shape
        )

    for slots, row in ((40, 512), (96, 1024)):
        sequences = asyncio.run(drawn(slots))
        positions, segments, owner = rows_of(rng, np.array([len(s) - 1 for s, _ in sequences]), row)
        table = np.stack([np.pad(s, (0, 1024 - len(s))) for s, _ in sequences])
        used = owner >= 0
        tokens, targets = np.where(used, table[owner, positions], 0), np.where(used, table[owner, positions + 1], -1)
        learned = np.asarray(read(params, tokens, positions, segments, targets))
        different, count, largest = 0, 0, 0.0
        for i, (_, logprobs) in enumerate(sequences):
            own = np.sort(np.flatnonzero(owner == i))[-len(logprobs) :]
            found = learned.reshape(-1)[own]
            different += differing(found, logprobs.astype(np.float32))
            largest = max(largest, float(np.abs(found - logprobs).max()))
            count += len(logprobs)
        expect(
            {"part": "model", "slots": slots, "row": row, "tokens": count, "differing": different, "largest": largest},
            differing=0,
        )


def gradients() -> None:
    for row in bitwise_gradients.rows():
        expect({"part": "gradients"} | row, **({"differing": 0} if row["kind"] == "as_run" else {}))


def trained() -> None:
    with tempfile.TemporaryDirectory() as folder:
        more = {"RUN_DIR": repr(folder + "/run")}
        if weights := os.environ.get("MODEL"):
            more |= {"sources.PolicySource.architecture": "None", "sources.PolicySource.pretrained": repr(weights)}
        flags = [f"--gin={name}={value}" for name, value in more.items()]
        environment = {**os.environ, "PYTHONPATH": f".:{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "jaxrl_llm.launch", "--gin_file=tests/gpu_bitwise.gin", *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "gap/max" in row]
    expect({"part": "run", "missing": 20 - len(rows)}, missing=0)
    for row in rows:
        names = ["gap/max", "gap/mean", "kl/k3_to_old", "ratio/mean", "grad_norm/policy", "logprob/mean", "time/step_s"]
        found = {"part": "run", "step": row["step"], "unread": int(not row["gap/compared"])}
        found |= {name: row.get(name) for name in names} | {"ratio": abs(row["ratio/mean"] - 1)}
        expect(found, **dict.fromkeys((*names[:3], "ratio", "unread"), 0))


def benched(work: str, *more: str) -> None:
    """Speeds of `work` at 1.5B by the project's benchmark, without the mode and with it."""
    flags = [f"--work={work}", "--bitwise=0,1", "--model=qwen2.5-1.5b", *more]
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.tools.bench", *flags], capture_output=True, text=True, timeout=400
    )
    for line in done.stdout.splitlines():
        row = json.loads(line)
        names = [
            "bitwise", "s", "first_s", "generated_per_s", "step_ms", "floor_gb_per_s", "tokens_per_s", "mfu", "error",
        ]  # fmt: skip
        say(part=work, **{n: row[n] for n in names if n in row})
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])


def decode_parts() -> None:
    for row in bitwise_decode.parts():
        expect({"part": "decode_parts", "differing": 0} | row, differing=0)


def decode_steps() -> None:
    for row in bitwise_decode.steps():
        say(part="decode_steps", **row)


SPEEDS = functools.partial(benched, "sample", *DECODE), functools.partial(benched, "update", *UPDATE)
RUNS = dict(
    zip(
        PARTS,
        (products, stats, norms, attentions, model, gradients, times, trained, decode_parts, decode_steps, *SPEEDS),
        strict=True,
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    asked = parser.parse_args().only.split(",")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # `run` and `decode` are processes of their own
    say(device=jax.devices()[0].device_kind, jax=jax.__version__)
    for part in asked:
        start = time.perf_counter()
        try:
            RUNS[part]()
        except Exception as error:  # one part's failure must not hide the others' rows
            BAD.append(f"{part}: failed")
            say(part=part, failed=f"{type(error).__name__}: {error}"[-1800:])
        say(part=part, seconds=round(time.perf_counter() - start, 1))
    print("\n".join(BAD) or "every bit is the same", flush=True)
    sys.exit(bool(BAD))


if __name__ == "__main__":
    main()
