"""Writes the hidden states of a model on real text, for `kernels.bench --arrays`.

    python -m jaxrl_llm.tools.hidden_states FOLDER README.md docs/*/*.md --tokens=8192 --output=states.npz

The text is cut into rows. The file holds what a learner passes to token_stats: `hidden` [T, D] after the final norm, bfloat16
values stored as float32, `head` [V, D], and `targets` [T], the next tokens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.train.load import TrainedModel


def states(folder: Path, text: str, tokens: int, row_tokens: int) -> dict[str, np.ndarray]:
    """Computes hidden states, head and targets of the text's first `tokens` positions, in rows of `row_tokens`.

    Raises:
      ValueError: the text is too short, or the rows do not divide the tokens.
    """
    if tokens < 1 or row_tokens < 1 or tokens % row_tokens:
        raise ValueError(f"--tokens={tokens} must be a multiple of --row_tokens={row_tokens}, both at least 1")
    opened = TrainedModel(path=str(folder), compute_dtype="bfloat16").open(Partitioner.create(MeshConfig()))
    ids = np.asarray(opened.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    if len(ids) <= tokens:
        raise ValueError(
            f"the text has {len(ids)} tokens, and {tokens} with their targets take one more: name more files"
        )
    rows, params = ids[:tokens].reshape(-1, row_tokens), opened.params()
    positions = jnp.broadcast_to(jnp.arange(row_tokens, dtype=jnp.int32), rows.shape)

    def run(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found = opened.policy.hidden(params, jnp.asarray(rows), positions, jnp.ones_like(positions), max_segments=1)
        return found.reshape(tokens, -1).astype(jnp.float32), opened.policy.head(params).astype(jnp.float32)

    hidden, head = jax.device_get(jax.jit(run)(params))
    return {"hidden": hidden, "head": head, "targets": ids[1 : tokens + 1]}


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.hidden_states", __doc__)
    parser.add_argument("folder", type=Path, help="Hugging Face folder or run folder")
    parser.add_argument("text", type=Path, nargs="+", help="text files, read one after the other")
    parser.add_argument("--tokens", type=int, default=8192, help="positions (default 8192)")
    parser.add_argument("--row_tokens", type=int, default=1024, help="positions of a row (default 1024)")
    parser.add_argument("--output", type=Path, required=True, help="the .npz to write")
    arguments = parser.parse_args(argv)
    compilation_cache.keep()
    text = "\n".join(file.read_text(encoding="utf-8") for file in arguments.text)
    found = states(arguments.folder, text, arguments.tokens, arguments.row_tokens)
    np.savez(arguments.output, **found)  # type: ignore[arg-type]
    print(", ".join(f"{name} {list(x.shape)}" for name, x in found.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
