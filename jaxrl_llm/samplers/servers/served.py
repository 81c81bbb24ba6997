"""What samplers that ask servers have in common: checks of their settings, the servers' key, what precedes the devices."""

import os
from collections.abc import Sequence
from typing import ClassVar

from jaxrl_llm import components
from jaxrl_llm.samplers.servers.autoscale import Autoscale
from jaxrl_llm.samplers.servers.discovery import Discovery
from jaxrl_llm.samplers.servers.fleet_update import Limits
from jaxrl_llm.samplers.servers.local_server import LocalServers, share_gpus
from jaxrl_llm.samplers.servers.publisher import DTYPES


class ServedSampler(Limits):
    """A sampler's settings; each kind declares the fields that are named here, and says what they are to its servers.

    Attributes:
      macro: how the names of the kind's gin macros begin, such as "VLLM".
    """

    macro: ClassVar[str]

    spawn: bool
    local: LocalServers
    urls: Sequence[str]
    discovery: Discovery
    autoscale: Autoscale
    api_key_variable: str

    def check_servers(self, example: str) -> None:
        """Checks the settings of which servers there are, and the limits; `example` is how `urls` may be written.

        Raises:
          ValueError: a setting is not possible; the message says what to do.
        """
        name, macro = type(self).__name__, self.macro
        if self.spawn == bool(self.urls or self.discovery):
            cure = f"set {macro}_SPAWN = False, or leave the others empty"
            if not self.spawn:
                cure = (
                    f"name servers by {macro}_URLS, {macro}_URLS_FILE or {macro}_URLS_DNS, or set {macro}_SPAWN = True"
                )
            raise ValueError(
                f"{name} needs either spawn=True or urls or a Discovery (got spawn={self.spawn}, {len(self.urls)} urls and "
                f"{self.discovery}): {cure}"
            )
        if self.autoscale and not self.discovery:
            raise ValueError(
                f"{name}.autoscale needs a Discovery, by which servers that come and go are found: name a file or a DNS name by {macro}_URLS_FILE "
                f"or {macro}_URLS_DNS, or leave Autoscale.command empty (got {self.autoscale.command!r})"
            )
        components.listed(self, example, "urls")
        if not all(url.startswith(("http://", "https://")) for url in self.urls):
            components.refuse(self, "urls", "addresses like http://HOST:PORT")
        components.choices(self)
        components.one_of(self, DTYPES, "dtype")
        components.above(self, 0, "keep", "sequences", "request_s", "control_s", "update_s", "wait_s", "tries")
        if self.at_once < 0 or self.straggler_s < 0 or not (self.straggler == 0 or self.straggler > 1):
            raise ValueError(
                f"{name}.at_once and straggler_s must be >= 0, straggler 0 or > 1 "
                f"(got {self.at_once}, {self.straggler_s} and {self.straggler})"
            )

    def before_devices(self) -> None:
        """Starts what must run before JAX takes a GPU."""
        if self.spawn and self.local.mps:
            share_gpus(self.local)

    def key(self) -> str:
        """Returns the key of servers that run already; raises ValueError where its variable is not set."""
        if not self.api_key_variable:
            return ""
        if not os.environ.get(self.api_key_variable):
            raise ValueError(
                f"the environment variable {self.api_key_variable} that {type(self).__name__}.api_key_variable names is not set: it holds the "
                "servers' key"
            )
        return os.environ[self.api_key_variable]
