"""The programs that attack the sandbox, all of them, in each isolation that is offered here."""

import inspect
import random
from collections.abc import Callable
from unittest.mock import patch

import sandbox_attack
import test_sandbox_attacks
import test_sandbox_verdicts as verdicts
from chaos_table import Row, Trial
from sandbox_attack import Attack, NotOffered, attacked, offered

FEWEST = 37


class Counted:
    """Runs programs as `run` does, and counts those that attack: what must fail, and each line of those that try many things."""

    def __init__(self, run: Attack) -> None:
        self.run, self.attacks = run, 0

    def __call__(self, *program: object) -> tuple[str, str, str]:
        self.attacks += 1
        return self.run(*program)


def refused(attack: Counted, statements: str) -> None:
    sandbox_attack.refused(attack.run, statements)
    attack.attacks += len(statements.strip().splitlines())


def printed(attack: Counted, program: str, stdin: str = "") -> str:
    """What an honest program prints: no attack."""
    return sandbox_attack.printed(attack.run, program, stdin)


def cases() -> list[tuple[Callable[..., None], dict[str, str]]]:
    """Tests of attacks, and of forged verdicts, with what they are given beside the sandbox."""
    found: list[tuple[Callable[..., None], dict[str, str]]] = [
        (test, {}) for name, test in vars(test_sandbox_attacks).items() if name.startswith("test_")
    ]
    found += [(verdicts.test_a_false_assertion_never_passes, {"name": name}) for name in verdicts.FORGERIES]
    return found + [
        (verdicts.test_an_object_is_not_asked_whether_it_is_right, {"name": name}) for name in verdicts.LIARS
    ]


def attacks(trial: Trial) -> Row:
    """`times` tests of attacks in random order, in each isolation and as each user."""
    rng, row, done, absent = random.Random(trial.seed), Row(tried=0, outcome=""), dict[str, int](), []
    chosen = rng.sample(cases(), min(trial.times, len(cases())))
    trial.folder.chmod(0o755)  # so that only the sandbox keeps a user from what lies there
    for kind, (user, mode) in offered().items():
        try:
            with attacked(user, mode) as run, patch.multiple(test_sandbox_attacks, refused=refused, printed=printed):
                counted = Counted(run)
                for number, (test, given) in enumerate(chosen):
                    folder = trial.folder / kind / str(number) / "files"
                    folder.mkdir(parents=True)
                    more = {"tmp_path": folder} if "tmp_path" in inspect.signature(test).parameters else {}
                    test(counted, **given, **more)
                done[kind] = counted.attacks
        except NotOffered:
            absent.append(kind)
            continue
        if len(chosen) == len(cases()):
            assert counted.attacks >= FEWEST, f"{counted.attacks} attacks in {kind}"
    assert done, f"no isolation is offered here: {absent}"
    row.tried = row.into = row.out = sum(done.values())
    row.outcome = "all fail: " + ", ".join(f"{n} in {kind}" for kind, n in done.items())
    row.outcome += f"; not offered here: {', '.join(absent)}" if absent else ""
    return row
