"""Measures how long the rollouts of a step take from process 0 to the others of a run, on this machine's loopback.

    PYTHONPATH=.:tests JAX_PLATFORMS=cpu python tests/measure_hosts.py [--processes 8] [--sequences 2048] [--tokens 65536]

Each process takes part in one broadcast of `sequences` samples with `tokens` token ids (int32) and log-probs (float32) each, and says whether
what arrived is what was sent, the seconds, the largest part that travelled at a time, and its own peak memory. Prints a JSON line a process.
"""

import argparse
import sys

import several_hosts

SCRIPT = """
import json, os, resource, sys, time, numpy as np
from jax.experimental import multihost_utils
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.distributed.rendezvous import coordinator_arguments, joined
sequences, tokens = map(int, sys.argv[1:])
sent, largest = multihost_utils.broadcast_one_to_all, [0]
def counted(part, **more):
    largest[0] = max(largest[0], part.nbytes)
    return sent(part, **more)
multihost_utils.broadcast_one_to_all = counted
def samples(number):
    rng = np.random.default_rng(number)
    return {"tokens": rng.integers(0, 151936, tokens, dtype=np.int32), "logprobs": rng.random(tokens, dtype=np.float32)}
with joined(Hosts(wait_s=600, lost_s=120), coordinator_arguments(os.environ, False)) as processes:
    own = [samples(i) for i in range(sequences)] if processes.main else None
    processes.meet("the samples are made")
    began = time.perf_counter()
    found = processes.broadcast(own)
    seconds = time.perf_counter() - began
    same = all((found[i][name] == x).all() for i in range(0, sequences, 97) for name, x in samples(i).items())
    processes.meet("the samples are looked at")
    size = sum(x.nbytes for one in found for x in one.values())
    print(json.dumps({"process": processes.index, "same": bool(same), "gb": size / 1e9, "seconds": round(seconds, 2), "part_mb": largest[0] / 1e6,
                      "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}), file=sys.stderr, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=65536)
    given = parser.parse_args()
    words = [sys.executable, "-c", SCRIPT, str(given.sequences), str(given.tokens)]
    processes = several_hosts.start(words, given.processes, 1)
    for status, text in several_hosts.ended(processes, 900):
        lines = [line for line in text.splitlines() if line.startswith("{")]
        print("\n".join(lines) or f"exit status {status}: {text[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
