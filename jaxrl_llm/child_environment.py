"""Environment variables of child processes: none of the secrets that this process was given."""

import os
import re
from collections.abc import Mapping

# What any program may need to start; a verifier gets these alone.
NEEDED = re.compile(r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONHOME|VIRTUAL_ENV|\w+_NUM_THREADS")
SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)


def bare(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that programs need to start, and no others."""
    return {name: value for name, value in environment.items() if NEEDED.fullmatch(name)}


def without_secrets(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All variables but those whose names say that they hold a secret, such as HF_TOKEN or WANDB_API_KEY."""
    return {name: value for name, value in environment.items() if not SECRET.search(name)}
