"""Finds a fleet's servers repeatedly: in a file of addresses, or by a DNS name that stands for several.

A headless Service of Kubernetes is such a name: it resolves to the addresses of the pods that are ready.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from jaxrl_llm import components
from jaxrl_llm.samplers.servers.answers import ServerFault
from jaxrl_llm.samplers.servers.fleet import Fleet
from jaxrl_llm.samplers.servers.server_update import Server

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Where servers are looked up during a run.

    Attributes:
      file: text file of addresses such as http://10.0.0.7:9000, one a line; "#" begins a comment. None for no file.
      dns: address whose name stands for several hosts, such as http://samplers.default.svc:9000. None for no name.
      every_s: seconds between look-ups.
      leave_s: seconds that requests in flight have to end at a server that is no longer listed, before other servers are asked.
    """

    file: str | None = None
    dns: str | None = None
    every_s: float = 5.0
    leave_s: float = 60.0

    def __post_init__(self) -> None:
        if self.file and self.dns:
            raise ValueError(
                f"Discovery takes a file or a name, not both (got {self.file!r} and {self.dns!r}): set one to None"
            )
        if self.dns is not None:
            parts = urlsplit(self.dns)
            if parts.scheme != "http" or not parts.hostname or parts.port is None:
                raise ValueError(f"Discovery.dns must be like http://NAME:PORT (got {self.dns!r})")
        components.above(self, 0, "every_s")
        components.at_least(self, 0, "leave_s")

    def __bool__(self) -> bool:
        return bool(self.file or self.dns)

    async def look(self) -> list[str]:
        """Returns the addresses of all servers at present, at least one.

        Raises:
          OSError: the file or the name cannot be read, or holds no address.
          ValueError: a line of the file is not an address.
        """
        found = await (self._resolved() if self.dns else asyncio.to_thread(self._read))
        if not found:
            raise OSError(f"{self.dns or self.file} names no server")
        return list(dict.fromkeys(found))

    def _read(self) -> list[str]:
        lines = [line.partition("#")[0].strip() for line in Path(self.file or "").expanduser().read_text().splitlines()]
        found = [line.rstrip("/") for line in lines if line]
        if bad := [line for line in found if not line.startswith(("http://", "https://"))]:
            raise ValueError(f"{self.file}: {bad[0]!r} is no address: a line is like http://HOST:PORT")
        return found

    async def _resolved(self) -> list[str]:
        parts = urlsplit(self.dns or "")
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        hosts = [f"[{place[0]}]" if family == socket.AF_INET6 else place[0] for family, _, _, _, place in entries]
        return sorted(f"http://{host}:{parts.port}" for host in hosts)


@dataclass(eq=False, kw_only=True)
class Membership:
    """Keeps a fleet's servers equal to those that are listed.

    Attributes:
      fleet: the fleet.
      discovery: looks servers up; where that fails, the servers last found stay.
      make: makes a server, not connected yet, of an address.
      fixed: addresses of servers that always belong to the fleet.
    """

    fleet: Fleet
    discovery: Discovery
    make: Callable[[str], Server]
    fixed: Sequence[str] = ()
    _problem: str = field(default="", init=False)

    async def open(self, wait_s: float) -> None:
        """Opens the fleet once a server is found and answers; then starts the repeated look-ups.

        Raises:
          ServerFault: no server answered within `wait_s`.
          Refused: a server is not set up for updates.
        """
        limit = time.monotonic() + wait_s
        while True:
            await self.look()
            try:
                await self.fleet.open()
                break
            except ServerFault as fault:
                if time.monotonic() > limit:
                    raise ServerFault(f"no server within {wait_s:g} s ({self._problem or fault})") from fault
            await asyncio.sleep(min(self.discovery.every_s, 1.0))
        self.fleet.tasks.append(asyncio.create_task(self._keep()))

    async def look(self) -> None:
        """Adds servers that are new in the list, and lets go of those that are no longer in it."""
        try:
            urls = await self.discovery.look()
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                _log.warning("servers stay as they are: %s", error)
            self._problem = str(error)
            return
        self._problem = ""
        listed, known = {*urls, *self.fixed}, {s.http.url for s in self.fleet.servers}
        for server in [s for s in self.fleet.servers if s.http.url not in listed]:
            _log.warning("%s server %s left", server.http.kind, server.http.url)
            self.fleet.leave(server, self.discovery.leave_s)
        for url in urls:
            if url not in known and not self.fleet.leaves(url):
                self.fleet.join(self.make(url))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.discovery.every_s)
            await self.look()
