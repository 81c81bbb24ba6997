"""Shows runs and results in a browser: `python -m jaxrl_llm.eval.viewer RUN_OR_RESULTS...`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm import command_line, serving
from jaxrl_llm.eval.viewer.folders import find
from jaxrl_llm.eval.viewer.server import Pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until interrupted; returns 1 where there is nothing to show or the port is in use."""
    parser = command_line.parser("eval.viewer", __doc__)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN_OR_RESULTS", help="a folder, or one that holds several"
    )
    parser.add_argument(
        "--port", type=int, default=8123, help="on 127.0.0.1 (default: %(default)s; 0 takes a free one)"
    )
    asked = parser.parse_args(arguments)
    try:
        shown = find(asked.paths)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(shown)} runs and results; from another machine: ssh -L {asked.port}:127.0.0.1:{asked.port} HOST")
    try:
        pages = Pages(shown, asked.paths)
        serving.serve(pages.application(), pages.patience, "127.0.0.1", asked.port)
    except OSError as error:
        print(f"error: port {asked.port} cannot be used ({error.strerror}): give another --port", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
