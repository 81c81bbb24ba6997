"""The algorithm that docs/howto/components.md shows obeys the laws of every algorithm, once its two files are where the page puts them."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import test_contracts
from algorithm_cases import make_sequences
from blocks import blocks

from jaxrl_llm import algorithms

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "components.md"
LAWS = {
    name: law
    for name, law in inspect.getmembers(test_contracts, inspect.isfunction)
    if name.startswith("test_") and "name" in inspect.signature(law).parameters
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Puts the page's two blocks beside the package's algorithms and gin files; returns the name of the algorithm."""
    folder = tmp_path_factory.mktemp("shown")
    program, settings = blocks(PAGE)[:2]
    assert "algorithms/mine.py" in PAGE.read_text() and "gin/algorithms/mine.gin" in PAGE.read_text()
    (folder / "mine.py").write_text(program.code)
    (folder / "mine.gin").write_text(settings.code)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(algorithms, "__path__", [*algorithms.__path__, str(folder)])
        patched.setattr(test_contracts, "FOLDER", folder)
        yield "mine"
    sys.modules.pop("jaxrl_llm.algorithms.mine", None)


@pytest.mark.parametrize("law", LAWS)
def test_it_obeys(law, mine):
    LAWS[law](mine)


def test_its_advantages_are_rewards_less_the_mean_of_their_group(mine):
    sequences = make_sequences(4)
    reward, group, counted, learned = (
        np.asarray(x) for x in (sequences.reward, sequences.group, sequences.counted, sequences.learned)
    )
    found = np.asarray(test_contracts.build(mine).advantages(sequences).advantages)
    for s in np.flatnonzero(counted):
        baseline = reward[counted & (group == group[s])].mean()
        np.testing.assert_allclose(found[s][learned[s]], reward[s] - baseline, atol=1e-6)
