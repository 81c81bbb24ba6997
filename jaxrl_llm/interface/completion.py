"""Shell completion: gin files and run folders, the macros that they read, and the names of components."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from click.shell_completion import CompletionItem

from jaxrl_llm.command_line import PACKAGE
from jaxrl_llm.interface.composition import NAMED, WORDS, names

INCLUDE = re.compile(r"^include\s+['\"]([^'\"]+)['\"]", re.MULTILINE)
MACRO = re.compile(r"^([A-Z][A-Z0-9_]*)\s*=", re.MULTILINE)


def items(words: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Returns the completions of a word after those of `words`; a shell may split "name=value" at its "="."""
    if words and words[-1] == "=":  # bash, in the value
        return _shown(_values(words[-2] if len(words) > 1 else "", incomplete), incomplete)
    if incomplete == "=":  # bash, at the beginning of the value
        return _shown(_values(words[-1] if words else "", ""), "")
    name, split, begun = incomplete.partition("=")
    if split:
        return _shown([f"{name}={value}" for value in _values(name, begun)], incomplete)
    found = [*_files(incomplete), *(f"{name}=" for name in (*WORDS, *sorted(macros(words))))]
    return _shown(found, incomplete)


def _shown(found: Sequence[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(text) for text in found if text.startswith(incomplete)]


def _files(begun: str) -> Iterator[str]:
    """Yields the package's runs by name, and the user's gin files and folders."""
    if "/" not in begun:
        yield from names()
    yield from _paths(begun, (".gin",))


def _paths(begun: str, suffixes: Sequence[str]) -> Iterator[str]:
    folder = Path(begun).parent if not begun.endswith("/") else Path(begun)
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield f"{path}/"
        elif path.suffix in suffixes:
            yield str(path)


def _values(name: str, begun: str) -> list[str]:
    """Returns the names of a component's files, and the paths that a word may name."""
    word = name.lower()
    known = names(NAMED[word]) if word in NAMED else []
    if word == "tokenizer":
        known = [stem.removesuffix("_tokenizer") for stem in names("data") if stem.endswith("_tokenizer")]
    if word == "model":
        known = ["tiny", *known]
    suffixes = {"reward": (".py",), "data": (".jsonl", ".json", ".parquet", ".csv")}
    suffixes["eval_data"] = suffixes["data"]
    return [*known, *_paths(begun, suffixes.get(word, ()))]


def macros(words: Sequence[str]) -> set[str]:
    """Returns the macros, in lower case, of the gin files among the words and of those they include; of gin/base.gin where there are none."""
    found: set[str] = set()
    waiting = [word for word in words if "=" not in word] or ["gin/base.gin"]
    seen = set()
    while waiting:
        name = waiting.pop()
        candidates = (
            Path(name),
            Path(name) / "config.gin",
            PACKAGE / name,
            PACKAGE / "gin" / f"{name.removesuffix('.gin')}.gin",
        )
        file = next((path for path in candidates if path.is_file()), None)
        if file is None or file in seen:
            continue
        seen.add(file)
        text = file.read_text()
        found |= {macro.lower() for macro in MACRO.findall(text)}
        waiting += INCLUDE.findall(text)
    return found - {"run", *WORDS}
