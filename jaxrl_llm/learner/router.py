"""Trains the routers of a policy with experts: replayed choices, the loss that balances the experts' loads, and metrics.

The loss of N routed tokens in L layers of E experts is (https://arxiv.org/abs/2101.03961, pooled as transformers does it)

    pooled      E sum_e f_e P_e,    f_e = (1 / L N) sum_l #{tokens of l at e},   P_e = (1 / L N) sum_l sum_t p_lte
    per_layer   the mean over layers of the same with the layer's own f and P

which is the number of chosen experts where all loads are equal. f is counted over the whole minibatch, before its gradient, so that a
micro-batch adds a sum that is linear in p, and any split into micro-batches gives the same update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm import components
from jaxrl_llm.models.architecture import stack_of
from jaxrl_llm.models.experts import Report

Array = jax.Array


@dataclass(frozen=True, kw_only=True)
class Router:
    """The training of a policy's routers; a policy without experts ignores it.

    Attributes:
      replay: "off" routes each token by the present weights; "R2" by the experts that it had when its old log-probs were scored;
        "R3" by those that the sampler recorded, in scoring and in updates (https://arxiv.org/abs/2510.11370). The weights of the
        chosen experts are computed anew in any case. Tokens without a record are routed by the present weights.
      balance: weight of the loss that balances the experts' loads; above 0, each update counts the loads by a forward pass of its own.
      balance_over: "pooled" takes all layers together, "per_layer" each of them.
      bias_rate: the amount by which an update moves the bias of each expert (architecture.Experts.choice_bias): up where the expert took fewer tokens
        than the mean of its layer in the minibatch, down where more (https://arxiv.org/abs/2408.15664, where it is 0.001). Nothing is added to
        the loss.
    """

    replay: Literal["off", "R2", "R3"] = "off"
    balance: float = 0.0
    balance_over: Literal["pooled", "per_layer"] = "pooled"
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        components.choices(self)
        components.at_least(self, 0, "balance", "bias_rate")


def balance(mass: Array, loads: Array, tokens: Array, over: str) -> Array:
    """Returns a micro-batch's share of the balancing loss.

    Args:
      mass: float32 [L, E] sums of the probabilities of the micro-batch.
      loads: [L, E] tokens of the whole minibatch at each expert.
      tokens: number of routed tokens of the whole minibatch.
      over: "pooled" or "per_layer".
    """
    layers, experts = mass.shape
    share = jax.lax.stop_gradient(loads.astype(jnp.float32))
    if over == "pooled":
        return experts * jnp.sum(share.sum(0) * mass.sum(0)) / jnp.square(layers * tokens)
    return experts * jnp.sum(share * mass) / (layers * jnp.square(tokens))


BIAS = "choice_bias"


def biases(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the biases of a policy's experts, {stack: float32 [L, E]}, from its parameters, or from a tree like them."""
    found = {part: tree["mlp"] for part, tree in params.items() if isinstance(tree, Mapping) and "mlp" in tree}
    return {part: mlp[BIAS] for part, mlp in found.items() if BIAS in mlp}


def with_biases(params: Mapping[str, Any], new: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the parameters with other biases, and the same arrays otherwise."""
    changed = {part: {**params[part], "mlp": {**params[part]["mlp"], BIAS: bias}} for part, bias in new.items()}
    return {**params, **changed}


def moved(old: Mapping[str, Array], counts: Array, rate: float, learns: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the biases after an update.

    Args:
      old: {stack: float32 [L, E]} of the stacks of layers with experts.
      counts: int [layers, E] tokens that each expert took in the minibatch, in the layers with experts that were run; later layers' biases stay.
      rate: the amount by which a bias moves.
      learns: {stack: bool [] or [L]} whether a layer's bias moves at all.
    """
    number = sum(len(bias) for bias in old.values())
    taken = jnp.pad(counts, ((0, number - len(counts)), (0, 0)))
    # In integers, a load that equals the mean has the sign 0.
    direction = jnp.sign(taken.sum(axis=1, keepdims=True) - taken.shape[1] * taken).astype(jnp.float32)
    found = {}
    for place, stack in enumerate(sorted(old, key=lambda part: stack_of(part) or 0)):
        mine = rate * direction[place :: len(old)]
        found[stack] = old[stack] + jnp.where(jnp.reshape(learns[stack], (-1, 1)), mine, 0.0)
    return found


def sums(report: Report) -> dict[str, Array]:
    """Returns a report's sums over tokens, by name, of each layer, which add up over a minibatch."""
    kept = ("counts", "tokens", "entropy", "top", "recorded", "differs", "overlap")
    return {name: getattr(report, name) for name in kept}


def metrics(total: dict[str, Any], compared: bool) -> dict[str, Array]:
    """Returns metrics of a minibatch from its sums: means over layers, and the worst layer of the loads.

    `compared` says whether there are recorded choices to compare with.
    """
    counts = total["counts"].astype(jnp.float32)
    experts, routed = counts.shape[1], jnp.maximum(total["tokens"].astype(jnp.float32), 1.0)
    load = counts / jnp.maximum(counts.sum(1, keepdims=True), 1.0)
    logs = jnp.where(load > 0, jnp.log(jnp.where(load > 0, load, 1.0)), 0.0)
    highest, lowest = experts * load.max(1) - 1, experts * load.min(1) - 1
    found = {
        "router/load_max": highest.mean(), "router/load_max_worst": highest.max(),
        "router/load_min": lowest.mean(), "router/load_min_worst": lowest.min(),
        "router/unused": (counts == 0).mean(), "router/unused_worst": (counts == 0).mean(1).max(),
        "router/entropy": (total["entropy"] / routed).mean(),
        "router/load_entropy": -(load * logs).sum(1).mean(),
        "router/weight_top1": (total["top"] / routed).mean(),
    }  # fmt: skip
    if compared:
        recorded = jnp.maximum(total["recorded"].astype(jnp.float32), 1.0)
        differs = total["differs"].astype(jnp.float32) / recorded
        found |= {
            "router/differs": differs.mean(), "router/differs_worst": differs.max(),
            "router/overlap": (total["overlap"] / recorded).mean(),
            "router/recorded": (total["recorded"].astype(jnp.float32) / routed).mean(),
        }  # fmt: skip
    return found
