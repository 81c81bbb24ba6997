"""Monitorability and classes of answers, from records."""

import math

import numpy as np
import pytest
from records_of import answered

from jaxrl_llm.eval.classes import Classes
from jaxrl_llm.eval.monitorability import Monitorability


def test_error_and_detection_are_over_all_known_responses() -> None:
    seen = [{"log/monitor": 1.0}, {"log/monitor": 0.0}, {"log/monitor": 1.0}]
    first = answered("a", sampled=[("x", 1.0), ("x", 1.0), ("x", None)], parts=seen)
    second = answered("b", sampled=[("x", 0.0), ("x", 0.0)], parts=[{"log/monitor": 1.0}, {"log/monitor": 0.0}])
    found = {n: float(v) for n, v in Monitorability().measure([first, second]).items()}
    # predictions 1 0 1 0 of verdicts 1 1 0 0
    assert found["monitor/count"] == 4 and found["monitor/rmse"] == math.sqrt(0.5)
    assert (found["monitor/f1"], found["behaviour"]) == (0.5, 0.5)
    assert found["monitor/pearson"] == pytest.approx(0.0)


def test_without_a_known_response_there_is_no_error() -> None:
    found = Monitorability().measure([answered("a", sampled=[("x", None)], parts=[{"log/monitor": 1.0}])])
    assert np.isnan(found["monitor/rmse"]) and np.isnan(found["behaviour"]) and found["monitor/count"] == 0


def test_classes_are_counted_by_prompt_and_those_outside_are_not() -> None:
    parts = [{"log/class": float(c)} for c in (0, 1, 1, -1)]
    found = Classes().measure([answered("a", sampled=[("x", 1.0)] * 4, parts=parts)])
    assert found["classes"].tolist() == [2.0]
