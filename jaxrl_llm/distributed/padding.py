"""Pads parameters with zeros where a mesh divides none of their dimensions, and slices them to their own sizes where they are used.

The zeros stay zeros: slicing gives them a gradient of exactly 0, so that their moments and updates are 0 too, and they add nothing to
norms and checksums. No file but a checkpoint holds them, and any mesh can read a checkpoint.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def cut(x: Any, shape: Sequence[int]) -> Any:
    """Slices an array, NumPy's or JAX's, to its own `shape`, without the padding."""
    return x if tuple(x.shape) == tuple(shape) else x[tuple(slice(n) for n in shape)]


def filled(x: Any, shape: Sequence[int]) -> Any:
    """Pads `x` with zeros at the end of each axis to `shape`; under jit, or of NumPy."""
    if tuple(x.shape) == tuple(shape):
        return x
    pad: Any = np.pad if isinstance(x, np.ndarray) else jnp.pad
    return pad(x, [(0, most - n) for n, most in zip(x.shape, shape, strict=True)])


def share(stored: Any, own: Any) -> float:
    """Returns the number of zeros in the padding of a tree, as a share of the elements of the tree."""
    count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))  # noqa: E731
    return count(stored) / count(own) - 1
