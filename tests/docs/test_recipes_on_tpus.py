"""Every recipe whose header names TPUs has what their compiler says of it on the page of such figures."""

import re
from pathlib import Path

import pytest
import recipe_topologies

from jaxrl_llm.distributed import topology

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/measured/topologies.md").read_text()


@pytest.mark.parametrize("recipe", recipe_topologies.named())
def test_a_recipe_whose_header_names_tpus_has_what_their_compiler_said(recipe):
    command = " ".join(recipe_topologies.arguments(recipe, recipe_topologies.named()[recipe]))
    assert f"launch {command}\n" in PAGE
    said = PAGE[PAGE.index(f"launch {command}\n") :].partition("\n\n")[0]
    assert re.search(r"^ *peak of \w+ +[\d.]+ GiB a device", said, re.MULTILINE)


def test_recipes_name_targets_that_programs_can_be_compiled_for():
    named = recipe_topologies.named()
    assert named
    for target in named.values():
        assert topology.parsed(target)[0] in topology.TPUS


def test_a_folder_that_an_interrupted_run_left_is_made_again(tmp_path, capsys):
    def interrupted(folder):
        (folder / "hub").mkdir()
        raise KeyboardInterrupt

    def write(folder):
        (folder / "hub").mkdir()
        (folder / "data_sets").mkdir()

    with pytest.raises(KeyboardInterrupt):
        recipe_topologies.made(tmp_path, interrupted)
    assert capsys.readouterr().out == ""
    folder = recipe_topologies.made(tmp_path, write)
    assert sorted(one.name for one in folder.iterdir()) == ["data_sets", "hub"]
    assert "is what an interrupted run left: it is made again" in capsys.readouterr().out
    # A whole one stays.
    assert recipe_topologies.made(tmp_path, interrupted) == folder and capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == [folder]
