"""Cost model of an RL step on a fleet of chips: seconds, memory and dollars, from rates measured on one H200.

The time of an update of T tokens on a device is a sum of parts; each is work divided by a rate, which is a share of the chip's peak (RATES):

    products    (3 + r) 2 W L T          W weights of a layer, r the share of a forward pass that rematerialisation repeats
    log-probs   8 T D V                  as kernels/token_stats computes them; scoring takes 2 T D V
    attention   (1 + r' + 2.5) F         F FLOPs of the causal halves forward, r' 1 where the forward pass is repeated
    memory      T L (18 M + 90 D) + copies of kept values + optimizer, over the memory's bandwidth
    exchange    weights gathered, gradients scattered over fsdp, gradients summed over data: bytes over the links; the share
                HIDDEN of them overlaps with computation

Memory bandwidth bounds sampling: a decode step reads the weights and the filled cache. Every table states what is measured and
what is assumed. TPU rows use the H200's shares of their own peaks: they are extrapolated, as is everything beyond four GPUs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.metrics import flops
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.tools.planning.chips import GIB, Chip

HIDDEN = 0.5  # assumed share of exchanges that overlaps with computation
MEASURED_CHIPS = 4


RATES: Mapping[str, float] = flops.RATES


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The configuration of an update, apart from its tokens.

    Attributes:
      sizes: the model.
      remat: what the backward pass recomputes, a name of models/layers.py.
      unrolled: whether all layers are one step of the scan.
      moments: bytes per parameter of both moments together.
      fsdp: number of shards of parameters and state.
      data: number of replicas.
      expert: number of shards of the experts; all other parameters and state are divided by it too, as by `fsdp`.
    """

    sizes: Architecture
    remat: str
    unrolled: bool = False
    moments: int = 8
    fsdp: int = 1
    data: int = 1
    expert: int = 1

    @property
    def shards(self) -> int:
        """The number of devices that hold the parameters once."""
        return self.fsdp * self.expert

    @property
    def experts(self) -> int:
        """The number of weights of all experts of a layer, 0 without experts."""
        size = self.sizes.experts
        return 0 if size is None else 3 * size.count * size.width * self.sizes.width

    @property
    def crowd(self) -> int:
        """The factor of a device's own tokens for which its experts' buffers have room, in the worst case."""
        return self.expert if self.experts else 1

    @property
    def layer(self) -> float:
        """The number of weights of a layer that a token uses, as the mean over layers."""
        return flops.product_weights(self.sizes) / self.sizes.layers

    @property
    def mlp_width(self) -> float:
        """The width of the MLP that a token uses, as the mean over layers."""
        return flops.mlp_width(self.sizes)

    @property
    def weights(self) -> int:
        """The number of parameters: layers with all their experts, embedding, and a head where it is untied."""
        return flops.parameters(self.sizes, resident=True)

    @property
    def repeated(self) -> float:
        """The share of a forward pass's products that the backward pass recomputes."""
        mlp = self.sizes.width * self.mlp_width / self.layer
        whole = 1 - mlp  # the share of all products except the last one's
        return {"none": 0.0, "dots": 0.0, "gate": mlp, "projections": 2 * mlp}.get(self.remat, whole)

    @property
    def kept(self) -> float:
        """The bytes that the forward pass keeps on the device per token and layer."""
        size = self.sizes
        heads, keys = size.heads * size.head_width, size.kv_heads * size.head_width
        attention = 2 * size.width + 2 * heads + 4 * size.heads
        projections = attention + 2 * size.width + 2 * heads + 4 * keys
        known: dict[str, float] = {
            "offload": 0,
            "full": 2 * size.width,
            "attention": attention,
            "projections": projections,
        }
        known["gate"] = projections + 2 * self.mlp_width * self.crowd
        return known.get(self.remat, 18 * size.width + 4 * self.mlp_width)


def update_seconds(chip: Chip, setting: Setting, tokens: int, length: int, times: int = 1) -> dict[str, float]:
    """Returns the seconds by part of one update of `times` micro-batches, each of `tokens` tokens per device in sequences of `length` tokens."""
    size, n = setting.sizes, times * tokens
    causal = 2 * len(flops.attending(size)) * n * length * size.heads * size.head_width  # 4 FLOPs of half of the square
    again = 1.0 if setting.remat in ("full", "offload") else 0.0
    moved = 1.0 * n * size.layers * (18 * setting.mlp_width + 90 * size.width)
    if not setting.unrolled:
        moved += n * size.layers * (4 * setting.kept + 25 * size.width)  # kept values are written and read once more
    casts = 12 if setting.repeated == 0 else 18
    moved += setting.weights / setting.shards * (2 * (4 + setting.moments) + 12) + times * setting.weights * casts
    launches = times * (size.layers * (70 if setting.unrolled else 125) + 200)
    return {
        "products": (3 + setting.repeated) * 2 * setting.layer * size.layers * n / (chip.peak * RATES["products"]),
        "log-probs": 8 * n * size.width * size.vocabulary_size / (chip.peak * RATES["logprob update"]),
        "attention": causal * (1 + again) / (chip.peak * RATES["attention"])
        + 2.5 * causal / (chip.peak * RATES["attention backward"]),
        "memory": moved / (chip.bandwidth * RATES["memory"]),
        "launches": launches * RATES["launch"],
        "exchange": (1 - HIDDEN) * exchange_seconds(chip, setting, times) + token_seconds(chip, setting, n),
    }


def exchange_seconds(chip: Chip, setting: Setting, times: int = 1) -> float:
    """Returns the seconds of an update's exchanges if none overlapped with computation: weights in bfloat16, gradients in float32."""
    kept = sum(setting.sizes.sparse) * setting.experts * (setting.expert > 1)  # gathered over fsdp alone
    gathers = 2 if setting.repeated == 0 else 3
    link = chip.link if setting.shards <= chip.group else chip.network
    sent = (setting.weights - kept) * _others(setting.shards) + kept / setting.expert * _others(setting.fsdp)
    seconds = times * sent * (2 * gathers + 4) / link
    if setting.data > 1:
        across = chip.network if setting.shards * setting.data > chip.group else chip.link
        seconds += 2 * 4 * setting.weights / setting.shards * _others(setting.data) / across
    return seconds


def token_seconds(chip: Chip, setting: Setting, tokens: int) -> float:
    """Returns the seconds of an update's exchanges of `tokens` tokens per device over the shards of the experts, which do not overlap.

    Forward, a device receives each token of the others in bfloat16 and returns a float32 sum; backward does the same, and receives the
    forward's tokens again where they are recomputed. Where there are more devices than experts of a token, only devices with its
    experts receive it.
    """
    if setting.sizes.experts is None or not setting.experts or setting.expert == 1:
        return 0.0
    takers = min(setting.expert - 1, setting.sizes.experts.chosen)
    link = chip.link if setting.expert <= chip.group else chip.network
    again = 2 if setting.repeated else 0
    layers = sum(setting.sizes.sparse)
    return layers * takers * tokens * setting.sizes.width * (2 * (2 + 4) + again) / link


def _others(ways: int) -> float:
    """Returns the share of the other devices, among `ways` devices with equal shares."""
    return (ways - 1) / ways


def score_seconds(chip: Chip, setting: Setting, tokens: int, length: int) -> float:
    """Returns the seconds to compute log-probs and entropies of `tokens` tokens per device, without gradient."""
    size = setting.sizes
    causal = 2 * len(flops.attending(size)) * tokens * length * size.heads * size.head_width
    moved = tokens * size.layers * (6 * setting.mlp_width + 36 * size.width) + 6 * setting.weights
    return (
        2 * setting.layer * size.layers * tokens / (chip.peak * RATES["products"])
        + 2 * tokens * size.width * size.vocabulary_size / (chip.peak * RATES["logprob"])
        + causal / (chip.peak * RATES["attention"])
        + moved / (chip.bandwidth * RATES["memory"])
        + (1 - HIDDEN) * 2 * setting.weights * (setting.fsdp - 1) / setting.fsdp / chip.link
    )


def sample_seconds(chip: Chip, setting: Setting, sequences: int, prompt: int, response: int, slots: int) -> float:
    """Returns the seconds to sample `sequences` sequences on a device with full slots; each step reads bfloat16 weights and the filled cache, and
    reads and writes the states of layers that hold one."""
    size = setting.sizes
    slots = max(min(slots, sequences), 1)
    entry = 4 * len(flops.attending(size)) * size.kv_heads * size.head_width
    held = (prompt + response / 2) * entry + 2 * flops.state_bytes(size)
    step = (2 * setting.weights + slots * held) / (chip.bandwidth * RATES["decode"])
    return math.ceil(sequences / slots) * response * step


def memory_bytes(setting: Setting, tokens: int) -> float:
    """Returns the peak bytes of a device in an update of micro-batches of `tokens` tokens."""
    size = setting.sizes
    state = setting.weights / setting.shards * (4 + setting.moments + 4)  # parameters, moments, gradients
    working = tokens * (12 * setting.mlp_width * setting.crowd + 8 * size.width) + 2 * size.vocabulary_size * size.width
    kinds = set(zip(size.sparse, size.recurrent))
    largest: float = max(
        flops.layer_weights(size, sparse=sparse, resident=True, recurrent=held) for sparse, held in kinds
    )
    largest -= setting.experts * _others(setting.expert)
    gathered = 0 if setting.shards == 1 else 3 * 2 * largest + 4 * size.vocabulary_size * size.width
    return state + tokens * size.layers * setting.kept + working + gathered


def of_row(row: Mapping[str, Any], sizes: Architecture) -> tuple[Setting, int, int]:
    """Returns (setting, tokens per device, length) of a result row of `bench --work=update` or `score`."""
    width = {"float32": 4, "bfloat16": 2}
    moments = width[row["moments_dtype"]] + width[row.get("second_moment_dtype", "float32")]
    devices = row["devices"]
    expert = row.get("expert", 1)
    others = row.get("data", 1) * row["tensor"] * row["context"] * expert
    fsdp = devices // others if row["fsdp"] == -1 else row["fsdp"]
    unrolled = row["unroll"] >= sizes.layers
    setting = Setting(sizes=sizes, remat=row["remat"], unrolled=unrolled, moments=moments, fsdp=fsdp, expert=expert)
    return setting, row["rows"] * row["row_tokens"] // devices, row["row_tokens"] // row["segments"]


def fleet(
    chip: Chip, base: Setting, chips: int, step: Mapping[str, int], most: float = 0.92
) -> dict[str, float] | None:
    """Simulates an RL step on `chips` chips that sample and learn in turn; returns None where no layout fits the memory.

    Args:
      chip: the kind of chip.
      base: the setting without its mesh.
      chips: number of chips.
      step: "sequences", mean "prompt" and "response" tokens, "row_tokens", "updates" per step, scoring "forwards" per step, and
        "slots".
      most: largest share of the memory that a program may take.
    """
    tokens = step["sequences"] * (step["prompt"] + step["response"])
    rows = max(math.ceil(tokens / step["row_tokens"]), 1)
    busy = min(chips, rows)  # a row is not split over devices
    fsdp = 1
    while fsdp <= chips:
        setting = replace(base, fsdp=fsdp, data=chips // fsdp)
        at_once = min(math.ceil(rows / step["updates"] / busy), 8)
        while at_once and memory_bytes(setting, at_once * step["row_tokens"]) > most * chip.memory:
            at_once //= 2
        if at_once:
            break
        fsdp *= 2
    else:
        return None
    length, each = step["prompt"] + step["response"], at_once * step["row_tokens"]
    times = math.ceil(rows / step["updates"] / busy / at_once)
    update = step["updates"] * sum(update_seconds(chip, setting, each, length, times).values())
    score = step["forwards"] * score_seconds(chip, setting, math.ceil(rows / busy) * step["row_tokens"], length)
    share = math.ceil(step["sequences"] / chips)
    sample = sample_seconds(chip, setting, share, step["prompt"], step["response"], step["slots"])
    total = sample + score + update
    return {
        "fsdp": fsdp, "data": chips // fsdp, "rows": at_once, "sample": sample, "score": score, "update": update,
        "step": total, "ratio": sample / (score + update), "gib": memory_bytes(setting, each) / GIB,
        "dollars": total * chips * chip.dollars / 3600, "busy": busy / chips,
    }  # fmt: skip
