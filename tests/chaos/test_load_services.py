"""The load test of services starts each, loads it and gives a row of a table for each kind of request."""

import os

import load_services
import pytest


def test_a_service_is_started_loaded_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*load_services.HERE, os.environ.get("PYTHONPATH", "")]))
    rows = list(load_services.lines(clients=2, seconds=0.3, only=["letters", "proxy"]))
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0].split(",")[0] for row in cells] == ["letters /score", "vLLM proxy /health", "vLLM proxy /generate"]
    for name, clients, requests, failed, rate, p50, p99, _ in cells:
        assert clients == "2" and failed == "0" and int(requests) >= 2, name
        assert 0 < float(p50.removesuffix(" ms")) <= float(p99.removesuffix(" ms")) and float(rate) > 0
    share = sum(letter in "abcde" for letter in load_services.TEXT) / len(load_services.TEXT)
    assert int(cells[0][-1]) == len(f'{{"scores":[{share}],"token_lengths":[{len(load_services.TEXT)}],"count":1}}')
