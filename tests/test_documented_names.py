"""The pages on servers, hosts and clusters name settings, metrics, files and sizes that exist."""

import re
from pathlib import Path

import pytest

from jaxrl_llm.distributed import processes

ROOT = Path(__file__).parents[1]
PAGES = ("vllm", "vllm_servers", "hosts", "clusters")
FOLDERS = ("jaxrl_llm", "kernels", "data", "eval", "gin", "launch", "tests")
OTHERS = {
    "SITE",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "TRANSFORMERS_OFFLINE",
}  # of the reader's shell, of JAX and of transformers
WRITTEN = {"config.gin", "health.json", "log.jsonl", "metrics.jsonl", "manifest.json", "config.json", "stacks.txt", "servers.txt"}  # fmt: skip


@pytest.fixture(scope="module")
def code() -> str:
    kinds = (".py", ".gin", ".sh", ".yaml", ".sbatch")
    files = (
        f
        for folder in FOLDERS
        for f in (ROOT / folder).rglob("*")
        if f.is_file() and (f.suffix in kinds or f.stem == "Dockerfile")
    )
    return "\n".join(f.read_text(errors="replace") for f in files if f != Path(__file__))


@pytest.fixture(params=PAGES)
def spans(request: pytest.FixtureRequest) -> list[str]:
    """What a page sets in the type of code, a line or a command each."""
    text = (ROOT / "docs" / "howto" / f"{request.param}.md").read_text()
    indented = re.findall(r"^    (.*)$", text, re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", text), *indented]


def test_macros_and_variables_that_a_page_names_are_read_somewhere(spans: list[str], code: str) -> None:
    named = {name for span in spans for name in re.findall(r"\b([A-Z][A-Z0-9_]{3,})(?==| =|`|$)", span)}
    assert {name for name in named if not re.search(rf"\b{name}\b", code)} <= OTHERS


def test_components_and_fields_that_a_page_names_exist(spans: list[str], code: str) -> None:
    named = {pair for span in spans for pair in re.findall(r"\b\w+\.([A-Z][a-z]\w+)\.([a-z]\w*)\b", span)}
    for component, field in named:
        assert re.search(rf"^class {component}\b", code, re.MULTILINE), component
        assert re.search(rf"^    {field}: ", code, re.MULTILINE), f"{component}.{field}"


def test_files_that_a_page_names_exist(spans: list[str]) -> None:
    named = {name for span in spans for name in re.findall(r"(?<![\w/.'$])[\w/]+\.(?:py|gin|sh|yaml|md)\b", span)}
    places = (".", "docs/howto", "jaxrl_llm", "jaxrl_llm/publication", "tests/distributed")
    assert not {n for n in named - WRITTEN if not any((ROOT / place / n).is_file() for place in places)}


def test_the_page_on_hosts_gives_the_sizes_of_what_travels() -> None:
    page = " ".join((ROOT / "docs" / "howto" / "hosts.md").read_text().split())
    assert f"up to {processes.SMALL >> 20} MiB over JAX's coordination service" in page
    assert f"in parts of {processes.PART >> 20} MiB" in page
