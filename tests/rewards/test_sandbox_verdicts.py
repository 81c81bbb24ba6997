"""Programs that forge verdicts or look for tests, one a test, in every isolation that is offered and as each kind of user; and honest ones."""

import sys

import pytest
from sandbox_attack import SECRET, Attack, attack, printed

__all__ = ["attack"]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="programs are shut in on Linux alone"),
    pytest.mark.xdist_group("sandbox"),
]

# -- verdicts: nothing that a program does makes a test pass that it does not satisfy, nor shows it the test ---------------------

FORGERIES = {
    "the word in the caller's frame": "import sys\nf = sys._getframe(1)\nwhile f:\n    v = f.f_locals.get('word')\n    if v:\n        import os; os.write(4, v + b'\\npassed\\n'); os._exit(0)\n    f = f.f_back",
    "a verdict on every descriptor": "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'passed\\n')\n    except OSError: pass\nos._exit(0)",
    "leaving with success": "import os\nos._exit(0)",
    "leaving by an exception": "raise SystemExit(0)",
    "leaving at the end": "import atexit, os\natexit.register(os._exit, 0)",
    "another assertion error": "import builtins\nclass A(BaseException): pass\nbuiltins.AssertionError = A",
    "no exceptions at all": "import builtins, sys\nbuiltins.BaseException = builtins.Exception = ()\nsys.excepthook = lambda *a: None",
    "tracing the caller": "import sys\ndef t(frame, event, arg):\n    frame.f_trace_lines = False\n    return t\nsys.settrace(t)\nsys._getframe().f_back.f_trace = t",
    "code that is not compiled": "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'\nbuiltins.exec = lambda *a, **k: None\nbuiltins.eval = lambda *a, **k: True",
    "the server's own methods": "import gc\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Server':\n        o.answered = lambda m: {'value': True, 'changed': []}\n        type(o).answered = lambda s, m: {'value': True, 'changed': []}",
    "every function answers true": "import sys\nm = type('M', (dict,), {'__missing__': lambda s, k: lambda *a: True})\nfor f in list(sys.modules.values()):\n    if getattr(f, 'SOURCE', None) == 3: f.Server.done = lambda *a: True",
    "answers before they are asked for": "import os, json\nos.write(4, (json.dumps({'names': ['f']}) + '\\n' + json.dumps({'value': True, 'changed': []}) + '\\n') .encode() * 50)",
    "messages that nobody sends": "import os\nos.write(4, b'{\"callback\": 0, \"args\": [\"m\",0,[\"l\",[]]], \"kwargs\": [\"m\",1,[\"d\",[]]]}\\n' * 20)",
    "deeply nested answers": "import os\nos.write(4, b'{\"names\": ' + b'[' * 100000 + b']' * 100000 + b'}\\n')",
    "an endless answer": "import os\nfor _ in range(400): os.write(4, b'x' * 65536)",
    "numbers that are too large": "import os\nos.write(4, b'{\"names\": [' + b'9' * 100000 + b']}\\n')",
    "closing every descriptor": "import os\nos.closerange(0, 64)",
    "a child that answers": "import os\nif os.fork():\n    os.write(4, b'{\"names\": []}\\n')\n    os._exit(0)",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_false_assertion_never_passes(attack: Attack, name: str) -> None:
    """Honest programs still pass, as the verdict needs nothing of theirs."""
    status, detail, _ = attack(FORGERIES[name] + "\ndef f(x): return x\n", f"assert False, '{SECRET}'", "", 3.0)
    assert status in ("failed", "error", "timeout", "output") and status != "passed", detail


def test_an_honest_program_passes_and_a_wrong_one_fails(attack: Attack) -> None:
    assert attack("def f(x): return x + 1", "assert f(1) == 2")[0] == "passed"
    assert attack("def f(x): return x + 1", "assert f(1) == 3")[0] == "failed"


LIARS = {
    "swallowing failures of a block": ("class f:\n    def __init__(s, x): pass\n    def __enter__(s): return s\n    def __exit__(s, *a): return True", "with f(1):\n    assert False"),
    "swallowing failures of a callback": ("def f(g):\n    try: g(1)\n    except BaseException: pass", "def g(x): assert x == 2\nf(g)"),
    "a fake text of a number": ("class E(int):\n    def __eq__(s, o): return True\n    def __bool__(s): return True\n    __hash__ = int.__hash__\ndef f(x): return E(0)", "assert f(1) and f(1) == 0"),
    "equal to all": ("class E:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return E()", "assert f(1) == 2"),
    "unequal to none": ("class E:\n    def __ne__(s, o): return True\ndef f(x): return E()", "assert f(1) != 1"),
    "no difference": ("class E:\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\n    def __abs__(s): return 0\ndef f(x): return E()", "assert abs(f(1) - 2.5) < 1e-6"),
    "no difference, as a number": ("class E:\n    def __sub__(s, o): return 0.0\ndef f(x): return E()", "assert float(f(1) - 2.5) < 1e-6"),
    "no difference, of a number's class": ("class E(float):\n    def __sub__(s, o): return 0.0\n    def __eq__(s, o): return True\ndef f(x): return E(7)", "assert abs(f(1) - 2.5) < 1e-6"),
    "a text equal to all": ("class E(str):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\ndef f(x): return E('a')", "assert f(1) == 'b'"),
    "a list equal to all": ("class E(list):\n    def __eq__(s, o): return True\ndef f(x): return E([1])", "assert f(1) == [2]"),
    "inside of a list": ("class E:\n    def __eq__(s, o): return True\ndef f(x): return [E()]", "assert f(1) == [2]"),
    "holds everything": ("class E:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter(())\ndef f(x): return E()", "assert 5 in f(1)"),
    "empty without what is expected": ("class E(set):\n    def __xor__(s, o): return set()\n    def __len__(s): return 0\ndef f(x): return E([1])", "assert len(f(1) ^ {1, 2}) == 0"),
    "less than all": ("class E:\n    def __lt__(s, o): return True\ndef f(x): return E()", "assert f(1) < 0"),
    "a fake absolute value": ("def abs(x): return 0\ndef f(x): return 7.0", "assert abs(f(1) - 2.5) < 1e-6"),
    "a fake set": ("def set(x): return 0\ndef f(x): return [7]", "assert set(f(1)) == set([1])"),
    "a fake isinstance": ("def isinstance(*a): return True\ndef f(x): return 7", "assert isinstance(f(1), str)"),
    "a fake math": ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 7.0", "assert math.isclose(f(1), 2.5)"),
    "a fake module": ("import sys\nm = type(sys)('math')\nm.isclose = lambda *a, **k: True\nsys.modules['math'] = m\ndef f(x): return 7.0", "import math\nassert math.isclose(f(1), 2.5)"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIARS)
def test_an_object_is_not_asked_whether_it_is_right(attack: Attack, name: str) -> None:
    """Honest objects still pass: what they hold is compared with plain values, and they are compared with each other."""
    assert attack(*LIARS[name])[0] in ("failed", "error")


HONEST = {
    "a context manager": ("class C:\n    def __enter__(s): return 7\n    def __exit__(s, kind, *a): return kind is ValueError", "with C() as x:\n    assert x == 7\nwith C():\n    raise ValueError\ntry:\n    with C():\n        raise KeyError\nexcept KeyError:\n    pass\nelse:\n    assert False"),
    "a changed argument": ("def f(x): x.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
    "an alias": ("def f(x): return x", "a = [[1]]\nassert f(a) is a and f(a)[0] is a[0]"),
    "an exception": ("class Own(ValueError): pass\ndef f(x): raise Own('no')", "try:\n    f(1)\n    assert False\nexcept Own as e:\n    assert str(e) == 'no'"),
    "a key": ("def f(x, k): return sorted(x, key=k)", "assert f([1, 2], lambda v: -v) == [2, 1]"),
    "objects": ("class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n    def __add__(s, o): return P(s.x + o.x)", "assert P(1) + P(2) == P(3)\nassert (P(1) + P(1)).x == 2\nassert isinstance(P(1), P) and not P(1) == P(2)"),
    "a named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().y == 2"),
    "a generator": ("def f():\n    yield from range(3)", "assert list(f()) == [0, 1, 2] and 2 in f()"),
    "a counter": ("from collections import Counter, deque\ndef f(x): return Counter(x)\ndef g(x): return deque(x)", "from collections import deque\nassert f('aab') == {'a': 2, 'b': 1}\nassert g([1]) == deque([1])"),
    "a sum of one's own": ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
    "a check of a candidate": ("def f(x): return x * 0.1", "def check(candidate):\n    assert abs(candidate(3) - 0.3) < 1e-9\ncheck(f)"),
    "a loop of cases": ("def f(x): return x ** 2", "assert all(f(i) == i * i for i in range(5))"),
    "dates, decimals, fractions": ("import datetime, decimal, fractions\ndef f(d): return d + datetime.timedelta(1)\ndef g(): return decimal.Decimal('0.1'), fractions.Fraction(1, 3)", "import datetime\nfrom decimal import Decimal\nfrom fractions import Fraction\nassert f(datetime.date(2020, 2, 28)) == datetime.date(2020, 2, 29)\nassert g() == (Decimal('0.1'), Fraction(1, 3))"),
    "large and odd numbers": ("def f(x): return x", "import math\nassert f(10 ** 5000) == 10 ** 5000 and f(-0.0) == 0 and math.isnan(f(float('nan'))) and f(1 + 2j) == 1 + 2j"),
    "a state": ("class S:\n    def __init__(s): s.a = []\n    def push(s, x): s.a.append(x)\n    def __len__(s): return len(s.a)", "s = S()\ns.push(1)\ns.push('x')\nassert len(s) == 2 and s.a == [1, 'x'] and s"),
    "asyncio": ("import asyncio\nasync def g(): return 3\ndef f(): return asyncio.run(g())", "assert f() == 3"),
    "threads and a child": ("import subprocess, threading\ndef f():\n    t = threading.Thread(target=print)\n    t.start(); t.join()\n    return subprocess.run(['echo', 'a'], capture_output=True, text=True).stdout", "assert f() == 'a\\n'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_tests_of_every_shape_pass(attack: Attack, name: str) -> None:
    assert attack(*HONEST[name])[:2] == ("passed", "")


def test_the_text_of_a_test_is_nowhere_in_the_program_s_process(attack: Attack) -> None:
    """Honest programs are given their arguments, which is all that they need."""
    program = (
        "import gc, sys\ndef f(x):\n"
        "    seen, frame = [], sys._getframe()\n"
        "    while frame:\n        seen += [repr(frame.f_locals), repr(frame.f_code.co_consts)]; frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, str, bytes))][:20000]\n"
        "    for file in ('/proc/self/mem', '/proc/self/maps', '/proc/self/environ', '/proc/1/environ'):\n"
        "        try: seen.append(open(file, errors='replace').read(10**6))\n        except OSError: pass\n"
        "    return '\\n'.join(seen)[:10**7]\n"
    )
    hidden = f"expected = '{SECRET}'\nseen = f('given')\nassert 'given' in seen\nassert expected not in seen"
    assert attack(program, hidden)[:2] == ("passed", "")


def test_the_expected_output_is_not_given_to_the_program(attack: Attack) -> None:
    program = "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'output' in o and 'input' in o]\nprint(len(found), input())"
    assert printed(attack, program, "7") == "0 7\n"


def test_a_program_that_ends_badly_after_printing_what_is_wanted_does_not_pass(attack: Attack) -> None:
    assert attack("print('right')\nimport os\nos._exit(3)")[0] == "error"
    assert attack("print('right')\nimport os\nos.kill(os.getpid(), 11)\nos.abort()")[0] == "error"
    assert printed(attack, "print('right')") == "right\n"


def test_the_program_s_text_cannot_be_changed_and_other_descriptors_are_not_there(attack: Attack) -> None:
    program = "import os\nopen_ones = []\nfor fd in range(64):\n    try:\n        os.fstat(fd); open_ones.append(fd)\n    except OSError: pass\nprint(open_ones)"
    assert printed(attack, program) == "[0, 1, 2]\n"
    status, _, stdout = attack("import os\ntry:\n    os.write(0, b'x')\nexcept OSError:\n    print('sealed')")
    assert (status, stdout) == ("passed", "sealed\n")
