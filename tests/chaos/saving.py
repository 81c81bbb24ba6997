"""A process that saves one checkpoint after another to the folder it is given, and says so; to be killed."""

import sys
from pathlib import Path

from chaos_checkpoints import host, latest, tree

from jaxrl_llm.train.checkpoint import Checkpointing, Checkpoints


def main() -> None:
    folder = Path(sys.argv[1])
    step = latest(folder) or 0
    print(f"from {step}", flush=True)
    checkpoints = Checkpoints(folder, Checkpointing())
    while True:
        step += 1
        print("saving", step, flush=True)
        checkpoints.save(step, tree(step), host(step))
        checkpoints.wait()
        print("saved", step, flush=True)


if __name__ == "__main__":
    main()
