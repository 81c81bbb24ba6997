"""Seconds of compilation: those of programs compiled at once count once."""

import threading

import pytest

from jaxrl_llm.metrics import profiling


def test_seconds_of_programs_compiled_at_a_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ends = profiling.Compilations(), iter((3.0, 4.0, 6.0, 10.0))
    monkeypatch.setattr(profiling.time, "perf_counter", ends.__next__)
    # From 1 to 3, 0 to 4 around it, 2 to 6 across its end, and 9 to 10 alone; another event beside each.
    for duration in (2.0, 4.0, 4.0, 1.0):
        made._listen(profiling.EVENT, duration)
        made._listen("/jax/core/compile/jaxpr_trace_duration", 100.0)
    assert (made.take(), made.spent()) == (4, pytest.approx(7.0))
    assert (made.take(), made.spent()) == (0, 0.0)


def test_programs_that_threads_compile_are_counted() -> None:
    made = profiling.Compilations()
    threads = [threading.Thread(target=made._listen, args=(profiling.EVENT, 0.5)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.take() == 8 and 0.5 <= made.spent() < 4.0
