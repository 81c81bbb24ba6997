"""The embedded sampler as a component."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm import components
from jaxrl_llm.kernels import dispatch
from jaxrl_llm.kernels.decode_attention import triton
from jaxrl_llm.kernels.decode_attention.api import NARROW
from jaxrl_llm.models.lora import AdaptedPolicy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.samplers.embedded import own_devices
from jaxrl_llm.samplers.embedded.engine import Engine
from jaxrl_llm.samplers.embedded.shelf import Shelf
from jaxrl_llm.samplers.embedded.weights import served


def pages_allowed(policy: Policy, page: int) -> str | None:
    """Returns what EmbeddedSampler.page must be, where pages of so many entries cannot be read; else None."""
    platform = dispatch.device().platform
    if policy.bitwise:
        return "0 in the bitwise mode, whose kernels read whole slots"
    if platform == "tpu":
        return "0 on TPUs, whose kernel reads whole slots"
    if platform == "gpu" and page % triton.BLOCK:
        return f"a multiple of {triton.BLOCK} on GPUs, whose kernel reads so many entries at a time"
    return None


@dataclass(frozen=True, kw_only=True)
class EmbeddedSampler:
    """The sampler on the learner's devices, or on some of its own: a batch of slots that is refilled as sequences end; each prompt is prefilled once for all
    its samples.

    Shapes come in powers of two, so a run compiles few programs. The cache exists only while something is sampled, or a conversation
    may continue in it.

    Attributes:
      slots: most sequences decoded at a time; a smaller request takes the smallest power of two that holds it. Where the cache of so
        many does not fit on a device, there are as many as fit, which is logged.
      decode_chunk: decode steps of a chunk, after which the host refills slots and searches for stop strings.
      prefill_tokens: most tokens of the prompts that are prefilled together, padding included; a single prompt may be longer.
      share_weights: True serves the learner's own arrays where they have the decode dtype and layout; this is right where nothing
        samples between the start of an update, which donates them, and the next publication. False copies them.
      gather_weights: True keeps the weights whole over the fsdp axis while sampling: no step gathers them, at the cost of a copy's
        memory.
      cache: dtype of cached keys and values; None is the policy's compute dtype. "float8_e4m3fn" takes half the memory and bandwidth of
        bfloat16, without scales: values beyond 448 become 448. Log-probs of samples are then those with such a cache, and `gap/*`
        measures how far they are from the learner's.
      record_routes: record the experts that each token goes to, for train.Router.replay = "R3" and for `router/differs`.
      keep_turns: keep the keys and values of an environment's or agent's rollout between its turns while no other sequence needs the
        slot, so that a turn prefills only its new tokens. This does not apply where experts are recorded, or layers hold a state in
        place of keys and values.
      shrink: where a batch's last sequences fill no more than 1/shrink of its slots and nothing waits, they move to a cache of that
        many slots, and so on, down to 64 a shard: a step then costs what the remaining slots cost, and each size compiles a program. 0
        keeps all slots to the end.
      adapters: True serves LoRA adapters beside their frozen base, as the learner computes with them: no sum of the two is computed,
        rounded or stored, and a base in the compute dtype is not copied either. Each product of an adapted weight then takes two more
        small ones. False serves the sum.
      loaded: with `adapters`, most further sets of adapters, of the same rank and targets, that `load` serves beside the published one, to
        requests that name them (`SamplingParams.adapter`). One batch mixes them: the two small products of an adapted weight are those of
        1 + loaded times the rank, whether its places are taken or empty. 0 adds nothing.
      weights: dtype of the layers' matrices; None is the policy's compute dtype. "float8_e4m3fn" stores them in 8 bits with a scale for
        each output channel, rounded anew at each publication: half the memory of bfloat16, in addition to the learner's own weights.
        Samples are then those of the rounded policy: `gap/*` measures how far it is from the learner's, and an algorithm's `correction`
        weights tokens by it.
      page: entries of a page of the cache; slots share a pool of pages and take those that they fill, and the samples of a prompt share its
        whole pages. Where the pool is smaller than all slots could fill, the last sequences placed give theirs up when no page is free, and
        are prefilled again later: many slots then have room for few long responses. On NVIDIA GPUs a multiple of 64 that is a power of two,
        and not on TPUs. 0 gives each slot its own room for the longest sequence.
      devices: number of devices of the sampler's own, the last of the process; the learner's mesh has the others. Each publication copies
        the weights to them, and with MAX_STALENESS >= 1 they sample the next steps' batches while the learner computes. For runs of one
        process. 0 samples on the learner's devices.
      tensor: number of `devices` over which a replica of the model is split, as by train.MeshConfig.tensor; the slots are divided over the
        replicas.
    """

    slots: int = 512
    decode_chunk: int = 16
    prefill_tokens: int = 8192
    share_weights: bool = True
    gather_weights: bool = False
    cache: str | None = None
    record_routes: bool = False
    keep_turns: bool = True
    shrink: int = 0
    adapters: bool = False
    loaded: int = 0
    weights: str | None = None
    page: int = 0
    devices: int = 0
    tensor: int = 1

    def __post_init__(self) -> None:
        components.one_of(self, (None, *NARROW), "cache")
        components.one_of(self, (None, *NARROW), "weights")
        if self.weights is not None and self.adapters:
            components.refuse(
                self,
                "weights",
                "None with embedded.EmbeddedSampler.adapters, beside which the base is the learner's own",
            )
        components.at_least(self, 0, "loaded")
        if self.loaded and not self.adapters:
            components.refuse(
                self, "loaded", "0 without embedded.EmbeddedSampler.adapters, beside which others are loaded"
            )
        components.at_least(self, 0, "page")
        if self.page & (self.page - 1):
            components.refuse(self, "page", "a power of two, or 0")
        components.at_least(self, 1, "slots", "decode_chunk", "prefill_tokens", "tensor")
        components.at_least(self, 0, "devices")
        if self.devices % self.tensor or (self.tensor > 1 and not self.devices):
            components.refuse(
                self, "tensor", f"a divisor of embedded.EmbeddedSampler.devices = {self.devices}, and 1 without such"
            )
        if self.shrink != 0:
            components.at_least(self, 2, "shrink")

    def left(self, devices: Sequence[Any]) -> list[Any]:
        """Returns the devices that are left to the learner's mesh.

        Raises:
          ValueError: none is left, or the sampler is to have devices of its own in a run of several processes.
        """
        return own_devices.left(devices, self.devices)

    def placed(self, policy: Policy, devices: Sequence[Any] | None = None) -> Policy:
        """Returns the policy on the sampler's own devices, of those that its mesh leaves out of `devices` (default: the process's), or itself."""
        return own_devices.placed(policy, self.devices, self.tensor, devices)

    def start(self, policy: Policy, tokenizer: Any, *, max_length: int, run_dir: Path | None = None) -> Engine:
        """Returns the running sampler, without weights until the first `publish`; it writes nothing to `run_dir`.

        With `adapters`, the sampler of a policy with adapters is published `AdaptedPolicy.joined`, else the parameters of `policy.plain`.

        Raises:
          ValueError: where `max_length`, in tokens of a prompt and its response, is not within 2..max_positions, or the policy's
            bitwise mode excludes the dtype of cache or weights, or pages cannot be read there.
        """
        if not 2 <= max_length <= policy.architecture.max_positions:
            raise ValueError(
                f"max_length must be 2..{policy.architecture.max_positions} tokens, the most of the model (got {max_length}): lower PROMPT_LIMIT or RESPONSE_LIMIT, which it adds up"
            )
        learners, policy = policy, self.placed(policy)
        plain = policy.plain
        for name in ("cache", "weights") if policy.bitwise else ():
            if (kind := getattr(self, name)) is not None:
                raise ValueError(
                    f"the bitwise mode keeps weights, keys and values as the learner has them (got embedded.EmbeddedSampler.{name} = {kind!r}): "
                    "leave it None, or set BITWISE = False"
                )
        if self.page and (allowed := pages_allowed(policy, self.page)):
            components.refuse(self, "page", allowed)
        shelf = Shelf(policy=policy, places=self.loaded) if isinstance(policy, AdaptedPolicy) else Shelf()
        return Engine(
            policy=plain, adapted=self.adapters and policy is not plain, shelf=shelf, serve=partial(served, plain, share=self.share_weights, gather=self.gather_weights, weights=self.weights), tokenizer=tokenizer, max_length=max_length, slots=self.slots,
            decode_chunk=self.decode_chunk, prefill_tokens=self.prefill_tokens, cache=self.cache,
            record=self.record_routes and policy.architecture.experts is not None, keep=self.keep_turns,
            shrink=self.shrink, page=self.page, overlaps=policy is not learners,
        )  # fmt: skip
