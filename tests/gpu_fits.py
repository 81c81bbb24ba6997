"""Runs the rows of the README's table "What fits" on one NVIDIA GPU, each within its own share of the memory, and prints a JSON line a row.

    PYTHONPATH=. python tests/gpu_fits.py --tokenizer FOLDER --gsm8k FOLDER [--rows=8,24,80,141] [--steps=3]

A row is `gin/grpo_gsm8k.gin` with the row's settings and fewer prompts a step, on a model of random weights and the row's sizes, in a process that may
allocate what JAX takes of the row's device. --tokenizer is a folder with a Qwen2 or Qwen3 tokenizer, --gsm8k one with train.jsonl and test.jsonl. Exits 1
where a row ends before its steps are over.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxrl_llm.models.sizes import SHAPES
from jaxrl_llm.tools.fit import USABLE

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| (?P<gb>\d+) GB \| .*? \| (?P<model>\S+) \| `(?P<settings>[^`]+)` \| (?P<says>[\d.]+) of (?P<of>[\d.]+) \|$",
    re.MULTILINE,
)
NAMES = ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_width", "mlp_width", "tied")


def composed(model: str, settings: str, given: argparse.Namespace, run_dir: Path) -> str:
    """Returns the gin text of a row's run."""
    size = SHAPES[model.partition("/")[2].removesuffix("-Instruct").lower()]
    module = type(size).__module__.rpartition(".")[2]
    family = f"{module}.{type(size).__name__}"
    fields = "".join(f"{family}.{name} = {getattr(size, name)!r}\n" for name in NAMES)
    quoted = re.sub(r"=([a-z]\w*)(?=\s|$)", r"='\1'", settings)
    return (
        "from __gin__ import dynamic_registration\nfrom jaxrl_llm import train\nfrom jaxrl_llm.models import sources\n"
        f"from jaxrl_llm.models import {module}\n\ninclude 'gin/grpo_gsm8k.gin'\n\n"
        f"PRETRAINED = {str(given.tokenizer)!r}\nGSM8K_PATH = {str(given.gsm8k)!r}\nRUN_DIR = {str(run_dir)!r}\n"
        f"STEPS = 1000\nPROMPTS_PER_STEP = {given.prompts}\nSAVE_EVERY = 1000\nBEST = None\n"
        f"train.Stage.evaluations = []\nsources.PolicySource.pretrained = None\nsources.PolicySource.architecture = @{family}()\n"
        + fields
        + "".join(f"{x}\n" for x in quoted.split())
    )  # fmt: skip


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the metrics of the steps that are over."""
    file = run_dir / "metrics.jsonl"
    whole = (
        [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    return [row for row in map(json.loads, whole) if "time/step_s" in row]


def measured(row: re.Match[str], given: argparse.Namespace, total_gib: float) -> dict[str, Any]:
    """Runs one row for some steps, ends it before it writes a checkpoint, and returns what a step took."""
    share = min(USABLE * float(row["of"]) / total_gib, 0.98)
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir, said = Path(folder, "row.gin"), Path(folder, "run"), Path(folder, "said")
        file.write_text(composed(row["model"], row["settings"], given, run_dir))
        command = [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={file}"]
        with said.open("w") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as run:
            while run.poll() is None and len(rows_of(run_dir)) < given.steps:
                time.sleep(0.5)
            failed = run.poll() is not None
            run.kill()
        steps, text = rows_of(run_dir), said.read_text()
    found = {"gb": int(row["gb"]), "model": f"{row['model']}, random weights", "settings": row["settings"]}
    found |= {"account_gib": float(row["says"]), "limit_gib": float(row["of"]), "steps": len(steps), "failed": failed}
    if failed:
        return found | {"said": text[-1500:]}
    kept = ("memory/", "time/step_s", "time/sample_s", "time/update_s", "sampler/slots", "speed/")
    return found | {name: x for name, x in sorted(steps[-1].items()) if name.startswith(kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--rows", default="8,24,80,141", help="GB of the rows to run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, of eight samples each")
    given = parser.parse_args()
    asked = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    memory, device = (
        subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    )
    wanted, failed = {int(x) for x in given.rows.split(",")}, False
    table = {int(row["gb"]): row for row in ROW.finditer((ROOT / "README.md").read_text())}
    if wanted - set(table):
        parser.error(f"--rows must be some of {sorted(table)}, the README's (got {given.rows})")
    for gb, row in table.items():
        if gb in wanted:
            found = measured(row, given, int(memory) / 1024)
            failed |= found["failed"]
            print(json.dumps({"device": device, **found}), flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
