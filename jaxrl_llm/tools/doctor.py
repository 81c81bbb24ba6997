"""Checks whether a run can work here: `python -m jaxrl_llm.tools.doctor [--gin_file FILE] [--run_dir DIR] [--model FOLDER] [--server URL]`.

It prints one line for each check, with advice where something is wrong; the exit code is 1 where a check failed.
"""

import importlib.metadata
import importlib.util
import json
import secrets
import shutil
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache, xla_flags

PYTHON_LEAST = (3, 11)
VLLM_LEAST, VLLM_NEWEST = (0, 18), (0, 32)
FREE_FAIL, FREE_WARN = 1e9, 20e9  # bytes
COMPARED_TOKENS, MOST_APART = 96, 1e-3  # tokens to compare, and the allowed difference of log-probs, in nats


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check.

    Attributes:
      status: "OK", "WARN" (it works, or may work) or "FAIL".
      check: what was checked.
      found: the observation.
      advice: what to do; empty where all is well.
    """

    status: Literal["OK", "WARN", "FAIL"]
    check: str
    found: str
    advice: str = ""


Check = Callable[[], Iterator[Finding]]


def judged(check: str, good: bool, found: str, advice: str, bad: Literal["WARN", "FAIL"] = "FAIL") -> Finding:
    """Returns a finding that is OK where it is `good`, and otherwise `bad` with the advice."""
    return Finding(status="OK" if good else bad, check=check, found=found, advice="" if good else advice)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    found, least = ".".join(map(str, version)), ".".join(map(str, PYTHON_LEAST))
    yield judged("Python", version >= PYTHON_LEAST, found, f"use Python {least} or newer")


def requirements() -> list[str]:
    """Returns the project's requirements: those of the checkout where there is one, else of the installed distribution."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        return list(tomllib.loads(project.read_text())["project"]["dependencies"])
    return [r for r in importlib.metadata.requires("jaxrl-llm") or () if "extra ==" not in r]


def check_packages(required: Sequence[str] | None = None) -> Iterator[Finding]:
    """Reports every requirement that is missing or out of its range, and the versions of the others."""
    from packaging.requirements import Requirement

    advice = "pip install -U jaxrl-llm, or pip install -e . in a checkout"
    fitting = []
    for line in requirements() if required is None else required:
        need = Requirement(line)
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(status="FAIL", check=need.name, found="not installed", advice=advice)
            continue
        if need.specifier.contains(version, prereleases=True):
            fitting.append(f"{need.name} {version}")
        else:
            wanted = f"{version}, needs {need.specifier}"
            yield Finding(status="FAIL", check=need.name, found=wanted, advice=advice)
    if fitting:
        yield Finding(status="OK", check="packages", found=", ".join(fitting))


def check_gin() -> Iterator[Finding]:
    """Checks that `import gin` finds gin-config: where that is missing, Python imports any folder named gin."""
    spec = importlib.util.find_spec("gin")
    good, where = spec is not None and spec.origin is not None, "gin-config"
    if not good:
        where = "nothing" if spec is None else f"the folder {next(iter(spec.submodule_search_locations or []), 'gin')}"
    yield judged("gin", good, f"import gin finds {where}", "pip install gin-config")


def check_devices() -> Iterator[Finding]:
    """Reports the devices that JAX sees, and accelerators of this machine that it does not see."""
    import jax

    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    found = f"{len(devices)} x {', '.join(kinds)} ({devices[0].platform}), {jax.process_count()} process(es)"
    advice = ""
    if devices[0].platform == "cpu":
        if shutil.which("nvidia-smi"):
            advice = "this machine has NVIDIA's tools: pip install 'jaxrl-llm[gpu]' to use its GPUs"
        elif xla_flags.tpus():
            advice = "this machine has TPU devices: pip install 'jaxrl-llm[tpu]' to use them"
    yield Finding(status="WARN" if advice else "OK", check="devices", found=found, advice=advice)
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            size = f"{stats['bytes_limit'] / 1e9:.1f} GB, {stats.get('bytes_in_use', 0) / 1e9:.1f} GB in use"
            yield Finding(status="OK", check=f"memory of {device}", found=size)


def check_compile() -> Iterator[Finding]:
    """Compiles and runs a small program on every device."""
    import jax
    import jax.numpy as jnp

    begin = time.perf_counter()
    salt = secrets.randbelow(2**20)  # makes this program differ from every earlier program in the cache
    program = jax.jit(lambda x: (x @ x).sum() + salt)
    # Entries of 1/16 make every sum exact, at any precision of the product.
    values = [float(program(jax.device_put(jnp.full((256, 256), 1 / 16), device))) for device in jax.devices()]
    seconds = time.perf_counter() - begin
    good = all(value == 256.0**3 / 256 + salt for value in values)
    found = f"compiled and ran on {len(values)} device(s) in {seconds:.1f} s" if good else f"wrong result: {values}"
    yield judged("jit", good, found, "reinstall jax and the accelerator's driver so that their versions match")


def check_disk(run_dir: Path) -> Iterator[Finding]:
    """Checks that a run may write to its folder, and how much space is free there."""
    place = run_dir.expanduser().absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as error:
        found = f"{place} is not writable ({error.strerror})"
        yield Finding(status="FAIL", check="run folder", found=found, advice="set RUN_DIR to a folder you may write to")
        return
    free = shutil.disk_usage(place).free
    status: Literal["OK", "WARN", "FAIL"] = "OK"
    if free < FREE_WARN:
        status = "FAIL" if free < FREE_FAIL else "WARN"
    advice = "free space, or set RUN_DIR elsewhere: a checkpoint takes 12 bytes a parameter" if status != "OK" else ""
    yield Finding(status=status, check="run folder", found=f"{place}: {free / 1e9:.1f} GB free", advice=advice)


def check_run(files: Sequence[str], bindings: Sequence[str]) -> Iterator[Finding]:
    """Reports the kernels, dtypes, sampler and isolation of a run on this machine; fails where one is much too slow."""
    from jaxrl_llm.train.describe import describe

    run, _ = command_line.build(files, bindings)
    for line in describe(run, run.policy.policy(run.partitioner())):
        name, _, found = line.partition(" ")
        yield Finding(status="OK", check=name, found=found.strip())


def check_server(url: str, timeout_s: float = 10.0) -> Iterator[Finding]:
    """Checks that a vLLM server answers and that its version is known to work."""
    url = url.rstrip("/")
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("no address that begins with http:// or https://")
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s):  # nosec B310
            pass
        with urllib.request.urlopen(f"{url}/version", timeout=timeout_s) as answer:  # nosec B310
            version = str(json.load(answer)["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        advice = "start it (vllm serve MODEL --host 127.0.0.1 --port PORT), or correct the URL"
        yield Finding(status="FAIL", check="vLLM", found=f"{url}: {error}", advice=advice)
        return
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    least, newest = (".".join(map(str, v)) for v in (VLLM_LEAST, VLLM_NEWEST))
    advice, good = f"versions {least} to {newest} are known to work", VLLM_LEAST <= numbers <= VLLM_NEWEST
    yield judged("vLLM", good, f"{url}: version {version}", advice, "WARN")


def check_model(folder: Path) -> Iterator[Finding]:
    """Checks a Hugging Face folder: architecture, weights, tokenizer, chat template."""
    from jaxrl_llm.data.tokenizer import PretrainedTokenizer
    from jaxrl_llm.metrics import flops
    from jaxrl_llm.models import hf_config, hf_weights

    architecture = hf_weights.architecture(folder)
    described = f"{architecture.layers} layers of width {architecture.width}"
    if architecture.delta is not None:
        described += f", {sum(architecture.recurrent)} of which hold a recurrent state"
    if (config := hf_weights.config_of(folder)) is not hf_config.text_of(config):
        described += "; the text model of a vision-language model, whose other parts are left out"
    yield Finding(status="OK", check="model", found=f"{folder}: {type(architecture).__name__}, {described}")
    resident, active = (flops.parameters(architecture, resident=kind) / 1e9 for kind in (True, False))
    counted = f"{resident:.3g} billion"
    if architecture.experts is not None:
        counted += (
            f" resident, {active:.3g} billion active for a token, which goes to {architecture.experts.chosen} of "
        )
        counted += f"{architecture.experts.count} experts in {sum(architecture.sparse)} of {architecture.layers} layers"
    yield Finding(status="OK", check="parameters", found=counted)
    weights = list(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights)
    found = f"{len(weights)} safetensors file(s), {size / 1e9:.2f} GB" if weights else "no *.safetensors"
    yield judged("weights", bool(weights), found, "save the model with safe_serialization=True")
    tokenizer = PretrainedTokenizer(path=str(folder)).load()
    found = f"{len(tokenizer)} tokens, {'with a' if tokenizer.chat_template else 'no'} chat template"
    advice = "set tokenizer.PretrainedTokenizer.chat_template, or use a data template that gives plain text"
    yield judged("tokenizer", bool(tokenizer.chat_template), found, advice, "WARN")


def check_logits(folder: Path) -> Iterator[Finding]:
    """Compares the log-probs of random tokens with those of transformers, both in float32; they span more than a chunk of recurrent layers.

    Without PyTorch or without the memory for both models nothing is compared, and the finding says so.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.distributed.mesh import MeshConfig, Partitioner
    from jaxrl_llm.metrics import flops
    from jaxrl_llm.models import hf_weights
    from jaxrl_llm.models.policy import Policy

    architecture = hf_weights.architecture(folder)
    if importlib.util.find_spec("torch") is None:
        found = "not compared with transformers: PyTorch is not installed"
        yield Finding(status="WARN", check="log-probs", found=found, advice="pip install torch, for this check alone")
        return
    if architecture.experts is not None and architecture.experts.choice_bias:
        found = "not compared with transformers, which has no place for the bias by which experts are chosen"
        yield Finding(status="OK", check="log-probs", found=found)
        return
    needed, free = 4.0 * flops.parameters(architecture, resident=True), free_memory()
    device = jax.devices()[0]
    here = (device.memory_stats() or {}).get("bytes_limit")
    if needed * (2 if here is None else 1) > free or (here is not None and needed > here):
        found = (
            f"not compared with transformers: each of the two models takes {needed / 1e9:.1f} GB of memory in float32"
        )
        advice = "compare on a machine with more memory, or a smaller model of the family"
        yield Finding(status="WARN", check="log-probs", found=found, advice=advice)
        return
    policy = Policy(architecture, Partitioner.create(MeshConfig(fsdp=1), [device]))
    params = hf_weights.load(policy, folder)
    length = min(COMPARED_TOKENS, architecture.max_positions)
    tokens = np.random.default_rng(0).integers(0, architecture.vocabulary_size, (1, length), np.int32)
    places = (tokens, np.arange(length, dtype=np.int32)[None], np.ones_like(tokens))

    @jax.jit
    def ours(params: Any) -> jax.Array:
        return jax.nn.log_softmax(policy.hidden(params, *map(jnp.asarray, places)) @ policy.head(params).T)

    with jax.default_matmul_precision("highest"):
        apart = np.abs(np.asarray(ours(params)) - _transformers_log_probs(folder, tokens)).max(axis=(0, 2))
    found = f"at most {apart.max():.1e} from transformers, of {length} tokens in float32"
    advice = f"up to {MOST_APART:g} is rounding; more, as {np.sum(apart > MOST_APART)} tokens have, is an error of this project: "
    advice += "report it with the folder's config.json"
    if architecture.experts is not None:
        advice += ". A near tie between two experts moves one token and those after it, by chance"
    yield judged("log-probs", bool(apart.max() <= MOST_APART), found, advice)


def _transformers_log_probs(folder: Path, tokens: Any) -> Any:
    """Returns log-probs [1, T, V] of all next tokens by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True
    )
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens).long()).logits.log_softmax(-1).numpy()


def free_memory() -> float:
    """Returns the bytes of memory still available on this machine; infinity where the system does not report them."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else float("inf")


def check_folder(folder: Path) -> Iterator[Finding]:
    """Checks a model's folder, and compares it with transformers."""
    yield from check_model(folder)
    yield from check_logits(folder)


def examine(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Yields the findings of all checks; a check that raises counts as failed, and the others continue."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())}"
            yield Finding(status="FAIL", check=name, found=found, advice="see the message; the other checks went on")


def table(findings: Sequence[Finding]) -> str:
    """Formats one line for each finding, with its advice below it."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:4}  {finding.check:{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':{width + 8}}-> {finding.advice}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and prints the table; returns 1 where one failed."""
    parser = command_line.parser("tools.doctor", __doc__)
    parser.add_argument("--run_dir", type=Path, default=Path("runs"), help="where a run would write")
    parser.add_argument("--gin_file", action="append", default=[], metavar="FILE", help="gin file of a run to look at")
    parser.add_argument(
        "--gin", action="append", default=[], metavar="BINDING", help="binding that overrides the files"
    )
    parser.add_argument("--model", type=Path, help="a Hugging Face folder to look at, and to compare with transformers")
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="a vLLM server; may be repeated")
    arguments = parser.parse_args(argv)
    compilation_cache.keep()
    checks: list[tuple[str, Check]] = [
        ("Python", check_python),
        ("packages", check_packages),
        ("gin", check_gin),
        ("devices", check_devices),
        ("jit", check_compile),
        ("run folder", partial(check_disk, arguments.run_dir)),
    ]
    if arguments.gin_file:
        checks.append(("run", partial(check_run, arguments.gin_file, arguments.gin)))
    if arguments.model:
        checks.append(("model", partial(check_folder, arguments.model)))
    checks += [("vLLM", partial(check_server, url)) for url in arguments.server]
    findings = list(examine(checks))
    print(table(findings))
    counts = {status: sum(finding.status == status for finding in findings) for status in ("OK", "WARN", "FAIL")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
