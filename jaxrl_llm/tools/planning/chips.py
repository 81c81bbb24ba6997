"""The chips and devices of plans, by name: figures of their data sheets, and their memory."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of chip, with the figures of its data sheet.

    Attributes:
      peak: dense bfloat16 FLOP/s.
      memory: bytes of memory.
      bandwidth: bytes/s of the memory.
      link: bytes/s that a chip receives in a gather within a group.
      group: number of chips that fast links connect.
      network: bytes/s per chip between groups.
      dollars: assumed price per hour in dollars.
    """

    peak: float
    memory: float
    bandwidth: float
    link: float
    group: int
    network: float
    dollars: float


CHIPS: Mapping[str, Chip] = {
    # link: all-gathers of 0.5 GB by JAX on one host; network: 400 Gb/s per GPU.
    "h200": Chip(peak=989e12, memory=139.8 * GIB, bandwidth=4.8e12, link=138e9, group=8, network=50e9, dollars=10.0),
    # Half of the interconnect's two directions; 200 Gb/s and 4 x 200 Gb/s of a host's chips.
    "v5p": Chip(peak=459e12, memory=95e9, bandwidth=2.765e12, link=300e9, group=8960, network=6e9, dollars=4.2),
    "v6e": Chip(peak=918e12, memory=32e9, bandwidth=1.64e12, link=224e9, group=256, network=12e9, dollars=2.7),
}


@dataclass(frozen=True)
class Device:
    """A device to which settings are fitted.

    Attributes:
      name: its name in messages.
      bytes: bytes of its memory.
    """

    name: str
    bytes: float


# Memory as the drivers report it, in GiB.
DEVICES = {
    name: Device(name, gib * GIB)
    for name, gib in {
        "t4": 15.0, "l4": 22.5, "rtx3090": 24.0, "rtx4090": 24.0, "rtx5090": 31.8, "a10g": 22.5, "l40s": 45.0, "a100-40": 39.5,
        "a100-80": 79.2, "h100": 79.6, "h200": 139.8, "b200": 178.0, "v5e": 15.75, "v5p": 95.0, "v6e": 31.25,
    }.items()
}  # fmt: skip
