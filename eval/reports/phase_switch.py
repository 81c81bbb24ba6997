"""Checks which parts BuPO's first phase changed in a run: `python -m jaxrl_llm.eval.reports.phase_switch RUN --before 54 --after 62`.

The command reads the checkpoints of the step before the phase and of its last step, and prints as JSON which parts of the policy
differ in any bit, which have moments other than 0, and the optimizer's step counts at the switch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm import command_line
from jaxrl_llm.models.architecture import LAYERS


def read(run_dir: Path, step: int) -> dict[str, Any]:
    """Returns {"params", "count", "mu", "nu"} of the policy in the checkpoint of a step, as NumPy arrays.

    Raises:
      FileNotFoundError: the run kept no checkpoint of that step.
    """
    path = (run_dir / "checkpoints" / str(step) / "state").absolute()
    if not path.is_dir():
        raise FileNotFoundError(
            f"no checkpoint of step {step} in {run_dir}: set SAVE_EVERY and Checkpointing.keep so that it is kept"
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(path)
    adam = next(node for node in _dictionaries(tree["moments"]["policy"]) if {"count", "mu", "nu"} <= set(node))
    found = {"params": tree["params"]["policy"], **{name: adam[name] for name in ("count", "mu", "nu")}}
    return jax.tree.map(np.asarray, found)


def _dictionaries(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every dictionary of a tree of lists and dictionaries, from the top down."""
    if isinstance(tree, Mapping):
        yield tree
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    for child in children:
        yield from _dictionaries(child)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {part: whether any bit differs}; for the stacked layers, a list of them by layer."""
    found: dict[str, Any] = {}
    for part in before:
        pairs = list(zip(jax.tree.leaves(before[part]), jax.tree.leaves(after[part]), strict=True))
        if part == LAYERS:
            found[part] = [any(a[i].tobytes() != b[i].tobytes() for a, b in pairs) for i in range(len(pairs[0][0]))]
        else:
            found[part] = any(a.tobytes() != b.tobytes() for a, b in pairs)
    return found


def report(run_dir: Path, before: int, after: int) -> dict[str, Any]:
    """Returns the content of the printed JSON."""
    first, last = read(run_dir, before), read(run_dir, after)
    nothing = jax.tree.map(np.zeros_like, last["mu"])
    return {
        "changed": changed(first["params"], last["params"]),
        "moments": changed(nothing, last["mu"]),
        "counts": {part: np.asarray(count).tolist() for part, count in last["count"].items()},
    }


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("eval.reports.phase_switch", __doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--before", type=int, required=True, help="step whose checkpoint the phase began from")
    parser.add_argument("--after", type=int, required=True, help="last step of the phase")
    parser.add_argument("--out", type=Path, help="file that the JSON is written to as well")
    given = parser.parse_args(argv)
    text = json.dumps(report(given.run, given.before, given.after), indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
