"""The command `jaxrl`: a verb for each thing that a user starts, with plain `name=value` settings.

    jaxrl train gin/grpo_gsm8k.gin model=FOLDER group_size=16 algorithm=gspo reward=my_file.py:my_reward data=my.jsonl

Each verb calls the function behind `python -m jaxrl_llm.launch` or `python -m jaxrl_llm.tools.NAME`, which is imported at the call.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxrl_llm import __version__

HELP = {"help_option_names": ["-h", "--help"]}
PASSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
SETTINGS = """Each FILE is a gin file, one of the package's by its name, or a run folder. NAME=VALUE needs no quotes: a macro in lower or
upper case (group_size=16), a binding (grpo.GRPO.clip_high=0.3), or a component by name or path: algorithm, model, data, eval_data, reward,
sampler, tokenizer, adapters, schedule, writers. Several rewards with weights: reward=FILE.py:NAME,FILE.py:OTHER*0.1."""


def _completed(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    from jaxrl_llm.interface import completion

    return completion.items(context.params.get(parameter.name or "") or (), incomplete)


words = click.argument("words", nargs=-1, metavar="[FILE]... [NAME=VALUE]...", shell_complete=_completed)
# Verbs that pass their arguments on: the command that each calls, and its description, from which docs/reference/commands.md is
# written.
COMMANDS = {
    "plan": ("jaxrl_llm.tools.plan", "Says what a run would take, on this machine or on other chips."),
    "doctor": ("jaxrl_llm.tools.doctor", "Checks a machine, and whether a run would work here."),
    "bench": ("jaxrl_llm.tools.bench", "Measures updates, scoring, sampling and whole steps here."),
    "chat": ("jaxrl_llm.tools.chat", "Chats with a Hugging Face folder or a run folder."),
    "export": ("jaxrl_llm.tools.export", "Writes a run's model as a Hugging Face folder."),
    "import": ("jaxrl_llm.tools.import_verl", "Writes a Hugging Face folder from a checkpoint of verl's."),
    "view": ("jaxrl_llm.eval.viewer.__main__", "Shows runs and results in a browser."),
}

arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


@click.group(
    context_settings=HELP, epilog='Completion: eval "$(_JAXRL_COMPLETE=bash_source jaxrl)", and zsh or fish for bash.'
)
@click.version_option(__version__, prog_name="jaxrl")
def main() -> None:
    """RL post-training of language models in JAX."""


def _given(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Splits words into files and {name: value} of the settings.

    Raises:
      ValueError: a word is the name of a setting and has no value.
    """
    from jaxrl_llm.interface.composition import SETTING, WORDS, names, value

    files, settings = [], {}
    for word in words:
        found = SETTING.fullmatch(word)
        if found is None or Path(word).exists():
            files.append(word)
        else:
            settings[found["name"]] = value(found["value"])
    for word in set(files) - set(names()):
        from jaxrl_llm.interface.completion import macros

        if not Path(word).exists() and word.lower() in {*WORDS, *macros([x for x in files if x != word])}:
            raise ValueError(f"{word} is a setting and has no value: write {word}=VALUE, without spaces")
    return files, settings


def _flags(words: Sequence[str], *, cpu: bool) -> list[str]:
    """Returns the words' equivalent arguments for `launch` and other commands that take gin files."""
    from jaxrl_llm.distributed.xla_flags import on_cpu
    from jaxrl_llm.interface.composition import compose

    files, settings = _given(words)
    if not files and not {"run_dir", "RUN_DIR"} & settings.keys():
        settings["run_dir"] = f"runs/{settings.get('algorithm', 'grpo')}"
    composed = compose(files, settings, cpu=cpu and on_cpu())
    return [f"--gin_file={file}" for file in composed.files] + [f"--gin={line}" for line in composed.lines]


def _ended(work: Callable[[], Any]) -> None:
    """Runs a verb's work, and exits with its exit code, or with 1 and one line for an error that the user can mend."""
    from jaxrl_llm import command_line

    command_line.leave(command_line.told(work)() or 0)


def _launched(
    words: Sequence[str], options: Mapping[str, bool], to_flags: Callable[[Sequence[str]], list[str]]
) -> None:
    def work() -> int:
        from jaxrl_llm import launch

        flags = [f"--{name}" for name, on in options.items() if on]
        return launch.main([*to_flags(words), *flags], alone=True)

    _ended(work)


@main.command(context_settings=HELP, help=f"Trains, or goes on from the last checkpoint.\n\n{SETTINGS}")
@words
@click.option("--dry_run", is_flag=True, help="Print the resolved plan and the memory that it takes, and leave.")
@click.option("--resume_as_new", is_flag=True, help="Go on although settings differ that bend what was learned.")
@click.option("--distributed", is_flag=True, help="One of several processes, found by JAX (TPU pod, Slurm, JobSet).")
@click.option("--debug", is_flag=True, help="Show the stack of every error.")
def train(words: tuple[str, ...], **options: bool) -> None:
    _launched(words, options, lambda words: _flags(words, cpu=True))


@main.command(
    "eval",
    context_settings=HELP,
    help="Answers a set of gin/eval with a model or a run: `jaxrl eval gsm8k model=DIR data=DIR out_dir=DIR`.",
)
@words
@click.option("--dry_run", is_flag=True, help="Print what would be asked, and leave.")
@click.option("--debug", is_flag=True, help="Show the stack of every error.")
def evaluate(words: tuple[str, ...], **options: bool) -> None:
    def flags(words: Sequence[str]) -> list[str]:
        from jaxrl_llm.interface.composition import evaluation

        composed = evaluation(*_given(words))
        return [f"--gin_file={file}" for file in composed.files] + [f"--gin={line}" for line in composed.lines]

    _launched(words, options, flags)


def _handed_on(name: str, configured: bool) -> None:
    """Adds a verb that passes its arguments on; one that is `configured` takes files and settings first, as `train` does."""
    module, short = COMMANDS[name]

    @main.command(name, context_settings=PASSED, help=short)
    @arguments
    @click.pass_context
    def command(context: click.Context, arguments: tuple[str, ...]) -> None:
        from jaxrl_llm.command_line import WORDS

        context.meta[WORDS] = configured
        first = next((i for i, x in enumerate(arguments) if x.startswith("-")), len(arguments)) if configured else 0
        words, options = arguments[:first], arguments[first:]
        _ended(lambda: importlib.import_module(module).main([*(_flags(words, cpu=False) if words else []), *options]))


for verb in COMMANDS:
    _handed_on(verb, configured=verb in ("plan", "doctor"))


@main.command(
    context_settings=HELP | {"ignore_unknown_options": True, "allow_interspersed_args": False},
    help="Starts a service that rewards ask: sandbox (runs programs) or classifier (a model).",
)
@click.argument("service", type=click.Choice(["sandbox", "classifier"]))
@arguments
@click.pass_context
def serve(context: click.Context, service: str, arguments: tuple[str, ...]) -> None:
    context.info_name = f"serve {service}"
    module = {"sandbox": "sandbox", "classifier": "classifier_server"}[service]
    _ended(lambda: importlib.import_module(f"jaxrl_llm.rewards.services.{module}").main(list(arguments)))


@main.command(
    context_settings=HELP,
    help="Writes a small project that trains as it is: a reward with its test, data and a gin file.",
)
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    def work() -> None:
        from jaxrl_llm.interface import new_project

        click.echo(new_project.write(folder))

    _ended(work)


if __name__ == "__main__":
    main()
