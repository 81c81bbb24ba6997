"""A metrics endpoint for Prometheus: serves the last step's metrics over HTTP, on loopback, or elsewhere behind a bearer token.

prometheus_client renders the metrics; its own server supports no bearer token and waits for slow clients without a limit.
"""

import hmac
import ipaddress
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from jaxrl_llm import components

_log = logging.getLogger(__name__)

SLOWEST_S = 10.0  # a client that sends nothing for this long is disconnected


@dataclass(frozen=True, kw_only=True)
class Prometheus:
    """Serves `GET /metrics`: for each metric a gauge such as `jaxrl_llm_reward_mean{name="reward/mean"}` with its last value.

    Metrics `count/...` are summed from the start of the process, as `jaxrl_llm_count_..._total`.

    Attributes:
      port: port to listen on; 0 takes a free one, which the log names.
      host: address to listen on; addresses other than loopback need a token.
      token_variable: environment variable with the bearer token that a request must carry; empty for none.
    """

    port: int = 9464
    host: str = "127.0.0.1"
    token_variable: str = ""

    def __post_init__(self) -> None:
        components.within(self, "[0, 65536)", "port")
        if not self.token_variable and not (self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback):
            raise ValueError(
                f"train.Prometheus.host {self.host!r} can be reached from other machines: set train.Prometheus.token_variable "
                "to the name of an environment variable that holds a token"
            )

    def open(self, run_dir: Path, resume_step: int | None, total_steps: int | None = None) -> "PrometheusWriter":
        """Starts to listen.

        Raises:
          ValueError: the environment variable of the token is not set.
          OSError: the port is taken.
        """
        token = os.environ.get(self.token_variable, "") if self.token_variable else ""
        if self.token_variable and not token:
            raise ValueError(f"the environment variable {self.token_variable} (Prometheus.token_variable) is not set")
        try:
            writer = PrometheusWriter(self.host, self.port, token)
        except OSError as error:
            advice = "set train.Prometheus.port to a free one, or 0"
            raise OSError(error.errno, f"{error.strerror} (listening on {self.host}:{self.port}): {advice}") from error
        _log.info("metrics are served on %s", writer.url)
        return writer


class PrometheusWriter:
    """Serves the last value of each metric from its own thread."""

    def __init__(self, host: str, port: int, token: str = "") -> None:
        self._lock = threading.Lock()
        self._step, self._written = 0, time.time()
        self._last: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        registry = CollectorRegistry()
        registry.register(self)
        self._server = ThreadingHTTPServer((host, port), _handler(registry, token))
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._step, self._written = step, time.time()
            for name, value in values.items():
                if name.startswith("count/"):
                    self._counts[name] += int(value)
                else:
                    self._last[name] = float(value)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing, since texts are not metrics."""

    def text(self, name: str, text: str) -> None:
        """Does nothing, since documents are not metrics."""

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Yields every metric; the client library calls this for each scrape."""
        with self._lock:
            last, counts, step, written = dict(self._last), dict(self._counts), self._step, self._written
        yield GaugeMetricFamily("jaxrl_llm_step", "The last step that was written.", step)
        yield GaugeMetricFamily("jaxrl_llm_step_time_seconds", "Unix time at which it was written.", written)
        families: dict[str, Metric] = {}
        for name, value in sorted(last.items()):
            family = families.setdefault(spelled(name), GaugeMetricFamily(spelled(name), name, labels=["name"]))
            family.add_sample(spelled(name), {"name": name}, value)
        for name, count in sorted(counts.items()):
            family = families.setdefault(f"{spelled(name)}_total", CounterMetricFamily(spelled(name), name))
            family.add_sample(f"{spelled(name)}_total", {"name": name}, count)
        yield from families.values()


def spelled(name: str) -> str:
    """Spells a metric's name in the letters that Prometheus allows; the label `name` distinguishes names that become equal."""
    return "jaxrl_llm_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _handler(registry: CollectorRegistry, token: str) -> type[BaseHTTPRequestHandler]:
    from jaxrl_llm import serving  # imported here, since it brings aiohttp, which takes long to import

    class Handler(BaseHTTPRequestHandler):
        timeout = SLOWEST_S

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            refused = serving.refusal(
                {name.lower(): value for name, value in self.headers.items()},
                False,
                None if token else serving.LOOPBACK_NAMES,
            )
            if refused:
                self.send_error(refused[0], "a request of another site")
            elif token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
                self.send_error(401, "the token is missing or wrong")
            elif self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "there is /metrics alone")
            else:
                body = generate_latest(registry)
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Does nothing, since scrapes are not logged."""

    return Handler
