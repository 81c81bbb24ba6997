"""A run folder of an earlier version, kept here, goes on as it would have gone on then."""

import json
import os
import shutil
from pathlib import Path

import jax
import pytest
import tiny_run

from jaxrl_llm.algorithms.correction import GAP_SIZES
from jaxrl_llm.tools.migrate import migrate

pytestmark = pytest.mark.slow

OLD = (
    Path(__file__).parents[1] / "fixtures" / "run_of_6601da5"
)  # tests/tiny.gin at that commit, with the checkpoint of step 6
EXACT = "JAXRL_LLM_SAME_MACHINE"  # set: this machine rounds as the one that made the record does


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path, monkeypatch):
    """The last two steps have the metrics that the earlier version wrote: all bits of them on the same kind of machine."""
    run_dir = tmp_path / "run"
    shutil.copytree(OLD, run_dir)
    expected = [json.loads(line) for line in (OLD / "metrics.jsonl").read_text().splitlines()][7:]
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    assert f"`python -m jaxrl_llm.tools.migrate {run_dir}` rewrites the file" in tiny_run.refused(run_dir, str(run_dir))
    assert migrate(run_dir) and not migrate(run_dir)
    assert (run_dir / "config.gin.old").read_text() == (OLD / "config.gin").read_text()
    done = tiny_run.launch(run_dir, gin_file=str(run_dir))
    assert done.returncode == 0 and "resuming from step 6" in done.stdout, done.stderr
    since = {"eval/heldout/prompts", "gap/compared", "gap/differing", *GAP_SIZES}  # metrics that came since
    found = [{name: x for name, x in row.items() if name not in since} for row in tiny_run.rows(run_dir)[7:]]
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    if os.environ.get(EXACT) and jax.__version__ == json.loads((OLD / "run.json").read_text())["jax"]:
        assert found == expected
    for row, was in zip(found, expected, strict=True):
        assert row == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in was.items()}
