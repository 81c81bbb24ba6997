"""Stand-ins for gcloud, kubectl, sbatch, ssh and others: each records how it was called, and answers what a test says."""

import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"

PROGRAM = """#!/bin/bash
{ flock 9; printf '%s\\0' "${0##*/}" "$@" $'\\n' >&9; } 9>>"$CALLS"  # others may write at the same time, and bash writes a line at once
file=$ANSWERS/${0##*/}
if [ -e "$file" ]; then . "$file"; fi
"""


@dataclass(kw_only=True)
class Machine:
    """A workstation whose tools are stand-ins.

    Attributes:
      home: its home folder.
      variables: environment variables, beside PATH and HOME.
      seen: characters of the calls that were asked for.
    """

    home: Path
    variables: dict[str, str] = field(default_factory=dict)
    seen: int = 0

    def tool(self, name: str, answer: str = "") -> None:
        """Puts a tool on PATH; `answer` is what it does, in bash, with its arguments as "$@"."""
        folder = self.home / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        (self.home / "answers").mkdir(exist_ok=True)
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
        (self.home / "answers" / name).write_text(answer)

    def python(self, name: str) -> None:
        """Puts this Python on PATH under a name."""
        folder = self.home / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -I "$@"\n')
        (folder / name).chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        own = {"PATH": f"{self.home / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "LC_ALL": "C.UTF-8"}
        # git reads a checkout of another user where it is told to, and HOME's settings are not here.
        own |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
        return own | {"CALLS": str(self.home / "calls"), "ANSWERS": str(self.home / "answers")} | self.variables

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of launch/ to its end."""
        return subprocess.run(
            [str(LAUNCH / script), *arguments], env=self.environment | variables, cwd=self.home, capture_output=True,
            text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def calls(self, *tools: str) -> list[list[str]]:
        """What was called since the last time, in order; of `tools` alone where some are named."""
        file = self.home / "calls"
        text = file.read_text()[self.seen :] if file.exists() else ""
        whole = text[: text.rfind("\n\0") + 2]
        self.seen += len(whole)
        found = [line.strip("\0").split("\0") for line in whole.split("\n\0") if line]
        return [call for call in found if not tools or call[0] in tools]


def commands(printed: str) -> list[list[str]]:
    """The commands of a dry run."""
    return [shlex.split(line, comments=True) for line in printed.splitlines()]
