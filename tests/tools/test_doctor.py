"""The doctor's findings, on this machine and on made-up trouble."""

import json
import subprocess
import sys
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.tools import doctor
from jaxrl_llm.tools.doctor import Finding

ROOT = Path(__file__).parents[2]


def only(findings):
    (finding,) = findings
    return finding


def test_this_environment_passes_and_the_exit_code_says_so(capsys, tmp_path):
    assert doctor.main(["--run_dir", str(tmp_path / "runs" / "a")]) == 0
    shown = capsys.readouterr().out
    assert f"jax {jax.__version__}" in shown and "import gin finds gin-config" in shown
    assert "8 x cpu (cpu)" in shown and "compiled and ran on 8 device(s)" in shown
    assert shown.splitlines()[-1].endswith(" 0 FAIL")
    assert not (tmp_path / "runs").exists()


def test_the_command_says_what_failed_with_exit_code_1(tmp_path):
    command = [sys.executable, "-m", "jaxrl_llm.tools.doctor", "--run_dir", str(tmp_path), "--model", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1 and f"{tmp_path} has no config.json" in failed[0]


def test_an_old_python_fails():
    assert only(doctor.check_python((3, 10, 4))).status == "FAIL"
    assert only(doctor.check_python((3, 12, 0))).status == "OK"


def test_missing_and_outdated_packages_are_named():
    missing, old, fitting = doctor.check_packages(["no-such-package>=1", "numpy<1", "jax>=0.10"])
    assert (missing.status, missing.check, missing.found) == ("FAIL", "no-such-package", "not installed")
    assert (old.status, old.check) == ("FAIL", "numpy") and old.found.endswith("needs <1")
    assert fitting == Finding(status="OK", check="packages", found=f"jax {jax.__version__}")


def test_requirements_are_the_projects_own():
    named = {line.partition(">")[0].partition("[")[0] for line in doctor.requirements()}
    assert {"jax", "flax", "grain", "gin-config", "transformers"} <= named
    assert not named & {"torch", "pytest", "vllm"}


@pytest.mark.parametrize("spec", [None, ModuleSpec("gin", None, is_package=True)])
def test_the_folder_gin_is_not_taken_for_gin_config(monkeypatch, spec):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    finding = only(doctor.check_gin())
    assert (finding.status, finding.advice) == ("FAIL", "pip install gin-config")


def test_an_unused_gpu_is_pointed_out(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    finding = only(doctor.check_devices())
    assert finding.status == "WARN" and "jaxrl-llm[gpu]" in finding.advice


def test_a_run_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    finding = only(doctor.check_disk(tmp_path / "file"))
    assert finding.status == "FAIL" and "not writable" in finding.found and "RUN_DIR" in finding.advice


@pytest.mark.parametrize(("free", "status"), [(30e9, "OK"), (5e9, "WARN"), (0.5e9, "FAIL")])
def test_little_disk_space_is_said(monkeypatch, tmp_path, free, status):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(1e12, 1e12 - free, free))
    finding = only(doctor.check_disk(tmp_path))
    assert (finding.status, finding.found) == (status, f"{tmp_path}: {free / 1e9:.1f} GB free")


@pytest.fixture
def server(monkeypatch):
    """Answers as a vLLM server does; the version is what the test puts into the list."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    version = ["0.30.1"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in ("/health", "/version") else 404)
            self.end_headers()
            if self.path == "/version":
                self.wfile.write(json.dumps({"version": version[0]}).encode())

        def log_message(self, *args):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}", version
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_vllm_server_of_a_known_version_is_well(server):
    url, _ = server
    expected = Finding(status="OK", check="vLLM", found=f"{url}: version 0.30.1")
    assert only(doctor.check_server(f"{url}/")) == expected


@pytest.mark.parametrize("version", ["0.9.2", "1.0.0", "nightly"])
def test_an_unknown_version_of_vllm_is_a_warning(server, version):
    url, served = server
    served[0] = version
    finding = only(doctor.check_server(url))
    assert finding.status == "WARN" and "0.18 to 0.32" in finding.advice


def test_a_server_that_does_not_answer_fails(server):
    finding = only(doctor.check_server("http://127.0.0.1:1", timeout_s=2))
    assert finding.status == "FAIL" and "http://127.0.0.1:1" in finding.found
    url, _ = server
    assert only(doctor.check_server(f"{url}/wrong")).status == "FAIL"


def test_a_model_folder_is_looked_through(tmp_path):
    from jaxrl_llm.data.tokenizer import CharTokenizer

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 32}
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(family | sizes | heads))
    save_file({"model.embed_tokens.weight": np.zeros((32, 16), np.float32)}, tmp_path / "model.safetensors")
    CharTokenizer(alphabet="abc", chat_template="").load().save_pretrained(tmp_path)
    model, counted, weights, tokenizer = doctor.check_model(tmp_path)
    assert (model.status, model.found) == ("OK", f"{tmp_path}: Qwen2, 3 layers of width 16")
    assert counted.check == "parameters" and counted.found.endswith(" billion")
    assert weights.status == "OK" and weights.found.startswith("1 safetensors file(s)")
    assert tokenizer.status == "WARN" and "chat_template" in tokenizer.advice


HYBRID = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "initializer_range": 0.1,
}  # fmt: skip


def test_a_model_folder_is_compared_with_transformers(tmp_path, monkeypatch):
    import transformers

    theirs = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**HYBRID))
    theirs.save_pretrained(tmp_path)
    same = only(doctor.check_logits(tmp_path))
    assert (same.status, same.check) == ("OK", "log-probs") and "of 96 tokens" in same.found
    assert 0 < float(same.found.split()[2]) < 1e-4
    with monkeypatch.context() as patched:  # as if transformers took the model for another
        patched.setattr(doctor, "_transformers_log_probs", lambda folder, tokens: np.full((1, 96, 61), -np.log(61)))
        other = only(doctor.check_logits(tmp_path))
    assert other.status == "FAIL" and "more, as 96 tokens have, is an error of this project" in other.advice
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.bias": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    (failed,) = doctor.examine([("model", lambda: doctor.check_logits(tmp_path))])
    assert failed.status == "FAIL" and "model.layers.0.mlp.bias is unexpected" in failed.found


def test_a_model_is_not_compared_without_memory_or_pytorch(tmp_path, monkeypatch):
    import transformers

    transformers.Qwen3NextConfig(**HYBRID, architectures=["Qwen3NextForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setattr(doctor, "free_memory", lambda: 1e5)
    finding = only(doctor.check_logits(tmp_path))
    assert finding.status == "WARN" and "takes 0.0 GB" in finding.found
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    finding = only(doctor.check_logits(tmp_path))
    assert finding.status == "WARN" and "PyTorch is not installed" in finding.found


def test_a_check_that_raises_has_failed_and_the_others_go_on():
    def broken():
        raise RuntimeError("no\n  driver")

    failed, fine = doctor.examine([("devices", broken), ("Python", doctor.check_python)])
    assert (failed.status, failed.check, failed.found) == ("FAIL", "devices", "RuntimeError: no driver")
    assert fine.status == "OK"


def test_advice_stands_below_its_finding():
    findings = [
        Finding(status="OK", check="gin", found="here"),
        Finding(status="FAIL", check="jit", found="x", advice="y"),
    ]
    assert doctor.table(findings).splitlines() == ["OK    gin  here", "FAIL  jit  x", "           -> y"]
