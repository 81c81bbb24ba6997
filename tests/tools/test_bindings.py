"""The page of gin bindings is current and complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gin

from jaxrl_llm.components import home
from jaxrl_llm.experience import SamplingParams
from jaxrl_llm.metrics.writers import Jsonl, TensorBoard
from jaxrl_llm.tools.pages.bindings import Binding, bindings, components, page, referred_to, section, shared

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Attributes:
      shared: said in the base,
        on two lines.
    """

    shared: int | None = None


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    """An example, one
    sentence on two lines.

    Attributes:
      needed: tokens.
      parts: {name: weight} of parts | none.
    """

    needed: Sequence[SamplingParams]
    parts: Mapping[str, float] = field(default_factory=dict)
    names: frozenset[str] = frozenset({"b", "a"})
    settings: SamplingParams = field(default_factory=lambda: SamplingParams(top_k=3))


def function(prompt: str, *, scale: float = 2.0) -> float:
    """Scores.

    Args:
      prompt: given by the caller.
      scale: factor.
    """
    return scale * len(prompt)


def test_the_page_is_current():
    current = "python -m jaxrl_llm.tools.pages.bindings > docs/reference/bindings.md"
    assert (ROOT / "docs" / "reference" / "bindings.md").read_text() == page(), f"the code changed: run {current}"


def test_every_binding_has_a_meaning():
    silent = [b.name for component in components() for b in bindings(component) if not b.meaning]
    assert not silent, "add them to the block `Attributes:` of their components' docstrings"


def test_gin_knows_every_binding():
    for component in components():
        gin.clear_config()
        package, _, module = home(component).rpartition(".")
        lines = ["from __gin__ import dynamic_registration", f"from {package} import {module}"]
        gin.parse_config(lines + [f"{binding.name} = None" for binding in bindings(component)])


def test_components_that_no_gin_file_names_are_listed_too():
    assert {Jsonl, TensorBoard} <= set(components())


def test_types_defaults_and_meanings_come_from_the_code():
    assert bindings(Example) == [
        Binding(
            name="test_bindings.Example.shared",
            type="int | None",
            default="None",
            meaning="said in the base, on two lines.",
        ),
        Binding(
            name="test_bindings.Example.needed",
            type="Sequence[SamplingParams]",
            default="required",
            meaning="tokens.",
        ),
        Binding(
            name="test_bindings.Example.parts",
            type="Mapping[str, float]",
            default="{}",
            meaning="{name: weight} of parts | none.",
        ),
        Binding(name="test_bindings.Example.names", type="frozenset[str]", default="{'a', 'b'}", meaning=""),
        Binding(
            name="test_bindings.Example.settings",
            type="SamplingParams",
            default="SamplingParams(top_k=3)",
            meaning="",
        ),
    ]


def test_a_function_lists_what_its_caller_does_not_give():
    (binding,) = bindings(function)
    assert (binding.name, binding.default, binding.meaning) == ("test_bindings.function.scale", "2.0", "factor.")


def test_a_section_is_a_markdown_table_with_its_bars_escaped():
    lines = section(Example).splitlines()
    assert lines[0] == "## test_bindings.Example"
    assert lines[2].endswith("An example, one sentence on two lines.")
    row = r"| `test_bindings.Example.shared` | `int \| None` | `None` | said in the base, on two lines. |"
    assert lines[6] == row


def test_what_a_component_has_of_a_base_is_listed_there():
    @dataclass(frozen=True, kw_only=True)
    class Other(Base):
        shared: int | None = 3

    text = section(Example, [Base])
    assert "Also the fields of Base." in text and "Example.shared" not in text and "Example.parts" in text
    assert "| `3` | said in the base, on two lines. |" in section(Other, [Base])  # another default
    assert shared([Example, Other, SamplingParams]) == [Base] and shared([Example]) == []


def test_gin_files_are_read_for_scoped_aliased_and_uncommented_names(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "run.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from jaxrl_llm import experience as words\n"
        "import jaxrl_llm.metrics.writers as m\n"
        "import os\n"
        "A = @scope/words.SamplingParams()  # not words.Prompt\n"
        "m.Jsonl.metrics = 'm.jsonl'\n"
        "m.missing = 1\n"
    )
    assert list(referred_to(tmp_path)) == [SamplingParams, Jsonl]
