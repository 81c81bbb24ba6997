"""Published versions as a learner leaves them, written with orbax alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.publication.forward import forward_of
from jaxrl_llm.publication.manifest import FILE, WEIGHTS, Manifest, TensorEntry, checksum

# The config.json of the model that tests/publication/served_model.py plays.
SERVED: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def write_version(
    publication: Path,
    version: int,
    tensors: Mapping[str, Any],
    listed: Mapping[str, np.ndarray] | None = None,
    use_zarr3: bool = True,
    use_ocdbt: bool = False,
    config: Mapping[str, Any] = SERVED,
) -> str:
    """Writes `tensors` (arrays of NumPy, or of JAX with their shardings) and a manifest; returns the version's folder.

    The manifest lists `listed`, by default what is written; to list something else makes a bad version.
    """
    folder = publication / f"v{version:08d}"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3, use_compression=False)
    checkpointer = ocp.Checkpointer(handler)
    checkpointer.save(folder / WEIGHTS, args=ocp.args.PyTreeSave(nested(tensors)))
    checkpointer.close()
    entries = {
        name: TensorEntry(shape=tuple(a.shape), dtype=str(a.dtype), checksum=checksum(np.asarray(a)))
        for name, a in (tensors if listed is None else listed).items()
    }
    tied = "lm_head.weight" not in entries
    manifest = Manifest(version=version, model_type="qwen2", tied=tied, tensors=entries, forward=forward_of(config))
    (folder / FILE).write_text(manifest.to_json())
    return str(folder)


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts whose dotted paths are the names."""
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        *parents, leaf = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = jax.numpy.asarray(array)
    return tree


def data_files(folder: Path) -> list[Path]:
    """The files of a version that hold elements: of a database, or of arrays in files of their own."""
    return [f for f in (*folder.glob("weights/**/d/*"), *folder.glob("weights/*/c/**/*")) if f.is_file()]
