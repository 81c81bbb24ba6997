"""The site builds without a warning, holds every page, and refuses a link that leads nowhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
needs_mkdocs = pytest.mark.skipif(
    not (importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings")),
    reason="mkdocs is not here: pip install 'jaxrl-llm[docs]'",
)


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, cwd=config.parent, capture_output=True, text=True, timeout=500)


@pytest.fixture
def hooks():
    found = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@needs_mkdocs
def test_a_name_in_a_cell_breaks_after_its_dots_and_underscores_alone(hooks):
    page = "<p><code>a.b_c</code></p><td>1.5 <code>a.b_c</code> x_y</td>\n<td align=left><code>p/q.</code></td>"
    assert hooks.on_page_content(page) == (
        "<p><code>a.b_c</code></p><td>1.5 <code>a.<wbr>b_<wbr>c</code> x_y</td>\n<td align=left><code>p/<wbr>q.</code></td>"
    )


@needs_mkdocs
def test_a_block_is_titled_by_its_file_or_by_what_it_needs(hooks):
    page = "<!-- file: a.py -->\n```python\nx\n```\n<!-- needs: a GPU -->\n```bash\ny\n```\n<!-- ci: 9 => 2 -->\n```bash\n9\n```\n"
    assert hooks.titled(page) == (
        '```python title="a.py"\nx\n```\n```bash title="needs a GPU"\ny\n```\n<!-- ci: 9 => 2 -->\n```bash\n9\n```\n'
    )


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds_without_a_warning(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    algorithms = (tmp_path / "site" / "reference" / "api" / "algorithms.html").read_text()
    assert "jaxrl_llm.algorithms.grpo.GRPO" in algorithms and "Group-relative policy optimisation" in algorithms
    data = (tmp_path / "site" / "reference" / "api" / "data.html").read_text()
    assert "jaxrl_llm.data.gsm8k.GSM8K" in data  # data/ is a link, which mkdocstrings does not follow by itself
    reward = (tmp_path / "site" / "tutorial" / "reward.html").read_text()
    assert '<span class="filename">my_reward.py</span>' in reward
    assert 'class="language-bash highlight"' in reward  # by which the style sheet wraps long commands
    held = (tmp_path / "site" / "howto" / "clusters.html").read_text()
    assert 'href="../security.html"' in held  # on the site, a link to a file of the root leads to its page


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.parametrize("text", ["[x](nowhere.md)", "[x](other.md#nowhere)"])
def test_a_link_that_leads_nowhere_fails_the_build(text, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# B\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    validation = settings[settings.index("validation:") : settings.index("nav:")]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: test\n{validation}")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[x](other.md#b)\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode == 0


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in PAGES} <= listed


def test_every_room_has_a_page_of_its_interface():
    rooms = {folder.name for folder in (ROOT / "jaxrl_llm").iterdir() if folder.is_dir() and list(folder.glob("*.py"))}
    assert {"agents", "data", "kernels"} <= rooms
    for room in rooms:
        assert f"\n::: jaxrl_llm.{room}\n" in (DOCS / "reference" / "api" / f"{room}.md").read_text()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_between_files_hold_in_the_repository(page):
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_tables_and_headings_stand_as_markdown_reads_them():
    for page in [*sorted(ROOT.glob("*.md")), ROOT / "kernels" / "README.md", *PAGES]:
        text = re.sub(r"^```.*?^```$", "```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lines = ["", *text.splitlines(), ""]
        for number in range(1, len(lines) - 1):
            above, line, below = (one.strip() for one in lines[number - 1 : number + 2])
            where = f"{page.relative_to(ROOT)}: {line[:80]}"
            if line.startswith("|") and not above.startswith("|"):
                assert re.fullmatch(r"\|[\s:|-]+\|", below), f"a table without a head, {where}"
            assert not re.match(r"#+ ", lines[number]) or not above, f"a heading right below other text, {where}"


def test_nothing_is_installed_by_a_name_that_no_index_has():
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *notebooks]:
        assert not re.search(r"pip install[^\n`|]* '?jaxrl-llm", page.read_text()), f"{page.name}: install the checkout"


@pytest.mark.parametrize("program", ["tensorboard", "pytest"])
def test_a_program_that_the_project_does_not_bring_is_installed_on_the_page_that_calls_it(program):
    brought = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[0]
    assert not re.search(rf'"{program}\b', brought)
    called = re.compile(rf"^\s*(?:python -m )?{program} -", re.MULTILINE)
    for page in [page for page in PAGES if page.parent.name in ("tutorial", "howto")]:
        text = page.read_text()
        if called.search(text):
            assert f"pip install {program}" in text, page.name


def test_tables_of_figures_stand_in_measured_alone():
    for page in PAGES:
        if page.parent.name == "measured":
            assert re.search(r"\b[0-9a-f]{7}\b", page.read_text()), f"{page.name} names no commit of its figures"
        elif page.parent.name == "howto":
            assert "## Measured" not in page.read_text(), f"{page.name}: figures belong to docs/measured"


def test_every_metric_that_is_explained_is_one_that_runs_write():
    code = "".join(f.read_text() for folder in ("jaxrl_llm", "eval") for f in sorted((ROOT / folder).rglob("*.py")))
    rows = re.findall(r"^\| (`[a-z].*?) \|", (DOCS / "explanation" / "metrics.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([a-z_]+/[a-z_0-9]+)`", row)]
    assert len(names) > 30
    for name in names:
        group, _, rest = name.partition("/")
        known = name in code or (f"{group}/{{" in code and re.search(rf'"{rest}"', code))
        assert known or group in ("eval", "grad_norm"), f"{name} is written nowhere"


def test_the_readme_is_read_in_a_minute():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_files_that_contributing_names_exist():
    named = re.findall(
        r"`((?:tests|docs|jaxrl_llm|eval|data|kernels)/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert len(named) > 10
    for name in named:
        assert name.endswith("/x.py") or (ROOT / name).exists(), f"CONTRIBUTING.md names {name}"
