"""Simulates a publication of weights to vLLM servers: seconds by route, from rates of disks, links and loads.

S bytes of a model, N sampler hosts with c servers of t GPUs each, L learner hosts with G GPUs each:

    write     S / (L G write)                every learner host writes its shards: to its own memory, a shared folder or a store;
              for relays it lists their digests meanwhile, and takes S / (L digest) where that is longer
    direct    max(N c S / source, c S / link, S / (t read))          every server reads the source by itself, and checks what it reads;
              the source is the store, or on the learner's side its links, L link
    relays    max(D / min(source, link, relay, digest, w / wait), K / min(copy, w / wait)) + lag, then S / (t read) from the host's folder;
              D bytes have changed since the version before and pass each link once, the first from the source; the other K = S - D are
              copied and checked within each host. A relay fetches w bytes at a time, and waits `wait` for its turn at each block.
              The next one is behind by what is fetched at a time: lag = (N - 1) (min(D, w) / min(link, relay) + wait), and the
              second host of a store, whose objects are read `ahead` whole, by min(D, ahead) in the place of min(D, w)
    adapters  A / write, then max(N c A / (L link), c A / link)      A bytes of LoRA; nothing is paused
    commit    S / (t load)                   every GPU copies its part, all at once

and `steps` seconds of calls and checks. Of concurrent parts the longest counts (max); the others follow one another.
Rates are measured (docs/measured/publication.md says where) or assumed; `--rates=FILE.json` replaces any of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from jaxrl_llm.metrics import flops
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.sizes import SHAPES

ROUTES = ("store", "learner", "relays, store", "relays, learner", "adapters")
MODELS = {"qwen3-8b": 1, "qwen3-32b": 2, "llama3-70b": 8, "qwen3-30b-a3b": 2}  # {model: GPUs of a server}
HOSTS = (1, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates and sizes from which a publication's seconds follow.

    Attributes:
      write: bytes/s that a learner's GPU writes from its memory.
      store: bytes/s of a store to all of its readers together.
      link: bytes/s of a host's network, each way.
      relay: bytes/s that a relay's process receives and passes on.
      read: bytes/s that a rank of a server stages from its host's memory.
      load: bytes/s that a GPU loads in a commit.
      steps: seconds of the calls of an update, and of its canary.
      digest: bytes/s of the digests that a host computes.
      copy: bytes/s of unchanged blocks that a relay's host reads, checks and writes.
      wait: seconds for which a relay waits for its turn at each block.
      window: bytes that a relay fetches at a time.
      ahead: bytes that the first relay reads of a store at a time.
      learners: number of the learner's hosts.
      learner_gpus: number of GPUs of a learner host.
      gpus: number of GPUs of a sampler host.
      rank: rank of LoRA adapters on all matrices.
    """

    write: float = 6.5e9
    store: float = 10e9
    link: float = 12.5e9
    relay: float = 0.9e9
    read: float = 5.4e9
    load: float = 20e9
    steps: float = 0.05
    digest: float = 3.6e9
    copy: float = 1.7e9
    wait: float = 0.0
    window: float = 8 * 2**22
    ahead: float = 2**29
    learners: int = 1
    learner_gpus: int = 8
    gpus: int = 8
    rank: int = 16

    def __post_init__(self) -> None:
        if wrong := {
            name: value
            for name, value in asdict(self).items()
            if value < 0 or (value == 0 and name not in ("steps", "wait"))
        }:
            raise ValueError(f"rates must be above 0 (got {wrong})")

    @staticmethod
    def read_from(file: str) -> "Rates":
        """Reads some of the rates from a JSON file; the others keep their defaults.

        Raises:
          ValueError: the file holds other names, or values that are not numbers.
        """
        given = json.loads(Path(file).read_text(encoding="utf-8"))
        known = {one.name for one in fields(Rates)}
        if not isinstance(given, dict) or given.keys() - known:
            raise ValueError(f"{file} must hold some of {sorted(known)} (got {given})")
        if wrong := {name: value for name, value in given.items() if not isinstance(value, int | float)}:
            raise ValueError(f"{file}: rates are numbers (got {wrong})")
        return replace(Rates(), **given)


def seconds(
    nbytes: float, hosts: int, servers: int, route: str, rates: Rates, *, adapter: float = 0.0, changed: float = 1.0
) -> dict[str, float]:
    """Returns the seconds by part of one publication.

    Args:
      nbytes: bytes of the weights.
      hosts: number of sampler hosts.
      servers: number of servers of a host.
      route: one of ROUTES.
      rates: measured or assumed rates.
      adapter: bytes of the adapters, for their route.
      changed: share of the bytes that the version before does not have, for relays.
    """
    if route not in ROUTES:
        raise ValueError(f"a route is one of {', '.join(ROUTES)} (got {route!r})")
    if route == "adapters":
        spread = max(hosts * servers * adapter / (rates.learners * rates.link), servers * adapter / rates.link)
        return {"write": adapter / rates.write, "spread": spread, "stage": 0.0, "commit": 0.0, "steps": rates.steps}
    source = rates.store if route.endswith("store") else rates.learners * rates.link
    rank = nbytes * servers / rates.gpus  # bytes of one GPU of a server
    found = {"write": nbytes / (rates.learners * rates.learner_gpus * rates.write), "stage": 0.0}
    if route.startswith("relays"):
        listed, spread = nbytes / (rates.learners * rates.digest), relayed(nbytes, hosts, route, rates, changed)
        found |= {"write": max(found["write"], listed), "spread": spread, "stage": rank / rates.read}
    else:
        found["spread"] = max(hosts * servers * nbytes / source, servers * nbytes / rates.link, rank / rates.read)
    return found | {"commit": rank / rates.load, "steps": rates.steps}


def relayed(nbytes: float, hosts: int, route: str, rates: Rates, changed: float) -> float:
    """Returns the seconds until the last of the hosts has a version from the relay before it."""
    source = rates.store if route.endswith("store") else rates.learners * rates.link
    turns = rates.window / rates.wait if rates.wait else float("inf")
    fetched, hop = nbytes * changed, min(rates.link, rates.relay)
    found = max(fetched / min(source, hop, rates.digest, turns), (nbytes - fetched) / min(rates.copy, turns))
    firsts = [rates.ahead if route.endswith("store") else rates.window, *[rates.window] * (hosts - 2)]
    return found + sum(min(fetched, first) / hop + rates.wait for first in firsts[: hosts - 1])


def lora_bytes(sizes: Architecture, rank: int) -> float:
    """Returns the bytes of adapters on the matrices of attention and MLP of every layer, of all experts, in bfloat16."""
    width, heads = sizes.width, sizes.heads * sizes.head_width
    keys = sizes.kv_heads * sizes.head_width
    layer = 2 * (width + heads) + 2 * (width + keys)
    experts = sizes.experts
    layer += 3 * (width + sizes.mlp_width) if experts is None else 3 * experts.count * (width + experts.width)
    return 2.0 * rank * sizes.layers * layer


def table(models: Mapping[str, int], hosts: Sequence[int], rates: Rates, changed: float = 1.0) -> Iterator[str]:
    """Yields a line for each model and number of hosts: seconds by route.

    Args:
      models: {name of models.sizes.SHAPES: GPUs of a server}.
      hosts: numbers of sampler hosts.
      rates: measured or assumed rates.
      changed: share of the bytes that have changed since the version before.
    """
    yield "rates          " + ", ".join(f"{name} {value:g}" for name, value in asdict(rates).items())
    yield f"changed        {changed:g} of the bytes since the version before"
    yield f"{'model':<15}{'GB':>7} {'hosts':>5} {'servers':>7}" + "".join(f"{route:>17}" for route in ROUTES)
    for name, parallel in models.items():
        sizes = SHAPES[name]
        nbytes, servers = 2.0 * flops.parameters(sizes, resident=True), max(rates.gpus // parallel, 1)
        for count in hosts:
            adapter = lora_bytes(sizes, rates.rank)
            parts = [seconds(nbytes, count, servers, r, rates, adapter=adapter, changed=changed) for r in ROUTES]
            found = [sum(one.values()) for one in parts]
            yield f"{name:<15}{nbytes / 1e9:>7.1f} {count:>5} {count * servers:>7}" + "".join(
                f"{x:>17.3g}" for x in found
            )
