"""Times an update by transformers and PyTorch, with Liger where it is installed, at the shape that `jaxrl_llm.tools.bench` measures.

    PYTHONPATH=. python tests/gpu_peer_update.py --model qwen2.5-1.5b --rows 8 --row_tokens 4096

The model is transformers' own with random bfloat16 weights, AdamW is PyTorch's fused one with bfloat16 moments, layers are computed
again in the backward pass, and the loss is the mean negative log-prob of the rows' tokens. Prints a JSON line a variant; rates are
counted as `flops.py` counts ours.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers

from jaxrl_llm.metrics import flops
from jaxrl_llm.models.sizes import SHAPES


def model_of(name: str, liger: bool, device: str = "cuda") -> Any:
    """The model on the device, random weights."""
    size = SHAPES[name]
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()
    config = transformers.Qwen2Config(
        vocab_size=size.vocabulary_size, hidden_size=size.width, intermediate_size=size.mlp_width,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.max_positions, tie_word_embeddings=size.tied, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.gradient_checkpointing_enable()
    return model.train()


def timed(model: Any, rows: int, row_tokens: int, repeats: int) -> list[float]:
    """Seconds of each update, after two that are not counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (rows, row_tokens), device="cuda")
    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", choices=[name for name in SHAPES if name.startswith("qwen2.5")], default="qwen2.5-1.5b"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row_tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="without Liger")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_peer_update.py needs a CUDA device")
    seconds = timed(model_of(given.model, not given.plain), given.rows, given.row_tokens, given.repeats)
    median = statistics.median(seconds)
    done = flops.update(SHAPES[given.model], [given.row_tokens] * given.rows) / median
    device = torch.cuda.get_device_name()
    found = {
        "peer": "transformers" if given.plain else "transformers + Liger", "versions": [transformers.__version__, torch.__version__],
        **vars(given), "device": device, "s": round(median, 4), "tokens_per_s": round(given.rows * given.row_tokens / median),
        "mfu": round(done / (flops.peak(device) or float("nan")), 4), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
