"""Where the stand-ins and helpers of the other tests lie."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("", "chaos", "samplers", "publication", "rewards", "eval")]
