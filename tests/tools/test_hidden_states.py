"""The command that writes a model's hidden states, against transformers, and the benchmark that reads them."""

import json

import jax
import numpy as np
import torch
import transformers

from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.kernels import bench
from jaxrl_llm.tools import hidden_states

SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
TEXT = "It is not the years in your life that count; it is the life in your years."


def test_states_times_head_are_the_logits_of_transformers_and_the_benchmark_reads_them(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=False)).eval()
    model.save_pretrained(tmp_path)
    ByteTokenizer().load().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    file = tmp_path / "states.npz"
    options = ["--tokens=64", "--row_tokens=32", f"--output={file}"]
    assert hidden_states.main([str(tmp_path), str(tmp_path / "text.txt"), *options]) == 0
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(int) + 3
    with np.load(file) as found, torch.no_grad():
        want = model(torch.tensor(ids[:64].reshape(2, 32))).logits.reshape(64, -1).numpy()
        got = found["hidden"] @ found["head"].T
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)  # bfloat16
        np.testing.assert_array_equal(found["targets"], ids[1:65])
    monkeypatch.setattr(bench, "timed", lambda call, wait, runs: (wait(call()), 1.0)[1])
    bench.main([f"--arrays={file}", "--no-peers", "--dtype=float32"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert {row["backend"] for row in rows} >= {"bare product", "xla"} and {row["spec"] for row in rows} == {str(file)}
    assert jax.devices()[0].device_kind == rows[0]["device"]


def test_a_short_text_and_rows_that_do_not_fit_are_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    base = [str(tmp_path), str(tmp_path / "text.txt"), f"--output={tmp_path / 'states.npz'}"]
    assert hidden_states.main([*base, "--tokens=65", "--row_tokens=32"]) == 1
    assert "--tokens=65 must be a multiple" in capsys.readouterr().err
