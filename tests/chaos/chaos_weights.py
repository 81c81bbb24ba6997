"""Servers that hold or compute something else than what was published: seven kinds of sabotage, each caught, each time."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from chaos_table import Row, Stopwatch, Trial
from published import write_version
from served_model import LAYER, Served
from stand_in_worker import Worker, weights
from test_canary import WRONG, model, ratio, two_versions
from test_vllm_plugin import staged

SQUARE = ("self_attn.o_proj.weight", "self_attn.q_proj.weight")
PAIRS = (
    (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"),
    (f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.v_proj.weight"),
    (f"{LAYER}self_attn.k_proj.bias", f"{LAYER}self_attn.v_proj.bias"),
    ("model.embed_tokens.weight", "lm_head.weight"),
)
Wrong = dict[str, np.ndarray]


def swapped(rng: random.Random) -> Wrong:
    first, second = rng.choice(PAIRS)
    return {first: weights(1)[second], second: weights(1)[first]}


def transposed(rng: random.Random) -> Wrong:
    name = LAYER + rng.choice(SQUARE)
    return {name: np.ascontiguousarray(weights(1)[name].T)}


def stale(rng: random.Random) -> Wrong:
    name = rng.choice(sorted(weights(0)))
    return {name: weights(0)[name]}


def old(rng: random.Random) -> Wrong:
    return weights(0)


def narrower(rng: random.Random) -> Wrong:
    """One tensor in 16 bits, or all of them."""
    kind = rng.choice((torch.bfloat16, torch.float16))
    names = [rng.choice(sorted(weights(1)))] if rng.random() < 0.5 else sorted(weights(1))
    return {name: torch.from_numpy(weights(1)[name]).to(kind).to(torch.float32).numpy() for name in names}


def flipped(rng: random.Random) -> Wrong:
    """One bit of one element's exponent."""
    name = rng.choice(sorted(weights(1)))
    array = weights(1)[name].copy()
    array.view(np.uint32).reshape(-1)[rng.randrange(array.size)] ^= np.uint32(1 << rng.randrange(23, 31))
    return {name: array}


# Kinds by the names that the tests of the canary give them; a rotary base is no tensor.
HELD: dict[str, Callable[[random.Random], Wrong]] = {
    "layers exchanged": swapped, "a square matrix transposed": transposed, "one stale tensor": stale, "the version before": old,
    "another element type": narrower, "one flipped bit of an exponent": flipped,
}  # fmt: skip
BASE = "another base of the rotary wavelengths"


def sabotaged(trial: Trial) -> Row:
    """Loads go wrong at random places, and servers have another rotary base: no server is ever said to hold the version."""
    rng, row, caught = random.Random(trial.seed), Row(tried=0, outcome="", into=trial.times), Counter[str]()
    paths = [write_version(trial.folder, version, weights(version)) for version in range(2)]
    for number in range(trial.times):
        name = [*HELD, BASE][number % 7]
        worker = Worker(dtype=torch.float32)
        if name == BASE:
            worker.config["rope_theta"] *= rng.uniform(1.0001, 3)
        error = spoiled(worker, paths, HELD[name](rng) if name in HELD else None)
        assert error, f"{name}: not caught"
        caught[name] += 1
        row.tried, row.out = row.tried + 1, row.out + 1
        if name == BASE:
            continue
        watch = Stopwatch()
        worker.spoils = lambda model: None
        assert worker.commit("1")["version"] == worker.published_version() == 1, "the next load is whole"
        row.recovered_s.append(watch.seconds)
    kinds = ", ".join(f"{name} {n}" for name, n in caught.items())
    row.outcome = f"caught exactly: {kinds}"
    if trial.times > len(WRONG):
        row.outcome += f"; {by_canary()}"
    return row


def by_canary() -> str:
    """Asks the canary of each kind too, in float32."""
    versions, seen = two_versions(), []
    for name, (change, sizes) in WRONG.items():
        found, most = ratio(change(versions), model(sizes), versions[1])
        assert found > most, f"the canary does not see {name} in float32"
        seen.append(found / most)
    return f"the canary tells all {len(seen)} by {min(seen):.0f} times its limit or more"


def spoiled(worker: Worker, paths: list[str], wrong: Wrong | None) -> str:
    """The error of a server that is brought to version 0 and then to version 1; empty where it takes the latter."""

    @torch.no_grad()
    def load(model: Served) -> None:
        for name, array in (wrong or {}).items():
            model.load(name, torch.from_numpy(array))

    for version, spoils in enumerate((worker.spoils, load)):
        worker.spoils = spoils
        status: dict[str, Any] = staged(worker, paths[version], version)
        if status["state"] == "failed":
            assert worker.published_version() == -1 and worker.reloads == 0
            return str(status["error"])
        answer = worker.commit(str(version))
        assert answer["version"] == worker.published_version()
        if answer["error"]:
            assert answer["version"] == -1, "a model of which something is wrong has no version"
            return str(answer["error"])
    return ""
