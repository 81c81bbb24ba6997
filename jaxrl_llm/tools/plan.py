"""Plans a run before it starts: mesh, parameters, batch arithmetic, memory by device, compiled shapes.

    python -m jaxrl_llm.tools.plan --gin_file=gin/grpo_qwen_coder_0p5b_gsm8k.gin --chips=h200,v5p,v6e --counts=1,4,64,4096
    python -m jaxrl_llm.tools.plan --compare=speed.jsonl
    python -m jaxrl_llm.tools.plan --gin_file=gin/grpo_gsm8k.gin --gin="PRETRAINED='FOLDER'" --fit --device=rtx4090
    python -m jaxrl_llm.tools.plan --gin_file=... --topology=v6e:16x16
    python -m jaxrl_llm.tools.plan --publication --rates=rates.json --hosts=1,8,32

The first command simulates the steps of a run on fleets of chips (cost_model.py), the second compares the cost model with rows of
`bench`, the third prints settings that fit a device, as gin lines, the fourth compiles the run's programs for a target that need
not be attached (programs.py), and the fifth simulates publications of weights by route (planning/publication.py has the formulae).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxrl_llm import command_line
from jaxrl_llm.distributed import compilation_cache, topology
from jaxrl_llm.tools.planning.chips import CHIPS, DEVICES


@command_line.told
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser("tools.plan", __doc__)
    parser.add_argument("--gin_file", action="append", metavar="FILE", help="gin file of a run; may be repeated")
    parser.add_argument(
        "--gin", action="append", default=[], metavar="BINDING", help="binding that overrides the files"
    )
    parser.add_argument("--chips", default=",".join(CHIPS), help="kinds of chips (default all)")
    parser.add_argument("--counts", default="1,2,4,8,16,64,256,1024,4096", help="chips of a fleet")
    parser.add_argument("--response_tokens", type=int, help="mean tokens of a response (default: the run's limit)")
    parser.add_argument("--grow", action="store_true", help="the run's batch is that of one chip, and grows with them")
    parser.add_argument("--fit", action="store_true", help="print settings that fit a device, as gin lines")
    parser.add_argument("--device", help=f"device to fit: {', '.join(DEVICES)} or NAME=GIB (default: the one at hand)")
    parser.add_argument(
        "--topology", metavar="NAME", help="compile the run's programs for v6e:16x16, v5p:4x4x4, h200:8 ..."
    )
    parser.add_argument("--compare", metavar="FILE", help="rows that `bench --output` wrote")
    parser.add_argument("--publication", action="store_true", help="simulate publications of weights to sampler hosts")
    parser.add_argument(
        "--rates", metavar="FILE", help="JSON of rates for --publication, in bytes/s (default: measured)"
    )
    parser.add_argument("--hosts", default="1,8,32", help="sampler hosts for --publication")
    parser.add_argument("--changed", type=float, default=1.0, help="share of the bytes that a version changes, 0 to 1")
    arguments = parser.parse_args(argv)
    if bool(arguments.gin_file) + bool(arguments.compare) + arguments.publication != 1:
        parser.error("give --gin_file, --compare or --publication, one of the three")
    if arguments.changed != 1 and not arguments.publication:
        parser.error("--changed is a share of a publication's bytes: add --publication, or leave it out")
    if not 0 <= arguments.changed <= 1:
        parser.error(f"--changed is a share of 0 to 1 (got {arguments.changed:g})")
    if arguments.topology and arguments.compare:
        parser.error("--topology compiles the programs of a run: give --gin_file")
    if arguments.device and not arguments.fit:
        parser.error("--device is the device that --fit fits the run to: add --fit, or leave it out")
    chips = arguments.chips.split(",")
    if unknown := set(chips) - set(CHIPS):
        parser.error(f"unknown chips {sorted(unknown)}: use some of {', '.join(CHIPS)}")
    compilation_cache.keep()
    for line in _lines(arguments, chips):
        print(line, flush=True)
    return 0


def _lines(arguments: argparse.Namespace, chips: Sequence[str]) -> Iterable[str]:
    """Returns the requested lines; modules are imported here, after JAX's environment is set, and not for --help."""
    if arguments.publication:
        from jaxrl_llm.tools.planning import publication

        rates = publication.Rates.read_from(arguments.rates) if arguments.rates else publication.Rates()
        hosts = [int(n) for n in arguments.hosts.split(",")]
        return publication.table(publication.MODELS, hosts, rates, arguments.changed)
    if arguments.topology:
        topology.prepare(arguments.topology)
        run, _ = command_line.build(arguments.gin_file, arguments.gin)
        from jaxrl_llm.tools.planning.run_plan import on_target

        return on_target(run, arguments.topology)
    from jaxrl_llm.tools import fit
    from jaxrl_llm.tools.planning import fleets

    if arguments.compare:
        return fleets.compared(map(json.loads, Path(arguments.compare).read_text(encoding="utf-8").splitlines()))
    run, config = command_line.build(arguments.gin_file, arguments.gin)
    if arguments.fit:
        return fit.fitted(run, config, fit.named(arguments.device))
    counts = [int(n) for n in arguments.counts.split(",")]
    return fleets.fleets(run, chips, counts, arguments.response_tokens, arguments.grow)


if __name__ == "__main__":
    sys.exit(main())
