"""The notebook of the first hour runs from top to bottom in a Jupyter kernel, where an event loop runs already."""

import json
from pathlib import Path

import pytest
import tiny_run

NOTEBOOK = tiny_run.ROOT / "examples" / "first_hour.ipynb"

nbformat = pytest.importorskip("nbformat", reason="the extra dev brings nbclient")


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert any(cell["cell_type"] == "code" for cell in cells)
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="the extra dev brings nbclient")
    pytest.importorskip("ipykernel", reason="the extra dev brings ipykernel")
    for name, value in (tiny_run.environment() | {"PYTHONPATH": str(tiny_run.ROOT)}).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (steps,) = (cell for cell in code if cell.source.startswith("for step in run"))
    said = "".join(output.get("text", "") for output in steps.outputs)
    assert [line.split()[0] for line in said.splitlines() if line[:1].isdigit()] == ["0", "1", "2", "3", "4"]
    (trained,) = (cell for cell in code if cell.source == "run.train()")
    pages = [output["data"]["text/html"] for output in trained.outputs if "text/html" in output.get("data", {})]
    assert len(pages) == 2  # the display that is renewed at each step, and the run that the cell returns
    for page in pages:
        assert "step 12 of 12" in page and "<polyline" in page and "Write about" in page
    rewards = [row["reward/mean"] for row in tiny_run.rows(tmp_path / "runs/grpo") if "reward/mean" in row]
    assert len(rewards) == 12 and rewards[-1] > rewards[0]
    assert (tmp_path / "runs/grpo/model/model.safetensors").is_file()
    assert "def letters(prompt, text, wanted)" in Path(tmp_path / "runs/grpo/rewards.py").read_text()
