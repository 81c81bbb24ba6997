"""The annotations of the package are executed in this process: wrong shapes and types raise."""

import importlib
import pkgutil
import textwrap

import pytest

import jaxrl_llm
from jaxrl_llm.experience import SamplingParams

PROBE = '''
"""A module with one shaped function."""
import numpy as np
from jaxtyping import Float

def total(x: Float[np.ndarray, "B T"], w: Float[np.ndarray, "B T"]) -> Float[np.ndarray, "B"]:
    return (x * w).sum(-1)
'''


@pytest.mark.parametrize("package", ["algorithms", "kernels", "data", "eval"])
def test_a_wrongly_shaped_call_raises_in_every_part_of_the_package(package, tmp_path, monkeypatch):
    import numpy as np

    (tmp_path / "shaped_probe.py").write_text(textwrap.dedent(PROBE).lstrip())
    parent = importlib.import_module(f"jaxrl_llm.{package}")
    monkeypatch.setattr(parent, "__path__", [*parent.__path__, str(tmp_path)])
    module = importlib.import_module(f"jaxrl_llm.{package}.shaped_probe")
    assert module.total(np.ones((2, 3)), np.ones((2, 3))).tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match="Float"):
        module.total(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(TypeError):
        module.total(np.ones((2, 3), int), np.ones((2, 3), int))


def test_modules_behind_the_links_are_loaded_by_the_hook():
    kernels = importlib.import_module("jaxrl_llm.kernels")
    for found in pkgutil.iter_modules(kernels.__path__, "jaxrl_llm.kernels."):
        assert "jaxtyping" in type(importlib.import_module(found.name).__spec__.loader).__module__


def test_fields_of_components_are_checked():
    assert SamplingParams(temperature=1).temperature == 1  # an int serves where a float is asked for
    with pytest.raises(TypeError):
        SamplingParams(max_tokens="many")
    assert "jaxtyping" in type(jaxrl_llm.__spec__.loader).__module__
