"""The pages of commands and macros are current, and read what is there."""

import re
import subprocess
import sys
from pathlib import Path

from jaxrl_llm.tools.pages import commands, macros

ROOT = Path(__file__).parents[2]
GIN = ROOT / "gin"


def test_the_page_of_commands_is_current():
    current = "python -m jaxrl_llm.tools.pages.commands > docs/reference/commands.md"
    assert (ROOT / "docs" / "reference" / "commands.md").read_text() == commands.page(), (
        f"the code changed: run {current}"
    )


def test_every_module_that_can_be_started_is_on_the_page():
    pattern = 'if __name__ == "__main__"'
    done = subprocess.run(
        ["git", "grep", "-l", pattern, "--", "jaxrl_llm", "kernels", "data", "eval"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    started = {f.removeprefix("jaxrl_llm/").removesuffix(".py").replace("/", ".") for f in done.stdout.split()}
    expected = {name.removesuffix(".__main__") for name in started} - set(commands.INTERNAL)
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert expected <= {line[4:] for line in page.splitlines() if line.startswith("### ")}
    assert "### launch\n" in page and "### eval.viewer\n" in page


def test_a_macro_has_its_values_its_binding_and_its_meaning(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "samplers").mkdir()
    (tmp_path / "base.gin").write_text(
        "SIZE = 8\nLIMIT = 512  # tokens\nONLY_TAKEN_HERE = @x.X()\nrl/a.Stage:\n  size = %SIZE\n  limit = %LIMIT\nb.Other.size = %SIZE\n"
    )
    (tmp_path / "samplers" / "s.gin").write_text("SIZE = 4\nc.C.port = %PORT\n")
    size, limit, alone = macros.macros(tmp_path)
    assert (size.name, size.values) == ("SIZE", {"base.gin": "8", "samplers/s.gin": "4"})
    assert size.sets == ("rl/a.Stage.size", "b.Other.size")
    assert (limit.comment, limit.sets, alone.sets) == ("tokens", ("rl/a.Stage.limit",), ())
    rows = macros.section(tmp_path, {"a.Stage.size": "rollouts | of a prompt", "a.Stage.limit": "unused"}).splitlines()
    assert (
        r"| `SIZE` | `8` in base.gin; `4` in samplers/s.gin | `rl/a.Stage.size`, `b.Other.size` | rollouts \| of a prompt |"
        in rows
    )
    assert "| `LIMIT` | `512` in base.gin | `rl/a.Stage.limit` | tokens |" in rows


def test_the_usual_knobs_are_among_the_macros():
    found = {macro.name: macro for macro in macros.macros(GIN)}
    assert found["GROUP_SIZE"].sets == ("rl/train.Stage.group_size",)
    assert found["LEARNING_RATE"].values["base.gin"] == "1e-6" and found["VLLM_URLS"].sets == ("vllm.VllmSampler.urls",)


def test_the_commands_are_read_without_importing_them():
    program = "import sys; from jaxrl_llm.tools.pages import commands; commands.page(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_the_page_of_commands_has_every_verb_of_jaxrl_and_links_to_headings_that_are_there():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    part = page.partition("## The command jaxrl\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `jaxrl (\w+)` \|.*\[.*?\]\(#([\w-]+)\) \|$", part, re.MULTILINE))
    assert set(rows) == {"train", "eval", "plan", "doctor", "bench", "chat", "export", "import", "view", "serve", "new"}
    headings = {
        re.sub(r"[^\w -]", "", line[4:]).lower().replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("### ")
    }
    assert set(rows.values()) <= headings
    assert "--resume_as_new" in part and "reward=FILE.py:NAME,FILE.py:OTHER*0.1" in " ".join(part.split())
