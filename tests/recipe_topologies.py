"""Compiles recipes of gin/ for the TPUs that their headers name, and prints what the compiler says of each (docs/measured/topologies.md).

    python tests/recipe_topologies.py FOLDER [NAME[@TARGET] ...]

A header names TPUs by a line such as "# TPUs: v6e:2x4, ...". Without names all recipes that name some are compiled, which takes minutes each; NAME@TARGET
takes another target. Models and data are those of train/every_recipe.py, whose sizes are the published ones; FOLDER/stand_ins takes them. Needs libtpu.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"^# TPUs: ([\w:]+)", re.MULTILINE)
# What a user must say beside the file; GSM8K is the stand-in of train/every_recipe.py, and 16 chips share no 8 rows.
ASKED: Mapping[str, Sequence[str]] = {
    "grpo_gsm8k": ("PRETRAINED='Qwen/Qwen2.5-Math-1.5B'", "GSM8K_PATH='data_sets/grade_school'"),
    "bupo_qwen3_4b": ("ROWS=16",),
}
# Of what launch says, the lines by the compiler.
SAID = re.compile(r"(model |programs of |  \w+ +[\d.]+ of |    estimate |    exchanges |    warning|peak of |error: )")


def named() -> dict[str, str]:
    """{recipe: the target that its header names}."""
    found = {file.stem: NAMED.search(file.read_text()) for file in sorted((ROOT / "gin").glob("*.gin"))}
    return {name: match[1] for name, match in found.items() if match}


def arguments(name: str, target: str) -> list[str]:
    """Launch's arguments for a recipe and a target."""
    return [
        "--dry_run",
        f"--topology={target}",
        f"--gin_file=gin/{name}.gin",
        *(f"--gin={b}" for b in ASKED.get(name, ())),
    ]


def compiled(folder: Path, name: str, target: str) -> str:
    """What launch says of a recipe for a target, with the seconds of a processor that it took."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "TPU_STDERR_LOG_LEVEL": "3",
    }  # fmt: skip
    command = [sys.executable, "-m", "jaxrl_llm.launch", *arguments(name, target)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = [line for line in [*done.stdout.splitlines(), *errors] if SAID.match(line)]
    if not said or (done.returncode and not errors):
        return done.stderr[-2000:]
    return "\n".join([*said, f"({after.ru_utime - before.ru_utime:.0f} s of a processor)"])


def made(folder: Path, write: Callable[[Path], None]) -> Path:
    """Returns the folder of what `write` makes, inside `folder`: it bears its name once it is whole, so that no half-made one is used."""
    whole, half = folder / "stand_ins", folder / "stand_ins.unfinished"
    if not whole.exists():
        if half.exists():
            print(f"{half} is what an interrupted run left: it is made again", flush=True)
            shutil.rmtree(half)
        half.mkdir(parents=True)
        write(half)
        half.rename(whole)
    return whole


def write_stand_ins(folder: Path) -> None:
    """Writes the models and data sets of the recipes."""
    from every_recipe import write_data, write_models

    write_models(folder / "hub", folder)
    write_data(folder / "data_sets")


def main(folder: Path, names: Sequence[str]) -> None:
    folder = made(folder, write_stand_ins)
    # The recipes of this checkout, whichever made the folder.
    (folder / "gin").unlink(missing_ok=True)
    (folder / "gin").symlink_to(ROOT / "gin")
    targets = named()
    for name in names or targets:
        recipe, _, target = name.partition("@")
        target = target or targets[recipe]
        print(f"launch {' '.join(arguments(recipe, target))}\n{compiled(folder, recipe, target)}\n", flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/train")]
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
