"""Devices of an embedded sampler's own: the last ones of the process, which the learner's mesh leaves out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.distributed.padding import cut
from jaxrl_llm.distributed.scatter import in_lines
from jaxrl_llm.models.linear import Adapted
from jaxrl_llm.models.policy import Params, Policy, adapter_shapes


def left(devices: Sequence[Any], own: int) -> list[Any]:
    """Returns the devices that are the learner's where the last `own` ones are the sampler's.

    Raises:
      ValueError: none is left, or they are devices of several processes.
    """
    lined = in_lines(devices)
    if own and (processes := len({device.process_index for device in lined})) > 1:
        raise ValueError(
            f"embedded.EmbeddedSampler.devices is for runs of one process (got {own}, and {processes} processes): set it to 0, or "
            "include gin/samplers/vllm.gin for a sampler apart from the learner"
        )
    if own >= len(lined):
        raise ValueError(
            f"embedded.EmbeddedSampler.devices must leave the learner at least one of the {len(lined)} devices (got {own}): lower it, or set it "
            "to 0, which samples on the learner's devices"
        )
    return lined[: len(lined) - own]


def placed(policy: Policy, own: int, tensor: int, devices: Sequence[Any] | None = None) -> Policy:
    """Returns the policy on `own` of the devices that its mesh leaves out, in replicas of `tensor` devices.

    It is `policy` itself where `own` is 0, or its mesh has all `devices` (default: those of the process), as that of an evaluation alone.
    """
    mesh = set(policy.partitioner.mesh.devices.flat)
    spare = [device for device in in_lines(jax.devices() if devices is None else devices) if device not in mesh]
    if not own or not spare:
        return policy
    config = MeshConfig(data=-1, fsdp=1, tensor=tensor)
    return replace(policy, partitioner=Partitioner.create(config, spare[-own:]))


def unpadded(policy: Policy, params: Params) -> Params:
    """Returns the parameters in their own shapes, without what a mesh of the learner's pads them with."""

    def whole(size: jax.ShapeDtypeStruct, x: Any) -> Any:
        if not isinstance(x, Adapted):
            return cut(x, size.shape)
        a, b = adapter_shapes(size.shape, x.a, x.b)
        return replace(x, weights=cut(x.weights, size.shape), a=cut(x.a, a), b=cut(x.b, b))

    return jax.tree.map(whole, policy.sizes(), params)
