"""The page on recipes names files, fields and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "recipes.md").read_text()


def test_every_test_that_the_page_names_exists():
    files = {file.name: file for file in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(?:tests/\w+/)?(test_\w+\.py)(?:::(test_\w+))?`", PAGE)
    assert len(named) > 30
    for file, name in named:
        assert file in files, file
        assert not name or re.search(rf"^def {name}\(", files[file].read_text(), re.MULTILINE), f"{file}::{name}"


def test_every_file_and_field_that_the_page_names_exists():
    for name in re.findall(r"`((?:gin|launch|rewards|data|eval|tools)/[\w/.*]+\.(?:gin|sh|py))`", PAGE):
        assert list(ROOT.glob(name)) or list(ROOT.glob(f"jaxrl_llm/{name}")), name
    for kind, field in re.findall(r"`\w+\.([A-Z]\w+)\.(\w+)`", PAGE):
        classes = [f.read_text() for f in (ROOT / "jaxrl_llm").rglob("*.py") if f"class {kind}" in f.read_text()]
        assert any(re.search(rf"^    {field}: ", text, re.MULTILINE) for text in classes), f"{kind}.{field}"
