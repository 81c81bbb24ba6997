"""Gin files of an earlier version become today's, and are told apart from other mistakes."""

import importlib

import pytest

from jaxrl_llm import command_line
from jaxrl_llm.tools.migrate import main, migrated

OLD = """# A run; see stages.Stage.steps.
from __gin__ import dynamic_registration
from jaxrl_llm import stages  # the stages
from jaxrl_llm import packing
from jaxrl_llm import train
from jaxrl_llm.algorithms import token_buncher
from jaxrl_llm.data import sorting
from jaxrl_llm.models import policy_source as source

include 'gin/base.gin'
train.Run.stages = [@sft/stages.Stage(), @rl/stages.Stage()]
rl/stages.Stage:
  packing = @packing.Packing()
  schedule = @token_buncher.TokenBuncher()
token_buncher.TokenBuncher.noiser = @token_buncher.TokenNoiser()
source.PolicySource.pretrained = 'my.stages.Stage'
"""
NEW = """# A run; see train.Stage.steps.
from __gin__ import dynamic_registration
from jaxrl_llm import train
from jaxrl_llm.algorithms import token_noiser
from jaxrl_llm.data import sorting
from jaxrl_llm.models import sources

include 'gin/base.gin'
train.Run.stages = [@sft/train.Stage(), @rl/train.Stage()]
rl/train.Stage:
  packing = @train.Packing()
  schedule = @train.TokenBuncher()
train.TokenBuncher.noiser = @token_noiser.TokenNoiser()
sources.PolicySource.pretrained = 'my.stages.Stage'
"""


def test_imports_and_names_become_todays_and_stay_so():
    assert migrated(OLD) == NEW
    assert migrated(NEW) == NEW


def test_a_setting_that_is_none_any_more_becomes_a_comment():
    old = "vllm_sampler.VllmSampler.seeded = False\nvllm_sampler.VllmSampler.canary_mean = 0.1\n"
    old = f"from jaxrl_llm.samplers import vllm_sampler\nfrom __gin__ import dynamic_registration\n{old}"
    new = migrated(old)
    assert new.endswith(
        "vllm.VllmSampler.seeded = False\n# vllm.VllmSampler.canary_mean = 0.1  # no setting any more: the limit is derived\n"
    )
    assert migrated(new) == new


def test_every_moved_class_is_where_the_table_says():
    for names in command_line.MOVED.values():
        for new in names.values():
            module, _, name = new.rpartition(".")
            assert isinstance(getattr(importlib.import_module(module), name), type)


def test_a_run_folder_keeps_its_old_configuration(tmp_path, capsys):
    (tmp_path / "config.gin").write_text(OLD)
    assert main([str(tmp_path)]) == 0 and main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}: rewritten", f"{tmp_path}: nothing to change"]
    assert (tmp_path / "config.gin").read_text() == NEW
    assert (tmp_path / "config.gin.old").read_text() == OLD


def test_an_old_name_is_told_with_its_line_and_the_command(tmp_path):
    file = tmp_path / "my.gin"
    file.write_text(OLD)
    told = f"my.gin line 11 names stages.Stage, which is train.Stage now: `python -m jaxrl_llm.tools.migrate {file}`"
    with pytest.raises(ValueError, match=told):  # line 1 is a comment
        command_line.build([str(file)])


def test_an_old_name_on_the_command_line_is_told():
    with pytest.raises(ValueError, match=r"names optimizers\.Optimizer, which is train\.Optimizer now"):
        command_line.build(["gin/quickstart.gin"], ["optimizers.Optimizer.learning_rate = 1"])
