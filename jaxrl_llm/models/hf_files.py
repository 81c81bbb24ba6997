"""Reads the safetensors files of a Hugging Face folder, and finds the names that its tensors have there.

A folder may have its tensors under other prefixes than a causal language model's own ("model." and "lm_head."): under that of a wrapper
("module.", "_orig_mod."), of a model around the language model ("language_model.model."), or under none.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_llm.models.hf_format import Tensor, unnested

_log = logging.getLogger(__name__)

READABLE = ("F32", "BF16", "F16")
INDEX = "model.safetensors.index.json"
EMBEDDING, HEADS = "embed_tokens.weight", ("lm_head.weight", "score.weight")


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Returns {name in a causal language model: name in the folder} of the folder's tensors.

    The layers' prefix is that of the only embedding's name; the heads' prefixes may be others. Names that do not begin with the layers'
    prefix stay as they are.
    """
    names = list(names)
    prefixes = [name.removesuffix(EMBEDDING) for name in names if name == EMBEDDING or name.endswith(f".{EMBEDDING}")]
    if len(prefixes) != 1 or prefixes[0] == "model.":
        return {name: name for name in names}
    found = {}
    for name in names:
        head = next((h for h in HEADS if name == h or name.endswith(f".{h}")), None)
        inside = name.startswith(prefixes[0])
        found[head if head is not None else f"model.{name.removeprefix(prefixes[0])}" if inside else name] = name
    return found


class Checkpoint:
    """The safetensors files of a folder, opened lazily; `prefix` is the prefix of all names there, or "" to find it.

    Where the folder may be a vision-language model's (`nested`), only its text model is read.
    """

    def __init__(self, folder: Path, prefix: str = "", nested: bool = False):
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            held = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            held = {name: file for file in sorted(folder.glob("*.safetensors")) for name in open_file(file).keys()}  # noqa: SIM118
        for file in sorted(set(held.values())):
            if not file.is_file():
                raise FileNotFoundError(f"{index} names {file.name}, which is not in the folder: download it")
        if not held:
            raise FileNotFoundError(
                f"{folder} has no safetensors weights: save the model with transformers' save_pretrained"
            )
        if nested:
            self._names = unnested(held)
        else:
            self._names = {name.removeprefix(prefix): name for name in held} if prefix else renamed(held)
        others = [(there, name) for name, there in self._names.items() if name != there]
        if others and not prefix and not nested:
            _log.warning("%s: %s is read as %s, and %d other names alike", folder, *others[0], len(others) - 1)
        self._file_of = {name: held[there] for name, there in self._names.items()}
        self._handles = {file: open_file(file) for file in set(self._file_of.values())}

    def slices(self, name: str) -> Any:
        """Returns the tensor as a slice object that reads lazily."""
        return self._handles[self._file_of[name]].get_slice(self._names[name])

    def holder(self, tensor: Tensor) -> str:
        """Returns the name of the tensor in the folder that holds its values: its own, or that of the layer's fused experts."""
        whole = tensor.name not in self._file_of and tensor.fused in self._file_of
        return str(tensor.fused) if whole else tensor.name

    def part(self, tensor: Tensor, slices: tuple[slice, ...]) -> np.ndarray:
        """Reads the values of a tensor at `slices` of its layout in the checkpoint."""
        name = self.holder(tensor)
        if name == tensor.name:
            return np.asarray(self.slices(name)[slices])
        out, inner = slices
        first, expert = (tensor.part or 0) * tensor.hf_shape[0], tensor.expert or 0
        rows = slice(first + out.start, first + out.stop)
        return np.asarray(self.slices(name)[slice(expert, expert + 1), rows, inner])[0]

    def check(self, expected: Sequence[Tensor], unread: Set[str] | None) -> None:
        """Raises ValueError where names, shapes or dtypes are not the expected ones, or a tensor is neither expected nor in `unread`."""
        wanted = {self.holder(t): t for t in expected}
        known = wanted.keys() | (self._file_of.keys() if unread is None else unread)
        problems = [f"{name} is missing" for name in wanted if name not in self._file_of]
        problems += [
            f"{name} is unexpected"
            for name in sorted(self._file_of)
            if name not in known and not name.endswith("rotary_emb.inv_freq")  # buffers of old releases
        ]
        experts = Counter(tensor.fused for tensor in expected if tensor.part in (None, 0))
        for name, tensor in wanted.items():
            if name in self._file_of:
                found, asked = self.slices(name), tensor.hf_shape
                if name != tensor.name:  # the last expert's last part
                    asked = (experts[name], ((tensor.part or 0) + 1) * asked[0], asked[1])
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
                if shape != asked:
                    problems.append(f"{name} has shape {shape}, config.json asks for {asked}")
                if dtype not in READABLE:
                    problems.append(f"{name} has dtype {dtype}, only {', '.join(READABLE)} are read")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ValueError(f"the weights in {self.folder} do not fit their config.json: {shown}")


def open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file ({error}): download it again") from error
