"""Every data command that a gin file's header gives can be started: the module is a command, its options exist, and they go together."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_llm.data.prepare import preparation

GIN = Path(__file__).parents[2] / "gin"
COMMAND = re.compile(r"python -m (jaxrl_llm\.data\.[\w.]*\w)((?: +(?:--\w+|'[^']*'|[\w=/.-]*[\w=/-]))*)")


def commands() -> list[tuple[str, str, str]]:
    """(file, module, arguments) of each command in a comment; a command ends with its line."""
    found = []
    for file in sorted(GIN.glob("**/*.gin")):
        comments = "\n".join(re.findall(r"#.*", file.read_text()))
        found += [(file.stem, module, given) for module, given in COMMAND.findall(comments)]
    return found


COMMANDS = sorted(set(commands()))


def test_the_files_give_commands() -> None:
    assert len(COMMANDS) > 15
    assert ("cs336_sft_qwen2p5_math_1p5b", "jaxrl_llm.data.prepare.competition_math") in {c[:2] for c in COMMANDS}


@pytest.mark.parametrize(("name", "module", "given"), COMMANDS)
def test_a_documented_data_command_can_be_started(name: str, module: str, given: str) -> None:
    found = importlib.import_module(module)
    assert 'if __name__ == "__main__"' in Path(str(found.__file__)).read_text(), f"{module} is no command"
    if not hasattr(found, "PREPARATION"):
        return
    options = preparation._parse(found.PREPARATION, shlex.split(given))
    work = preparation._Work(found.PREPARATION, _uncounted(options))
    for part in options.splits:  # raises ValueError where the template does not go with the system message
        assert work.row(part, 0, preparation.Item(question="What is 2 + 2?"))["prompt"]


def _uncounted(options: preparation.Options) -> preparation.Options:
    """The options without what reads tokenizers and other sets."""
    options.against, options.min_tokens, options.max_tokens = [], 0, None
    return options
