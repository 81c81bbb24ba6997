"""Functions of a notebook or script are kept with all that they use; what cannot be kept is refused."""

import importlib.util
import linecache
import sys
import types
from pathlib import Path

import pytest

from jaxrl_llm.interface import kept_functions

CELL = '''
import math
import re
from collections import Counter as Counted
import xml.dom as dom

BONUS = 0.25

def with_name(kind):
    kind.name = kind.__name__
    return kind

WORDS = {"yes": 1.0, "no": -1.0}
LETTER = re.compile(r"[a-z]", re.IGNORECASE)

@with_name
class Scale:
    """Halves."""
    by = 2.0

    def of(self, x):
        return x / self.by + rest(0)

def rest(n):
    return 0.0 if n == 0 else rest(n - 1)

def root(x, least=BONUS):
    return math.sqrt(max(x, least))

def reward(prompt, text):
    counts = Counted(text.split())
    named = sum(WORDS.get(word, 0.0) * n for word, n in counts.items())
    return Scale().of(root(named)) + BONUS * len(LETTER.findall(text)) + bool(dom.Node) * rest(3)

square = lambda prompt, text: len(text) ** 2

def made(factor):
    def inner(prompt, text):
        return factor
    return inner

inner = made(2)
STATE = object()

def stateful(prompt, text):
    return 1.0 if STATE else 0.0
'''


@pytest.fixture
def cell(monkeypatch) -> types.ModuleType:
    """A module that is "__main__" and whose source is a notebook's cell."""
    name = "<cell 1>"
    module = types.ModuleType("__main__")
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(CELL, name, "exec"), module.__dict__)
    return module


def loaded(named: str) -> types.FunctionType:
    file, _, name = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("kept", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("text", ["yes yes no", "", "no no", "Yes ok"])
def test_a_function_of_a_notebook_is_kept_with_what_it_uses(cell, tmp_path, text):
    (named,) = kept_functions.named([cell.reward], tmp_path / "run")
    assert named == f"{tmp_path}/run/rewards.py:reward"
    assert loaded(named)("", text) == cell.reward("", text)


def test_what_is_kept_twice_stays_and_what_changed_gets_a_number(cell, tmp_path):
    kept_functions.named([cell.reward], tmp_path)
    first = (tmp_path / "rewards.py").read_text()
    kept_functions.named([cell.reward], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.py"]
    kept_functions.named([cell.rest], tmp_path)
    assert (tmp_path / "rewards.0.py").read_text() == first and (tmp_path / "rewards.py").read_text() != first


def test_several_functions_are_kept_in_one_file(cell, tmp_path):
    """A second file would take the place of the first."""
    both = kept_functions.named([cell.reward, cell.root], tmp_path)
    assert both == [f"{tmp_path}/rewards.py:reward", f"{tmp_path}/rewards.py:root"]
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.py"]
    reward, root = map(loaded, both)
    assert reward("", "yes yes no") == cell.reward("", "yes yes no") and root(9.0) == 3.0


def test_functions_that_mean_different_things_by_one_name_are_refused(cell, tmp_path):
    other = types.FunctionType(cell.rest.__code__, cell.__dict__, "rest")
    with pytest.raises(ValueError, match="two of the rewards' functions use the name 'rest' for different things"):
        kept_functions.named([cell.rest, other], tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("square", "a lambda"),
        ("inner", "made inside a function"),
        ("stateful", r"uses 'STATE' \(object\)"),
    ],
)
def test_what_cannot_be_found_again_is_refused(cell, tmp_path, name, why):
    with pytest.raises(ValueError, match=f"{why}.*give reward='FILE.py:NAME'"):
        kept_functions.named([getattr(cell, name)], tmp_path)
    assert not (tmp_path / "rewards.py").exists()


def test_a_function_without_source_is_refused(cell, tmp_path):
    space = {"__name__": "__main__"}
    exec("def unknown(prompt, text):\n    return 0.0\n", space)
    with pytest.raises(ValueError, match="source of 'unknown' is not known"):
        kept_functions.named([space["unknown"]], tmp_path)


def test_a_function_of_a_file_is_named_by_the_file_and_one_of_a_package_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def score(prompt, text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_rewards

    from jaxrl_llm.metrics.console import short

    assert kept_functions.named([own_rewards.score], tmp_path / "run") == [f"{tmp_path}/own_rewards.py:score"]
    assert kept_functions.named([short], tmp_path / "run") == ["jaxrl_llm.metrics.console:short"]
    assert not (tmp_path / "run").exists() and Path(own_rewards.__file__).parent == tmp_path
