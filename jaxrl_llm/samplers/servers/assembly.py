"""Puts a fleet together: of servers that this process starts, of those that are named, and of those that are looked up."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_llm.publication.relays.client import Relays
from jaxrl_llm.samplers.servers.discovery import Discovery, Membership
from jaxrl_llm.samplers.servers.fleet import Fleet
from jaxrl_llm.samplers.servers.fleet_update import Limits
from jaxrl_llm.samplers.servers.local_server import LocalServer, all_ready
from jaxrl_llm.samplers.servers.server_http import ServerHttp, many_files
from jaxrl_llm.samplers.servers.server_update import Inflight, Server


@dataclass(eq=False, kw_only=True)
class Assembly:
    """The parts of a fleet.

    Attributes:
      children: servers that this process starts and stops.
      key: API key of the others.
      urls: addresses of servers that are named.
      discovery: where further servers are looked up.
      api: makes the connection to a server by its address and its key.
      limits: limits of times and tries.
      inflight: treatment of requests in flight while weights change.
      relays: the relays of the servers' hosts; None for none.
      late: whether children start when the first version is written, and not before.
    """

    children: Sequence[LocalServer]
    key: str
    urls: Sequence[str]
    discovery: Discovery
    api: Callable[[str, str], ServerHttp]
    limits: Limits
    inflight: Inflight
    relays: Relays | None = None
    late: bool = False

    def __post_init__(self) -> None:
        self._servers = [Server(http=self.api(c.url, c.key), revive=c.revive) for c in self.children]
        self._servers += [self._named(url) for url in self.urls]

    def start(self) -> None:
        """Starts the children, where they do not wait for the first version, and makes room for a connection to each sample."""
        many_files()
        for child in () if self.late else self.children:
            child.start()

    async def connect(self) -> Fleet:
        """Returns the fleet once a server answers; raises as `Fleet.open` does."""
        for child in self.children if self.late else ():
            child.start()
        await all_ready(self.children)
        for server, child in zip(self._servers, self.children):
            server.http.url = child.url
        fleet = Fleet(servers=self._servers, limits=self.limits, inflight=self.inflight, relays=self.relays)
        if not self.discovery:
            await fleet.open()
            return fleet
        fixed = [server.http.url for server in self._servers]
        membership = Membership(fleet=fleet, discovery=self.discovery, make=self._named, fixed=fixed)
        await membership.open(self.limits.wait_s)
        return fleet

    async def disconnect(self) -> None:
        """Stops the children and closes all connections; raises the first error once all have ended."""
        ends = [*(child.stop() for child in self.children), *(server.http.close() for server in self._servers)]
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    def _named(self, url: str) -> Server:
        return Server(http=self.api(url, self.key))
