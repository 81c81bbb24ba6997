"""What SECURITY.md says of the code, checked: nothing that comes from data, models or the network is run, and no door is open."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.data.tokenizer import PretrainedTokenizer
from jaxrl_llm.metrics.prometheus import Prometheus
from jaxrl_llm.models import hf_weights
from jaxrl_llm.rewards.services import http_service
from jaxrl_llm.samplers.vllm_proxy import Proxy

ROOT = Path(__file__).parent.parent
FILES = sorted(f for folder in ("jaxrl_llm", "kernels", "data", "eval") for f in (ROOT / folder).rglob("*.py"))

UNPICKLE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUN = {"eval", "exec", "compile", "__import__"}
SHELL = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
LOADERS = {("yaml", "load"), ("yaml", "unsafe_load"), ("torch", "load")}
KEYWORDS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False, "verify": False}
# The pipe of verifiers: the worker unpickles what the run's own process sends, never the other way round.
# The sandbox runs a model's program, or its cells, in a process that is shut in, and a data set's test in another one.
# Shards of other frameworks' checkpoints are read with weights_only=True: tensors, and the classes of torch's that describe shards.
EXCEPTIONS = {
    ("jaxrl_llm/models/verl_shards.py", "torch.load"),
    ("jaxrl_llm/rewards/services/worker.py", "recv"),
    ("jaxrl_llm/rewards/services/untrusted/program.py", "exec"),
    ("jaxrl_llm/rewards/services/untrusted/program.py", "compile"),
    ("jaxrl_llm/rewards/services/untrusted/cells.py", "exec"),
    ("jaxrl_llm/rewards/services/untrusted/cells.py", "compile"),
    ("jaxrl_llm/rewards/services/untrusted/judge.py", "exec"),
    ("jaxrl_llm/rewards/services/untrusted/judge.py", "compile"),
}


def offences(file: Path) -> Iterator[str]:
    """What a file does that it must not."""
    name = str(file.relative_to(ROOT))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"{name}:{node.lineno} imports {m}" for m in modules if m.partition(".")[0] in UNPICKLE)
        if not isinstance(node, ast.Call):
            continue
        where, called = f"{name}:{node.lineno}", node.func
        if isinstance(called, ast.Name) and called.id in RUN and (name, called.id) not in EXCEPTIONS:
            yield f"{where} calls {called.id}"
        dotted = ast.unparse(called)
        safe = (name, dotted) in EXCEPTIONS and any(ast.unparse(k) == "weights_only=True" for k in node.keywords)
        if tuple(dotted.split(".")) in SHELL | LOADERS and not safe:
            yield f"{where} calls {dotted}"
        if (
            isinstance(called, ast.Attribute)
            and called.attr == "recv"
            and not node.args
            and (name, "recv") not in EXCEPTIONS
        ):
            yield f"{where} unpickles from a connection"
        for keyword in node.keywords:
            if keyword.arg in KEYWORDS and ast.unparse(keyword.value) == str(KEYWORDS[keyword.arg]):
                yield f"{where} passes {ast.unparse(keyword)}"


def test_nothing_unpickles_evaluates_or_starts_a_shell():
    assert [found for file in FILES for found in offences(file)] == []


def test_every_pretrained_thing_of_transformers_is_loaded_without_its_code():
    calls = [
        (file, node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
        and isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Auto")
    ]  # fmt: skip
    assert len(calls) >= 4
    for file, call in calls:
        refused = [
            k for k in call.keywords if k.arg == "trust_remote_code" and getattr(k.value, "value", None) is False
        ]
        assert refused, f"{file.relative_to(ROOT)}:{call.lineno} lets transformers ask whether to run a model's code"


@pytest.mark.parametrize(
    "text", ["eval(x)", "import pickle", "subprocess.run(c, shell=True)", "np.load(f, allow_pickle=True)"]
)
def test_the_check_sees_what_it_is_for(text, tmp_path, monkeypatch):
    monkeypatch.setattr("test_security.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(text)
    assert len(list(offences(tmp_path / "module.py"))) == 1


def test_services_listen_off_loopback_with_a_token_alone(monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    for host in ("0.0.0.0", "10.0.0.5", "::", "a.host.example"):
        with pytest.raises(ValueError, match="token"):
            http_service.token_of(host, "")
    for host in ("0.0.0.0", "10.0.0.5", "::"):
        with pytest.raises(ValueError, match="token"):
            Prometheus(host=host)
    with pytest.raises(ValueError, match="A_TOKEN is not set"):
        http_service.token_of("127.0.0.1", "A_TOKEN")
    with pytest.raises(ValueError, match="at least 16"):
        Proxy(server="http://127.0.0.1:8000", token="short")
    with pytest.raises(ValueError, match="not on loopback"):
        Proxy(server="http://10.0.0.5:8000", token="0123456789abcdef")


def test_defaults_listen_on_loopback():
    """Every default of an option or a field that names where to listen."""
    found = []
    for file in FILES:
        for match in re.finditer(
            r"""(?<!\w)host(?:: str)?["']?\s*[=,]\s*(?:default=)?["']([\w.:]+)["']""", file.read_text()
        ):
            found.append((str(file.relative_to(ROOT)), match[1]))
    assert {host for _, host in found} <= {"127.0.0.1", "localhost"}, found
    assert len(found) >= 3


def test_a_model_of_the_hub_can_be_pinned_to_a_commit(tmp_path, monkeypatch):
    asked = []

    def download(name, *, revision=None, **_):
        asked.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    def loaded(name, *, revision, **_):
        asked.append((name, revision))
        return SimpleNamespace(eos_token_id=None)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded)
    monkeypatch.setattr("transformers.GenerationConfig.from_pretrained", loaded)
    assert hf_weights.locate("owner/name@0a1b2c") == tmp_path and hf_weights.locate("owner/name") == tmp_path
    for path in ("owner/name@0a1b2c", "owner/name", str(tmp_path / "a@b")):
        (tmp_path / "a@b").mkdir(exist_ok=True)
        (tmp_path / "a@b" / "tokenizer.json").touch()
        PretrainedTokenizer(path=path).load()
    models = [("owner/name", "0a1b2c"), ("owner/name", None)]
    loads = [load for load in (("owner/name", "0a1b2c"), ("owner/name", "main")) for _ in ("tokenizer", "stop ids")]
    assert asked == [*models, *loads, (str(tmp_path / "a@b"), "main")]
