"""Entropy flow: how the entropy of the next token changes through a model's layers, and the layer at which BuPO should begin.

    H(x) = entropy of softmax(x E^T);   dH_ffn = H(F) - H(norm M),  dH_attn = H(A) - H(norm X),  dH_layer = H(X') - H(X)

X and X' are the residual stream before and after a layer, A and F what its attention and its feed-forward net add, M = X + A.
Means are over the positions that predict the tokens of the model's own answers, in nats. The proposed layer is the last one of
the initial run of layers whose dH_ffn is positive: there exploration ends (https://arxiv.org/abs/2512.19673, section 3).
The fused kernel computes the entropies, so no logits are kept for any vocabulary.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import components
from jaxrl_llm.data.pipeline import Encoder
from jaxrl_llm.data.tokenizer import with_stop_ids
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner, to_host
from jaxrl_llm.eval import entropy_figures
from jaxrl_llm.eval.evaluate import SEED
from jaxrl_llm.experience import Rollout, SamplingParams, seed_of
from jaxrl_llm.kernels.token_stats.api import token_stats
from jaxrl_llm.metrics import run_folder
from jaxrl_llm.models.sources import ModelSource, Opened
from jaxrl_llm.protocols import Dataset, SamplerFactory
from jaxrl_llm.rollouts.collect import RolloutGenerator

RESULT = "entropy_flow.json"
MODULES = {
    "attn": ("attn_in_normed", "attn_out"),
    "ffn": ("mlp_in_normed", "mlp_out"),
    "layer": ("layer_in", "layer_out"),
}


@dataclass(frozen=True, kw_only=True)
class EntropyFlow:
    """Measures the entropy flow of a model; a gin file builds it, and `run` executes it.

    Attributes:
      out_dir: folder of entropy_flow.json and of the figures.
      model: the model.
      sampler: sampler of its answers.
      data: prompts.
      limit: number of prompts.
      settings: sampling params of the answers.
      mesh: sizes of the mesh axes.
      rows: number of answers in one forward pass.
      max_prompt_tokens: most tokens of a prompt; longer prompts lose their beginning.
      tolerance: changes of entropy up to this count as zero, in nats.
      high_entropy: entropy above which tokens are listed, in nats.
    """

    out_dir: str
    model: ModelSource
    sampler: SamplerFactory
    data: Dataset
    limit: int = 10
    settings: SamplingParams = field(default_factory=SamplingParams)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    rows: int = 1
    max_prompt_tokens: int = 1024
    tolerance: float = 0.01
    high_entropy: float = 2.0

    def __post_init__(self) -> None:
        components.at_least(self, 1, "limit", "rows")

    def run(self, config: str = "") -> None:
        """Samples answers, measures the entropies, writes the results and prints the proposed layer."""
        folder = run_folder.writable(Path(self.out_dir), "OUT_DIR")
        partitioner = Partitioner.create(self.mesh)
        model = self.model.open(partitioner)
        params = model.params()
        rollouts = asyncio.run(self.answers(model, params, folder))
        measured = measure(model.policy, params, rollouts, self.rows)
        result = self.result(model, rollouts, measured)
        (folder / "config.gin").write_text(config)
        (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
        drawn = entropy_figures.draw(result, folder)
        print(f"{folder / RESULT}: proposed BUPO_LAYER = {result['proposed_layer']}", flush=True)
        if not drawn:
            print("no figures: pip install 'jaxrl-llm[plot]'", flush=True)

    async def answers(self, model: Opened, params: Any, folder: Path) -> list[Rollout]:
        """Returns one answer to each prompt; empty answers are left out.

        Raises:
          ValueError: no answer has a token.
        """
        encoder = Encoder(tokenizer=model.tokenizer, max_prompt_tokens=self.max_prompt_tokens, truncation="left")
        prompts = encoder.prompts(list(self.data.rows())[: self.limit])
        settings = with_stop_ids(self.settings, model.tokenizer)
        length = self.max_prompt_tokens + settings.max_tokens
        sampler = self.sampler.start(model.policy.plain, model.tokenizer, max_length=length, run_dir=folder)
        try:
            await sampler.publish(params, 0)
            generator = RolloutGenerator(sampler=sampler, tokenizer=model.tokenizer)
            seeds = [seed_of(SEED, i) for i in range(len(prompts))]
            found = {i: group[0] async for i, group in generator.groups(prompts, 1, settings, seeds)}
        finally:
            await sampler.close()
        rollouts = [found[i] for i in sorted(found) if len(found[i].tokens)]
        if not rollouts:
            raise ValueError("no answer has a token: give a model that answers, or other prompts")
        return rollouts

    def result(self, model: Opened, rollouts: Sequence[Rollout], measured: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of entropy_flow.json: statistics of the tokens, of the modules and of each layer."""
        entropy = measured["entropy"]
        tokens = [(i, t) for i, r in enumerate(rollouts) for t in range(len(r.tokens))]
        high = np.flatnonzero(entropy > self.high_entropy)
        top = sorted(high.tolist(), key=lambda n: -entropy[n])[:20]

        def example(n: int) -> dict[str, Any]:
            i, t = tokens[n]
            token = int(rollouts[i].tokens[t])
            text = model.tokenizer.decode([token])
            return {
                "prompt": rollouts[i].prompt.id,
                "position": t,
                "token": token,
                "text": text,
                "entropy": float(entropy[n]),
            }

        sites = measured["sites"]
        flow = {
            name: {"in": sites[a], "out": sites[b], "change": sites[b] - sites[a]} for name, (a, b) in MODULES.items()
        }
        return {
            "model": model.name,
            "proposed_layer": proposed(flow["ffn"]["change"], self.tolerance),
            "entropy_statistics": {**_spread(entropy), "total_tokens": len(entropy)},
            "high_entropy_tokens_count": len(high),
            "high_entropy_examples": [example(n) for n in top],
            "internal_module_entropy": {
                "total_modules_analyzed": 2 * len(flow["ffn"]["change"]),
                **{f"{name}_statistics": _module(flow[name]) for name in ("ffn", "attn")},
            },
            "layers": {name: {side: x.tolist() for side, x in sides.items()} for name, sides in flow.items()},
            "write_direction": {name: x.tolist() for name, x in measured["cosines"].items()},
        }  # fmt: skip


def proposed(change: np.ndarray, tolerance: float) -> int | None:
    """Returns the last layer of the initial run of layers whose change is above the tolerance; None where there is none.

    The model's last layer is never proposed.
    """
    count = int(np.argmin(np.append(change > tolerance, False)))
    return None if count == 0 else min(count, len(change) - 1) - 1


def measure(policy: Any, params: Any, rollouts: Sequence[Rollout], rows: int) -> dict[str, Any]:
    """Measures the mean entropy at each site of each layer, the entropy at every answer token, and the modules' write directions.

    Returns:
      {"sites": {site: [L]}, "entropy": [tokens], "cosines": {"attn", "ffn": [L]}}, float64 on the host.
    """
    width = max(len(r.prompt.prefix) + len(r.tokens) for r in rollouts)
    forward = jax.jit(lambda params, *row: _forward(policy, params, *row))
    totals: Any = None
    entropy = []
    for start in range(0, len(rollouts), rows):
        arrays = _padded(rollouts[start : start + rows], rows, width)
        sums, own = forward(params, *arrays)
        sums = jax.tree.map(lambda x: np.asarray(to_host(x), np.float64), sums)
        totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        entropy.append(np.asarray(to_host(own))[arrays[3] >= 0])
    count = sum(len(r.tokens) for r in rollouts)
    means = jax.tree.map(lambda x: x / count, totals)
    return {"sites": means["sites"], "cosines": means["cosines"], "entropy": np.concatenate(entropy).astype(np.float64)}


def _padded(rollouts: Sequence[Rollout], rows: int, width: int) -> tuple[np.ndarray, ...]:
    """Returns tokens, positions, segments and targets [rows, width]; targets are the answers' tokens and -1 elsewhere."""
    tokens, targets = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
    segments = np.zeros((rows, width), np.int32)
    for row, rollout in enumerate(rollouts):
        prefix, answer = rollout.prompt.prefix, rollout.tokens
        end = len(prefix) + len(answer)
        tokens[row, :end] = np.concatenate([prefix, answer])
        segments[row, :end] = 1
        targets[row, len(prefix) - 1 : end - 1] = answer
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    return tokens, positions, segments, targets


def _forward(policy: Any, params: Any, tokens: Any, positions: Any, segments: Any, targets: Any) -> Any:
    """Computes sums over answer tokens at each layer's sites, and the entropy at every token."""
    head, flat = policy.head(params), targets.reshape(-1)
    kept = targets >= 0

    def entropy(x: jax.Array) -> jax.Array:
        return token_stats(x.reshape(-1, x.shape[-1]), head, flat, outputs=("entropy",))["entropy"]

    def cosine(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
        return jnp.sum(jnp.where(kept, jnp.sum(x * y, axis=-1) / jnp.maximum(norms, 1e-30), 0.0))

    def of_layer(states: dict[str, jax.Array]) -> Any:
        middle = states["layer_in"] + states["attn_out"]
        return {
            "sites": {site: jnp.sum(entropy(x)) for site, x in states.items()},
            "cosines": {"attn": cosine(states["attn_out"], states["layer_in"]), "ffn": cosine(states["mlp_out"], middle)},
        }  # fmt: skip

    places = (tokens, positions, segments)
    return policy.measured(params, *places, of_layer), entropy(policy.hidden(params, *places)).reshape(targets.shape)


def _spread(x: np.ndarray) -> dict[str, float]:
    return {name: float(getattr(np, name)(x)) for name in ("mean", "std", "min", "max", "median")}


def _module(flow: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {
        "count": len(flow["change"]),
        "mean_input_entropy": float(flow["in"].mean()),
        "mean_output_entropy": float(flow["out"].mean()),
        "mean_entropy_change": float(flow["change"].mean()),
        "std_entropy_change": float(flow["change"].std()),
    }
