"""The metrics endpoint, read by Prometheus's own parser."""

import logging
import math
import socket
import urllib.request
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_llm.command_line import build
from jaxrl_llm.metrics.prometheus import Prometheus
from jaxrl_llm.protocols import Writer


def scraped(url, token=""):
    """{(name, label "name"): value} of a scrape."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(s.name, s.labels.get("name")): s.value for family in families for s in family.samples}


@pytest.fixture
def writer(tmp_path):
    opened = Prometheus(port=0).open(tmp_path, None)
    yield opened
    opened.close()


def test_a_scrape_has_the_last_value_of_each_metric_and_sums_of_counts(writer):
    assert isinstance(writer, Writer)
    writer.write(1, {"reward/mean": 0.25, "count/empty": 2.0, "eval/heldout/pass@4": 0.5})
    writer.write(2, {"reward/mean": float("nan"), "count/empty": 3.0, "loss/total": -1.5})
    found = scraped(writer.url)
    assert found.pop(("jaxrl_llm_step_time_seconds", None)) > 1.7e9
    assert math.isnan(found.pop(("jaxrl_llm_reward_mean", "reward/mean")))
    assert found == {
        ("jaxrl_llm_step", None): 2.0,
        ("jaxrl_llm_eval_heldout_pass_4", "eval/heldout/pass@4"): 0.5,
        ("jaxrl_llm_loss_total", "loss/total"): -1.5,
        ("jaxrl_llm_count_empty_total", "count/empty"): 5.0,
    }


def test_names_that_prometheus_spells_alike_stay_apart(writer):
    writer.write(1, {"pass@4": 1.0, "pass/4": 2.0})
    found = scraped(writer.url)
    assert (found["jaxrl_llm_pass_4", "pass@4"], found["jaxrl_llm_pass_4", "pass/4"]) == (1.0, 2.0)


def test_there_is_no_other_page_and_no_other_host_without_a_token(writer):
    assert writer.url.startswith("http://127.0.0.1:")
    with pytest.raises(HTTPError, match="404"):
        scraped(writer.url.replace("/metrics", "/"))
    with pytest.raises(ValueError, match=r"0\.0\.0\.0.*other machines.*token_variable"):
        Prometheus(host="0.0.0.0")


def test_a_request_needs_the_token_where_there_is_one(tmp_path, monkeypatch):
    settings = Prometheus(host="0.0.0.0", port=0, token_variable="METRICS_TOKEN")
    with pytest.raises(ValueError, match=r"METRICS_TOKEN .*is not set"):
        settings.open(tmp_path, None)
    monkeypatch.setenv("METRICS_TOKEN", "long and secret")
    writer = settings.open(tmp_path, None)
    url = writer.url.replace("0.0.0.0", "127.0.0.1")
    for wrong in ("", "long and secre", "long and secret!"):
        with pytest.raises(HTTPError, match="401"):
            scraped(url, wrong)
    assert scraped(url, "long and secret")["jaxrl_llm_step", None] == 0.0
    writer.close()


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}.*train\.Prometheus\.port"):
            Prometheus(port=port).open(tmp_path, None)


def test_the_gin_file_adds_the_endpoint_to_the_usual_writers(tmp_path, caplog):
    files = ["gin/quickstart.gin", "gin/writers/prometheus.gin"]
    run, _ = build(files, [f"RUN_DIR={str(tmp_path)!r}", "METRICS_PORT=0", "WARN_AFTER=60", "STOP_AFTER=120"])
    assert [type(w).__name__ for w in run.writers] == ["Console", "Jsonl", "TensorBoard", "Prometheus"]
    assert (run.watch.warn_after_s, run.watch.stop_after_s) == (60, 120)
    with caplog.at_level(logging.INFO, "jaxrl_llm"):
        writer = run.writers[-1].open(tmp_path, None)
    writer.close()
    assert writer.url in caplog.text
