"""The commands for pods that pages show have rows for every chip; a run that has not is refused before its pod is asked for."""

import math
import re
from pathlib import Path

import pytest

from jaxrl_llm.distributed import topology

DOCS = Path(__file__).parents[2] / "docs"
OWN_ROWS = 8  # gin/base.gin


@pytest.mark.parametrize(
    ("page", "target", "run"),
    [
        ("howto/clusters.md", r"TPU_TYPE=([\w-]+)", r".*grpo_gsm8k.*'/mnt/.*"),
        ("tutorial/tpu_pod.md", r"TPU_TYPE=([\w-]+)", r".*grpo_gsm8k.*'/mnt/.*"),
        ("howto/topologies.md", r"--topology=(\S+) --gin_file", r".*--dry_run --topology.*grpo_gsm8k.*"),
    ],
)
def test_a_pod_that_a_page_names_has_a_row_for_each_chip(page, target, run):
    text = (DOCS / page).read_text()
    (name,) = set(re.findall(target, text))
    lines = re.findall(run, text)
    assert lines
    for line in lines:
        rows = int(found[1]) if (found := re.search(r"ROWS=(\d+)", line)) else OWN_ROWS
        assert rows % math.prod(topology.parsed(name)[1]) == 0
        assert "PRETRAINED=" in line
