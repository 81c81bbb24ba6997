"""Whether a server still holds the weights that this learner committed last: asked of the server, never believed.

A version's number does not tell. A server that was ended and started anew, one that carries out a commit which its client had given up
waiting for, and one that another learner updates all answer requests as before, from other weights. So each commit carries a random mark,
which the server's plugin keeps beside the weights; an answer counts once the server has named the mark of the last commit, when asked
after the answer's last token had arrived; and a commit says which mark was there before it, for the requests that go on across it.
"""

import asyncio
import uuid
from dataclasses import dataclass, field

from jaxrl_llm.samplers.vllm.answers import ServerFault
from jaxrl_llm.samplers.vllm.server_api import VllmHttp


@dataclass(eq=False, kw_only=True)
class Marks:
    """The marks of one server.

    Attributes:
      http: the server.
      held: the mark of the last commit that went well; empty where nothing is known of the server's weights.
      coming: the mark of a commit that is under way; empty for none.
    """

    http: VllmHttp
    held: str = ""
    coming: str = ""
    _asking: asyncio.Future[set[str]] | None = field(default=None, init=False)
    _next: asyncio.Future[set[str]] | None = field(default=None, init=False)

    def new(self) -> str:
        """Returns a mark for a commit that begins now."""
        self.coming = uuid.uuid4().hex
        return self.coming

    def settle(self) -> None:
        """Notes that the commit went well."""
        self.held, self.coming = self.coming, ""

    def forget(self) -> None:
        """Notes that nothing is known of the server's weights any more."""
        self.held = self.coming = ""

    async def confirm(self) -> None:
        """Returns where the server, asked after this call, holds what was committed last, or is being brought to.

        Of adapters, whose names are the requests' own, nothing is asked.

        Raises:
          ServerFault: it holds something else, or does not say.
        """
        if self.http.adapters:
            return
        found = await self._found()
        if not found or not found <= {self.held, self.coming} - {""}:
            raise ServerFault(
                f"{self.http.url} holds other weights than this learner committed last: it was started anew, carried out a commit "
                "that came late, or another learner updates it"
            )

    async def _found(self) -> set[str]:
        """Returns the marks of the server's ranks; those who wait share the next question, which begins when the present one is answered."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask(self._asking))
        return await asyncio.shield(self._next)

    async def _ask(self, before: asyncio.Future[set[str]] | None) -> set[str]:
        if before is not None:
            await asyncio.wait([before])
        self._asking, self._next = self._next, None
        return {str(rank.get("mark", "")) for rank in await self.http.stage_status()}
