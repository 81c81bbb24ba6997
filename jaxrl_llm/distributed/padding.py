"""Parameters of which a mesh divides no dimension: they rest filled up with zeros, and are cut to their own sizes where they are used.

The zeros stay zeros: cutting gives them a gradient of exactly 0, so that their moments and changes are 0 too, and they add nothing to
norms and checksums. No file but a checkpoint holds them, and a checkpoint is read by any mesh.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def cut(x: Any, shape: Sequence[int]) -> Any:
    """The part of an array, NumPy's or JAX's, that is not filling."""
    return x if tuple(x.shape) == tuple(shape) else x[tuple(slice(n) for n in shape)]


def filled(x: Any, shape: Sequence[int]) -> Any:
    """An array of `shape` that holds `x`, and zeros after it along each axis; under jit, or of NumPy."""
    if tuple(x.shape) == tuple(shape):
        return x
    pad: Any = np.pad if isinstance(x, np.ndarray) else jnp.pad
    return pad(x, [(0, most - n) for n, most in zip(x.shape, shape, strict=True)])


def share(stored: Any, own: Any) -> float:
    """Zeros that are stored beside the elements of a tree, as a share of these."""
    count = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))  # noqa: E731
    return count(stored) / count(own) - 1
