"""Runs the five systems of gin/real on the GPUs of one host, a run on each GPU at a time, and prints what their arms differ by.

    python -m jaxrl_llm.eval.reports.real_systems --model FOLDER --data FOLDER --out results/real --gpus 2 [--only cs336 classmate_baseline] [--seeds 0 1]

--model is a Hugging Face folder of Qwen2.5-Coder-0.5B-Instruct, --data the DATA of the recipes' headers, whose commands prepare OUT/data_sets.
--only names systems, or single arms ("darling" is the system). A run that starts from another's model (CS336's GRPO and Classmate-CoT
from CS336's fine-tuning, attacks from the defence) waits for that of the first seed. Runs are OUT/NAME-SEED. What has ended is not run again:
the same command goes on after --minutes. OUT/tables.md has a table of each pair of arms of which a seed has ended (eval.reports.real_runs).
The arm classmate_smollm2 needs --classmate.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.distributed import xla_flags
from jaxrl_llm.eval.reports import real_runs
from jaxrl_llm.eval.reports.jobs import GIN, Cores, Job, Runner, run_job
from jaxrl_llm.metrics import run_lock

KS = (1, 4, 16, 64)  # of pass@k
SMOLLM2 = "classmate_smollm2"  # the arm that reads a model of its own


@dataclass(frozen=True)
class Arm:
    """An arm of a system.

    Attributes:
      name: of its run folders.
      against: the arm that a table compares it with.
      gin: file below gin/real; None for that of the same name.
      bindings: lines in addition to the seed.
      start: the arm whose model it starts from; None for the model that is given.
      exported: whether other arms start from its model.
      once: whether the first seed alone is run.
    """

    name: str
    against: str | None = None
    gin: str | None = None
    bindings: Sequence[str] = ()
    start: str | None = None
    exported: bool = False
    once: bool = False


def attacks(*methods: str) -> Iterator[Arm]:
    """Yields each attack on the original and on the defended model."""
    for method in methods:
        gin, once = f"tokenbuncher_attack_{method}", method != "grpo"
        original, defended = (f"tokenbuncher_{method}_on_{model}" for model in ("original", "defended"))
        yield Arm(original, gin=gin, once=once)
        yield Arm(defended, original, gin=gin, once=once, start="tokenbuncher_defence")


LAYER = "BUPO_LAYER=22"  # which gin/bupo_entropy_flow.gin proposes for this model
CS336 = {
    "nobaseline": ("reinforce.Reinforce.baseline=False",),
    "nostd": ("reinforce.Reinforce.std=False",),
    "constant": ("reinforce.Reinforce.aggregation='constant'",),
    "offpolicy": ("ALGORITHM=@grpo.GRPO()", "EPOCHS=2"),
}
# {system: its arms}
ARMS: dict[str, Sequence[Arm]] = {
    "cs336": (
        Arm("cs336_sft", exported=True, once=True),
        Arm("cs336_grpo", "cs336_sft", start="cs336_sft"),
        *(
            Arm(f"cs336_{n}", "cs336_grpo", gin="cs336_grpo", bindings=b, start="cs336_sft", once=True)
            for n, b in CS336.items()
        ),
        Arm("cs336_expert_iteration", "cs336_grpo", start="cs336_sft", once=True),
    ),
    "classmate": (
        Arm("classmate_baseline", start="cs336_sft"),
        Arm("classmate_selfplay", "classmate_baseline", start="cs336_sft"),
        Arm(SMOLLM2, "classmate_baseline", start="cs336_sft", once=True),
    ),
    "darling": (Arm("darling_baseline"), Arm("darling", "darling_baseline")),
    "countdown": (Arm("darling_countdown_baseline"), Arm("darling_countdown", "darling_countdown_baseline")),
    "bupo": (
        Arm("bupo_grpo"),
        *(
            Arm(f"bupo_{n}", "bupo_grpo", gin="bupo", bindings=(LAYER, f"BUPO_STEPS={n}"), once=n != 6)
            for n in (6, 13, 40)
        ),
    ),
    "tokenbuncher": (
        Arm("tokenbuncher_defence", exported=True),
        *attacks("grpo", "ppo", "rloo", "reinforce_plus_plus", "adaptive"),
    ),
}
EVERY = {one.name: one for arms in ARMS.values() for one in arms}


# -- what is run -------------------------------------------------------------------------------------------------------


def preparations(gin: str) -> list[str]:
    """Returns the commands that prepare the data of gin/real/GIN.gin, from its header or from that of the file to which it refers."""
    header = (GIN / "real" / f"{gin}.gin").read_text(encoding="utf-8").split("\nfrom __gin__")[0]
    referred = re.search(r"\bas (?:in )?gin/real/(\w+)\.gin", header)
    if found := re.findall(r"python -m (jaxrl_llm\.data\.prepare\.[^\n]*--out data_sets/\w+)", header):
        return found
    if referred is None:
        raise ValueError(f"gin/real/{gin}.gin names neither the commands of its data nor the file that does")
    return preparations(referred[1])


def settings(gin: str) -> str:
    """Returns the text of gin/real/GIN.gin after those of gin/real that it includes."""
    text = (GIN / "real" / f"{gin}.gin").read_text(encoding="utf-8")
    return "".join(settings(name) for name in re.findall(r"^include 'gin/real/(\w+)\.gin'", text, re.M)) + text


def data_jobs(arms: Sequence[Arm], data: Path, out: Path) -> dict[str, Job]:
    """Returns {command: the job that runs it} of all data that the arms read; equal commands are one job."""

    def job(command: str) -> Job:
        words = [f"{data}{word[4:]}" if word.startswith("DATA/") else word for word in shlex.split(command)]
        name = command.rsplit("/", 1)[1]
        return Job(name=f"data_{name}", commands=[[sys.executable, "-m", *words]], folder=out / "data_sets" / name)

    return {command: job(command) for one in arms for command in preparations(one.gin or one.name)}


def jobs(
    arms: Sequence[Arm], seeds: Sequence[int], model: Path, data: Path, out: Path, more: Sequence[str]
) -> list[Job]:
    """Returns every job; those for which others wait come first. An export is a job of its own: a run that has ended is not gone on with."""
    prepared = data_jobs(arms, data, out)
    found = list(prepared.values())
    for one in arms:
        gin = one.gin or one.name
        macro = "START" if re.search("^START = ", settings(gin), re.M) else "PRETRAINED"
        first = f"{one.start}-{seeds[0]}"
        start = out / first / "model" if one.start else model
        after = [prepared[c].name for c in preparations(gin)] + ([f"{first}-model"] if one.start else [])
        for seed in seeds[:1] if one.once else seeds:
            folder = out / f"{one.name}-{seed}"
            lines = [f"SEED={seed}", f"{macro}={str(start)!r}", *one.bindings, *more]
            found.append(run_job(f"real/{gin}", folder, lines, after))
            if one.exported and seed == seeds[0]:
                export = [sys.executable, "-m", "jaxrl_llm.tools.export", str(folder), "--out", str(folder / "model")]
                name = f"{folder.name}-model"
                found.append(Job(name=name, commands=[export], after=[folder.name], folder=folder / "model"))
    return found


def chosen(names: Sequence[str]) -> list[Arm]:
    """Returns the arms of systems, and arms by their own names, after those from which they start."""
    found = list(dict.fromkeys(one for name in names for one in ARMS.get(name) or [EVERY[name]]))
    while missing := [EVERY[a.start] for a in found if a.start and a.start not in {b.name for b in found}]:
        found = [*dict.fromkeys(missing), *found]
    return sorted(found, key=depth)


def depth(one: Arm) -> int:
    """Returns how many arms come before one."""
    return 0 if one.start is None else 1 + depth(EVERY[one.start])


# -- what comes of it --------------------------------------------------------------------------------------------------


def tables(out: Path) -> str:
    """Returns, in Markdown, a table of each arm against the one it is compared with, at the seeds of which both have ended."""
    ended, text = {mark.name for mark in (out / "ended").iterdir()}, ""
    for one in EVERY.values():
        seeds = sorted(name.rsplit("-", 1)[1] for name in ended if re.fullmatch(rf"{one.name}-\d+", name))
        both = [s for s in seeds if f"{one.against}-{s}" in ended]
        if both:
            text += f"## {one.against} (A), {one.name} (B), seeds {', '.join(both)}\n\n"
            pair = [[out / f"{name}-{s}" for s in both] for name in (one.against, one.name)]
            try:
                text += real_runs.written(list(real_runs.table(pair, real_runs.ENDS, KS))) + "\n"
            except (ValueError, OSError) as error:  # of one pair; the others have their tables
                text += f"none: {error}\n\n"
    return text


def seen(gpus: int) -> list[dict[str, str]]:
    """Returns, for each slot, the variables by which its runs see one GPU, of those that this process sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return [{"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": name} for name in names[:gpus]]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.parser("eval.reports.real_systems", __doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder that the recipes' headers call DATA")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, their data and the tables")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs of this host, each for a run at a time (default: 1); 0 for its CPU"
    )
    only = f"systems ({', '.join(ARMS)}) or arms (default: all)"
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=[*ARMS, *EVERY], metavar="NAME", help=only)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds (default: 0)")
    parser.add_argument("--classmate", type=Path, help="folder of SmolLM2-135M-Instruct (default: no such arm)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--gin", action="append", default=[], metavar="BINDING", help="binding of every run")
    given = parser.parse_args(argv)
    for name in ("model", "data", "classmate"):
        if (folder := getattr(given, name)) is not None and not folder.is_dir():
            parser.error(f"--{name} {folder} is no folder")
    if not 0 <= given.gpus <= xla_flags.gpus():
        parser.error(f"--gpus must be 0 to {xla_flags.gpus()}, the GPUs that JAX finds here (got {given.gpus})")
    return given


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    begin = time.monotonic()
    model, data, out = (path.absolute() for path in (given.model, given.data, given.out))
    given_classmate = [] if given.classmate is None else [f"CLASSMATE={str(given.classmate.absolute())!r}"]
    arms = [replace(one, bindings=given_classmate) if one.name == SMOLLM2 else one for one in chosen(given.only)]
    arms = [one for one in arms if one.name != SMOLLM2 or given_classmate]
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # recipes read data_sets/NAME below the folder that they are started in
    slots = max(given.gpus, 1)
    runner = Runner(
        logs=out / "logs", marks=out / "ended", deadline=begin + 60 * given.minutes,
        cores=Cores(slots, max(1, xla_flags.cores() // slots), seen(given.gpus) or None),
        environment={"JAX_COMPILATION_CACHE_DIR": str(out / "compiled")},
    )  # fmt: skip
    write = lambda _: (out / "tables.md").write_text(tables(out), encoding="utf-8")  # noqa: E731
    with run_lock.locked(out, "--out"):
        missing = runner.run(jobs(arms, list(dict.fromkeys(given.seeds)), model, data, out, given.gin), write)
    print(tables(out), end="")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
