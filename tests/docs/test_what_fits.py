"""The README's "what fits" is what `plan --fit` prints for these models and devices, and the commands say it as settings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| (?P<size>\d+) GB \| \S+ \(`--device=(?P<device>[\w=]+)`\) \| (?P<model>\S+) \| `(?P<settings>[^`]+)` \| (?P<gib>[\d.]+) of (?P<of>[\d.]+) \|$",
    re.MULTILINE,
)
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 32768, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40960}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
# As published with the models.
CONFIGS = {
    "Qwen2.5-0.5B-Instruct": QWEN2 | dict(zip(SIZES, (896, 24, 14, 2, 4864))),
    "Qwen2.5-1.5B-Instruct": QWEN2 | dict(zip(SIZES, (1536, 28, 12, 2, 8960))),
    "Qwen2.5-3B-Instruct": QWEN2 | dict(zip(SIZES, (2048, 36, 16, 2, 11008))),
    "Qwen3-8B": QWEN3 | dict(zip(SIZES, (4096, 36, 32, 8, 12288)), head_dim=128, tie_word_embeddings=False),
}
PROGRAM = """
import json, sys
from jaxrl_llm.tools import plan
for arguments in json.loads(sys.argv[1]):
    print("==", flush=True)
    assert plan.main(arguments) == 0
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_readme_says_fits_is_what_plan_fit_prints(tmp_path):
    rows = [found.groupdict() for found in ROW.finditer((ROOT / "README.md").read_text())]
    assert [row["size"] for row in rows] == ["8", "24", "80", "141"]
    asked = []
    for row in rows:
        folder = tmp_path / row["model"].rpartition("/")[2]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[folder.name]))
        asked.append(
            ["--gin_file=gin/grpo_gsm8k.gin", f"--gin=PRETRAINED={str(folder)!r}", "--fit", f"--device={row['device']}"]
        )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # one device, as on a reader's machine
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    for row, printed in zip(rows, done.stdout.split("==\n")[1:], strict=True):
        head, *lines = printed.splitlines()
        settings = dict(word.split("=", 1) for word in row["settings"].split())
        assert settings == {name: value.strip("'") for name, value in (line.split(" = ") for line in lines)}
        assert head.endswith(f": {row['gib']} of {row['of']} GiB")
        assert float(row["gib"]) <= 0.92 * float(row["of"]) and float(row["of"]) <= float(row["size"])
