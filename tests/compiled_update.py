"""Compiles a small update for a target that is not attached, writes its optimized HLO, and prints what the compiler says as JSON.

    python tests/compiled_update.py v6e:2x2 update.hlo --attention=reference

More flags are those of tools.bench, and --heads and --kv_heads of the model. LIBTPU_INIT_ARGS overrules the flags that a run on the target gets.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxrl_llm.distributed import topology

# No other dimension is as long as a row, so that a buffer of tokens x tokens is seen by its sizes.
ROW_TOKENS = 768
MODEL = "small-for-compilers"


def main(target: str, out: Path, flags: Sequence[str]) -> None:
    """Prints {kernels, programs} of `bench.for_target`, with the text of the program in `out`: of the whole update, or of its
    gradients where moments rest on the host, whose small programs in turn are not compiled.
    """
    for name in ("TPU_STDERR_LOG_LEVEL", "TF_CPP_MIN_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    topology.prepare(target)
    from jaxrl_llm.models.qwen2 import Qwen2
    from jaxrl_llm.models.sizes import SHAPES
    from jaxrl_llm.tools import bench, bench_case, programs

    # As in Qwen2.5 on 16 chips, tiles of entries are odd in number and a chip's share of the width fills none.
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    heads = {"heads": 7, "kv_heads": 1} | {
        name: int(given.pop(name)) for name in ("heads", "kv_heads") if name in given
    }
    SHAPES[MODEL] = Qwen2(vocabulary_size=4224, width=896, layers=3, head_width=128, mlp_width=2816, tied=True, **heads)
    facts = programs.facts

    def kept(account, *rest):
        if account.program is not None:
            out.write_text(account.program.as_text())
        return facts(account, *rest)

    programs.facts = kept
    with programs.on(target) as there:
        own = {"model": MODEL, "rows": str(len(there.devices)), "row_tokens": str(ROW_TOKENS), "segments": "2"}
        row = bench.row({n: d for n, (_, d, _) in bench_case.SWEPT.items()} | own | given, 1, None, target)
    print(json.dumps({name: row[name] for name in ("kernels", "programs")}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
