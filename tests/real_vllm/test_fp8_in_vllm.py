"""A real server that quantizes by itself takes versions in bfloat16: it computes with their rounding to fp8, as after its start."""

import ml_dtypes
import numpy as np
import pytest
import torch
from by_transformers import Reference
from published import write_version
from serving import ON_TWO_CORES, TINY_ON_CPU, Server, serving
from tiny_qwen2 import VOCABULARY, config, shapes, weights, write_model

from jaxrl_llm.publication.canary import LISTED, gap, limit
from jaxrl_llm.publication.manifest import Canary

LARGEST = 448.0
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, 100)]
NARROW = [name for name in shapes(False) if name.endswith("proj.weight")]


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrow")
    options = [*TINY_ON_CPU[2:], "--dtype", "bfloat16", "--quantization", "fp8_per_channel"]
    options += ["--worker-extension-cls", "jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension"]
    model = write_model(folder / "model", tied=False, dtype="bfloat16")
    with serving(model, folder / "log", *options, VLLM_SERVER_DEV_MODE="1", **ON_TWO_CORES) as started:
        yield started


def narrow(version: int) -> dict[str, np.ndarray]:
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in weights(version).items()}


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Rounds each row to fp8 with a scale of its own."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def reference(version: int, rounded: bool) -> Reference:
    """The version by transformers; `rounded`: with matrices and what they multiply in fp8."""
    found = Reference({name: array.astype(np.float32) for name, array in narrow(version).items()})
    for name, layer in found.model.named_modules() if rounded else ():
        if f"{name}.weight" in NARROW:
            layer.weight.data = by_rows(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, given: (by_rows(given[0]),))
    return found


def explained(found: np.ndarray, version: int) -> float:
    """Correlation of what the server says beside the exact log-probs with what rounding makes of them; about 0 of another rounding."""
    exact, rounded = (reference(version, how).logprobs(PROMPT) for how in (False, True))
    return float(np.corrcoef(found - exact, rounded - exact)[0, 1])


def committed(server: Server, path: str, version: int) -> dict:
    assert server.stage(path, version)["state"] == "staged", server.method("stage_status")
    server.call("/pause?mode=keep&clear_cache=true")
    answer = server.method("commit", version=version)
    server.call("/update_weight_version", {"new_version": str(version)})
    server.call("/resume")
    server.call("/reset_prefix_cache")
    return answer


def test_a_server_in_fp8_computes_with_the_rounding_of_what_is_published(narrow_server, tmp_path):
    paths = [write_version(tmp_path, version, narrow(version), config=config(False)) for version in range(2)]
    found = []
    for version in (1, 0, 1):
        answer = committed(narrow_server, paths[version], version)
        assert (answer["version"], answer["error"]) == (version, "")
        # vLLM packs the embedding's other copy, the head, for a CPU
        assert answer["quantized"] == len(NARROW) and answer["unchecked"] <= 1
        assert 0.01 < answer["rounding"] < 0.04
        found.append(narrow_server.score(PROMPT))
    np.testing.assert_array_equal(found[0], found[2])  # the first load of a fresh server, and one after others
    for version, said in ((1, found[0]), (0, found[1])):
        assert explained(said, version) > 0.6  # six deviations from 0 at 99 positions
    exact = reference(1, False)
    assert np.abs(found[0] - exact.logprobs(PROMPT)).mean() < 0.5 < 1 < np.abs(found[1] - exact.logprobs(PROMPT)).mean()
    check_canary(narrow_server, exact)


def check_canary(server: Server, exact: Reference) -> None:
    """The canary's limit for fp8 holds the rounding."""
    with torch.no_grad():
        logits = exact.model(torch.tensor([PROMPT])).logits[0, :-1].float()
    logprobs, spread = torch.log_softmax(logits, -1), logits.std(-1).numpy()
    best = logprobs.argmax(-1)
    likely = logprobs.gather(1, best[:, None])[:, 0].numpy()
    canary = Canary(
        tokens=tuple(PROMPT), logprobs=tuple(exact.logprobs(PROMPT).tolist()), likely=tuple(best.tolist()),
        likely_logprobs=tuple(likely.tolist()), limit=limit(likely, spread, 3, ("bfloat16",), fp8=True),
    )  # fmt: skip
    listed = server.generate(PROMPT, 1, temperature=0.0, prompt_logprobs=LISTED)["prompt"][1:]
    said = [at.get(str(int(token)), {"logprob": -np.inf})["logprob"] for at, token in zip(listed, best, strict=True)]
    text = [at[str(token)]["logprob"] for at, token in zip(listed, PROMPT[1:], strict=True)]
    ratio = gap(canary, np.array(text), np.array(said)).ratio
    print(f"fp8: ratio {ratio:.3f}, limit {canary.limit:.3f}")
    assert ratio <= canary.limit
