"""Writes a Hugging Face folder from a verl checkpoint: python -m jaxrl_llm.tools.import_verl CHECKPOINT --out DIR [--config HF_FOLDER].

CHECKPOINT is the folder global_step_N/actor, or the one around it, with model_world_size_W_rank_R.pt of all ranks. config.json and the
tokenizer are those of its folder huggingface/, or of --config. Weights keep their dtype. It needs PyTorch (extra serve).
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm import command_line
from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
from jaxrl_llm.models import hf_format, hf_weights, verl_shards
from jaxrl_llm.models.hf_files import INDEX, Checkpoint
from jaxrl_llm.models.policy import Policy

BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")  # files of a folder beside its weights


def write(checkpoint: Path, out: Path, *, config: Path | None = None, shard_bytes: int = 5 * 10**9) -> Path:
    """Writes the folder and returns it; it appears complete or not at all.

    Raises:
      FileExistsError: `out` exists.
      FileNotFoundError: a rank's file or config.json is missing.
      ValueError: the files are not a readable checkpoint, or do not hold what config.json describes.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: give a new folder")
    files = verl_shards.rank_files(checkpoint)
    source = config or files[0].parent / "huggingface"
    hf_weights.config_of(source)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for pattern in BESIDE:
            for file in source.glob(pattern):
                if file.name != INDEX:
                    shutil.copy(file, partial / file.name)
        _write(files, partial, shard_bytes)
        check(partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def check(folder: Path) -> None:
    """Raises ValueError where the weights of a folder are not those that its config.json describes."""
    policy = Policy(hf_weights.architecture(folder), Partitioner.create(MeshConfig()))
    unread = {"lm_head.weight"} if policy.architecture.tied else set()
    Checkpoint(folder).check(hf_format.tensors(policy.sizes()), unread)


def _write(files: Sequence[Path], folder: Path, shard_bytes: int) -> None:
    """Writes the tensors in files of at most `shard_bytes`, or of one larger tensor, and their index file."""
    where: dict[str, str] = {}
    held: dict[str, np.ndarray] = {}
    sizes: list[int] = []

    def put() -> None:
        file = f"model-{len(sizes) + 1:05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(held, file))
        sizes.append(sum(x.nbytes for x in held.values()))
        held.clear()

    for name, array in verl_shards.tensors(files):
        if held and sum(x.nbytes for x in held.values()) + array.nbytes > shard_bytes:
            put()
        held[name] = array
    put()
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.import_verl", __doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of verl's actor")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--config", type=Path, help="folder with config.json and the tokenizer (default: huggingface/)")
    given = parser.parse_args(argv)
    print(f"wrote {write(given.checkpoint, given.out, config=given.config)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
