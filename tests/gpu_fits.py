"""Runs the rows of the README's table "What fits" on one NVIDIA GPU, each within its own share of the memory, and prints a JSON line a row.

    PYTHONPATH=. python tests/gpu_fits.py --tokenizer FOLDER --gsm8k FOLDER [--rows=8,24,80,141] [--steps=3]

A row is `gin/grpo_gsm8k.gin` with the row's settings and fewer prompts a step, on a model of random weights and the row's sizes, in a process that may
allocate as many GiB as the row's device has. --tokenizer is a folder with a Qwen2 or Qwen3 tokenizer, --gsm8k one with train.jsonl and test.jsonl. Exits 1
where a row does not run to its end.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\| (?P<gb>\d+) GB \| .*? \| (?P<model>\S+) \| `(?P<settings>[^`]+)` \| (?P<says>[\d.]+) of (?P<of>[\d.]+) \|$",
    re.MULTILINE,
)
SIZES = {  # config.json of the models that the table names
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2.Qwen2", (896, 24, 14, 2, 64, 4864, True)),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2.Qwen2", (1536, 28, 12, 2, 128, 8960, True)),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2.Qwen2", (2048, 36, 16, 2, 128, 11008, True)),
    "Qwen/Qwen3-8B": ("qwen3.Qwen3", (4096, 36, 32, 8, 128, 12288, False)),
}
NAMES = ("width", "layers", "heads", "kv_heads", "head_width", "mlp_width", "tied")


def composed(model: str, settings: str, given: argparse.Namespace, run_dir: Path) -> str:
    """Returns the gin text of a row's run."""
    family, sizes = SIZES[model]
    module, _, _ = family.partition(".")
    fields = "".join(f"{family}.{name} = {value!r}\n" for name, value in zip(NAMES, sizes, strict=True))
    quoted = re.sub(r"=([a-z]\w*)(?=\s|$)", r"='\1'", settings)
    return (
        "from __gin__ import dynamic_registration\nfrom jaxrl_llm import train\nfrom jaxrl_llm.models import sources\n"
        f"from jaxrl_llm.models import {module}\n\ninclude 'gin/grpo_gsm8k.gin'\n\n"
        f"PRETRAINED = {str(given.tokenizer)!r}\nGSM8K_PATH = {str(given.gsm8k)!r}\nRUN_DIR = {str(run_dir)!r}\n"
        f"STEPS = {given.steps}\nPROMPTS_PER_STEP = {given.prompts}\nEVALUATION_LIMIT = 8\nSAVE_EVERY = 1000\nBEST = None\n"
        f"sources.PolicySource.pretrained = None\nsources.PolicySource.architecture = @{family}()\n"
        f"{family}.vocabulary_size = 151936\n{fields}" + "".join(f"{x}\n" for x in quoted.split())
    )  # fmt: skip


def measured(row: re.Match[str], given: argparse.Namespace, total_gib: float) -> dict[str, Any]:
    """Runs one row and returns what it took."""
    share = min(float(row["of"]) / total_gib, 0.98)
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder, "row.gin"), Path(folder, "run")
        file.write_text(composed(row["model"], row["settings"], given, run_dir))
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        }
        command = [sys.executable, "-m", "jaxrl_llm.launch", f"--gin_file={file}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines() if (run_dir / "metrics.jsonl").exists() else []
    steps = [x for x in map(json.loads, lines) if "time/step_s" in x or "memory/peak_gib" in x]
    found = {
        "gb": int(row["gb"]),
        "model": f"{row['model']}, random weights",
        "settings": row["settings"],
        "account_gib": float(row["says"]),
    }
    found |= {"limit_gib": float(row["of"]), "exit": done.returncode, "steps": len(steps)}
    if done.returncode:
        return found | {"said": (done.stdout + done.stderr)[-1500:]}
    last = steps[-1]
    return found | {
        name: last[name]
        for name in sorted(last)
        if name.startswith(("memory/", "time/", "sampler/slots", "sampler/tokens"))
    }


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
    for row in ROW.finditer((ROOT / "README.md").read_text()):
        if int(row["gb"]) in wanted:
            found = measured(row, given, int(memory) / 1024)
            failed |= found["exit"] != 0
            print(json.dumps({"device": device, **found}), flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
