"""What a sampler's token costs in the bitwise mode and without it, by parts, at the shapes of Qwen2.5-0.5B; of tests/gpu_bitwise.py.

`parts` times the products of one layer by each choice of blocks, the attention of one layer and the head, and counts the numbers of which the
choices' bits differ. `steps` times whole steps. Programs are compiled several at a time.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bitwise_rows import differing

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.kernels.decode_attention.api import decode_attention
from jaxrl_llm.kernels.ordered import arithmetic, hopper
from jaxrl_llm.kernels.timing import timed
from jaxrl_llm.kernels.token_stats import ordered
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.samplers.embedded import decode
from jaxrl_llm.samplers.embedded.weights import served as served_by

SIZE = SHAPES["qwen2.5-0.5b"]
SLOTS, LENGTH, STEPS, CALLS, THREADS = (1024, 512, 256, 128, 64), 1152, 16, 20, 8
WEIGHTS = {
    "q k v": (896, (896, 128, 128)),
    "output": (896, (896,)),
    "gate up": (896, (4864, 4864)),
    "down": (4864, (896,)),
}

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def looped(run: Callable[..., Any]) -> Callable[..., Any]:
    """CALLS calls of `run`, each of which waits for the one before."""

    def calls(first: Any, *rest: Any) -> Any:
        def one(_: Any, x: Any) -> Any:
            outs = jax.lax.optimization_barrier(jax.tree.leaves(run(x, *rest)))
            return x.at[(0,) * x.ndim].set(sum(out[(0,) * out.ndim] for out in outs).astype(x.dtype))

        return jax.lax.fori_loop(0, CALLS, one, first)

    return calls


def compiled(jobs: dict[Any, Job]) -> dict[Any, Any]:
    """The program of each job, a function and its arguments."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(
            zip(jobs, pool.map(lambda job: jax.jit(job[0]).lower(*job[1]).compile(), jobs.values()), strict=True)
        )


def microseconds(jobs: dict[Any, Job]) -> dict[Any, float]:
    """Microseconds of one call of each job."""
    programs = compiled({name: (looped(run), given) for name, (run, given) in jobs.items()})
    return {
        name: round(timed(partial(programs[name], *given), jax.block_until_ready, 3) / CALLS * 1e6, 2)
        for name, (_, given) in jobs.items()
    }


def parts() -> Iterator[dict[str, Any]]:
    """Yields a row a product and number of slots, then one a number of slots for attention and for the head."""
    jobs: dict[Any, Job] = {}
    for (name, (inputs, widths)), slots in itertools.product(WEIGHTS.items(), SLOTS[::2]):
        x, weights = normal(1, slots, inputs), [normal(2, inputs, n, scale=inputs**-0.5) for n in widths]
        jobs[name, slots, "default"] = lambda x, w: [jnp.dot(x, y) for y in w], (x, weights)
        chosen = hopper.tiles_of(slots, widths[0], sum(widths[1:]))
        jobs[name, slots, "chosen"] = partial(_products, tiles=chosen), (x, weights)
        for count, cluster in itertools.product((1, 2), (1, 2) if slots >= hopper.TOGETHER else (1,)):
            tiles = replace(chosen, warpgroups=count, cluster=cluster)
            jobs[name, slots, f"{tiles.height} rows x {cluster}"] = partial(_products, tiles=tiles), (x, weights)
    found = microseconds(jobs)
    bits = compiled({key: job for key, job in jobs.items() if key[2] != "default"})
    for name, slots in dict.fromkeys(key[:2] for key in jobs):
        given = jobs[name, slots, "chosen"][1]
        outs = [run(*given) for key, run in bits.items() if key[:2] == (name, slots)]
        count = sum(differing(a, b) for out in outs[1:] for a, b in zip(outs[0], out, strict=True))
        tiles = hopper.tiles_of(slots, WEIGHTS[name][1][0], sum(WEIGHTS[name][1][1:]))
        us = {key[2]: time for key, time in found.items() if key[:2] == (name, slots)}
        yield {
            "product": name,
            "slots": slots,
            "us": us,
            "choice": f"{tiles.height} rows x {tiles.cluster}",
            "differing": count,
        }
    yield _norms()
    yield from _others()


def _norms() -> dict[str, Any]:
    """Of how many numbers the bits of a sum and its norm in one pass are not those of two."""
    x, y, scale = normal(8, 1024, SIZE.width), normal(9, 1024, SIZE.width), jnp.linspace(0.5, 2, SIZE.width)
    total = jax.jit(arithmetic.added)(x, y)
    wanted = total, jax.jit(partial(hopper.rms_norm, epsilon=1e-6))(total, scale)
    count = sum(differing(a, b) for a, b in zip(hopper.added_norm(x, y, scale, 1e-6), wanted, strict=True))
    return {"kernel": "sum and norm", "differing": count}


def _products(x: jax.Array, weights: list[jax.Array], *, tiles: hopper.Tiles) -> list[jax.Array]:
    return hopper._joined(x, weights, tiles, False)


def _others() -> Iterator[dict[str, Any]]:
    head, jobs = normal(3, SIZE.vocabulary_size, SIZE.width, scale=SIZE.width**-0.5), {}
    for slots in SLOTS[::2]:
        q, x = normal(4, slots, SIZE.heads, SIZE.head_width), normal(5, slots, SIZE.width)
        cached = [normal(i, 1, slots, LENGTH, SIZE.kv_heads, SIZE.head_width) for i in (6, 7)]
        for backend in ("ordered", "triton"):
            run = partial(decode_attention, backend=backend)
            jobs["attention", slots, backend] = run, (q, *cached, jnp.int32(0), positions(slots))
        plain = partial(jnp.einsum, "sd,vd->sv", preferred_element_type=jnp.float32)
        jobs["head", slots, "ordered"] = lambda x, w: ordered.read(x, w, jnp.ones(len(x))).logits, (x, head)
        jobs["head", slots, "default"] = plain, (x, head)
    found = microseconds(jobs)
    for name, slots in dict.fromkeys(key[:2] for key in jobs):
        yield {
            "kernel": name,
            "slots": slots,
            "us": {key[2]: us for key, us in found.items() if key[:2] == (name, slots)},
        }


def positions(slots: int) -> np.ndarray:
    """Where the slots of a run on GSM8K may stand."""
    return np.random.default_rng(slots).integers(80, 480, slots, dtype=np.int32)


def steps() -> Iterator[dict[str, Any]]:
    """Yields milliseconds of a step of all layers for each number of slots, with the mode and without it."""
    one = Partitioner.create(MeshConfig(), jax.devices()[:1])
    policies = {mode: Policy(SIZE, one, "bfloat16", bitwise=mode) for mode in (True, False)}
    params = served_by(policies[False], policies[False].init(jax.random.key(0)), share=True, gather=False)
    served = decode.Served(params, decode.layers_apart(params, policy=policies[False]))

    def lowered(key: tuple[bool, int]) -> Any:
        mode, slots = key
        cache, seen, _ = decode.shapes(policies[mode], slots, LENGTH)
        more: dict[str, Any] = {"policy": policies[mode], "steps": STEPS, "cut": False}
        return decode.decode.lower(served, cache, seen, standing(slots), **more).compile()

    keys = list(itertools.product((True, False), SLOTS))
    with ThreadPoolExecutor(THREADS) as pool:
        programs = dict(zip(keys, pool.map(lowered, keys), strict=True))
    for slots in SLOTS:
        ms = {}
        for mode in (True, False):
            state = list(decode.empty(policy=policies[mode], slots=slots, length=LENGTH, penalised=False))

            def call(state: list[Any] = state, program: Any = programs[mode, slots], slots: int = slots) -> Any:
                *state[:], chunk = program(served, *state, standing(slots))
                return chunk.tokens

            ms[mode] = timed(call, jax.block_until_ready, 3) / STEPS * 1e3
            state.clear()
        yield {
            "slots": slots,
            "ms": round(ms[True], 4),
            "default": round(ms[False], 4),
            "ratio": round(ms[True] / ms[False], 3),
        }


def standing(slots: int) -> decode.Slots:
    """Slots of which none is done, each at its position."""
    empty = decode.Slots.empty(slots, 4)
    return empty._replace(position=positions(slots), limit=np.full(slots, LENGTH, np.int32), done=np.zeros(slots, bool))
