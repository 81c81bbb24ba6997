"""The token service: sessions over any sampler, in which each call continues exact token ids."""

import asyncio
import gc
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_llm.agents.session import Asked, Call, Ended, Session
from jaxrl_llm.experience import Completion, SamplingParams
from jaxrl_llm.protocols import Conversation, Conversing, Keeping, Sampler

# Collections of the middle generation, of which a call of an agent makes about 1/80: from how many on a full one is made where nobody waits,
# and anywhere.
_DUE, _RARE = 100, 1_000
_REMEMBERED = 10_000  # closed sessions whose late requests are answered with that reason


class Overloaded(Exception):
    """Raised where more calls are in flight than the service accepts."""


class Collections:
    """Full collections of Python's garbage, which look at all objects of the process while its event loop stands still.

    With JAX, transformers and a thousand sessions one takes 0.1 to 0.4 s. While a gateway listens they are rare, and made where nobody waits.
    """

    def __init__(self) -> None:
        self._open = 0
        self._usual = gc.get_threshold()

    def begin(self) -> None:
        """Makes full collections rare until `end` was called as often as this; those of young objects stay as they are."""
        if not self._open:
            self._usual = gc.get_threshold()
            gc.set_threshold(*self._usual[:2], max(_RARE, self._usual[2]))
        self._open += 1

    def end(self) -> None:
        """Undoes one `begin`."""
        self._open -= 1
        if not self._open:
            gc.set_threshold(*self._usual)

    def now(self) -> None:
        """Makes a full collection where they are rare and one is due; for moments when nobody waits."""
        if self._open and gc.get_count()[2] >= _DUE:
            gc.collect()


COLLECTIONS = Collections()  # of this process


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The settings of one call beside its prompt, bounded by the session's.

    Attributes:
      max_tokens: most tokens to sample; None for as many as fit.
      stop_strings: further strings that end the completion.
      stop_token_ids: further token ids that end it.
      seed: a seed, with which equal calls of the session sample the same tokens.
      settings: how tokens are drawn, where the session is not trained; None for the session's settings.
      adapter: name of the loaded adapters that draw, which are not learned from; "" for the policy.
      fork: the reason for a new branch, see `Session.begin`.
    """

    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    settings: SamplingParams | None = None
    adapter: str = ""
    fork: str = ""


@dataclass(eq=False)
class TokenService:
    """Sessions over one sampler.

    Attributes:
      sampler: continues token prefixes.
      settings: the run's sampling parameters, which sessions have unless they are opened with others.
      max_length: most tokens of a call's prompt and completion together; None is the sampler's own.
      at_once: expected number of simultaneous calls, for which an embedded sampler reserves room.
      most_waiting: number of calls in flight at which further ones are refused.
      model: the policy's name in requests.
    """

    sampler: Sampler
    settings: SamplingParams
    max_length: int | None = None
    at_once: int = 64
    most_waiting: int = 16_384
    model: str = "policy"
    counters: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        own = getattr(self.sampler, "max_length", None)
        self.length: int = min(n for n in (self.max_length, own, 1 << 30) if n is not None)
        self._sessions: dict[str, Session] = {}
        self._past: OrderedDict[str, Session] = OrderedDict()
        self._converses = isinstance(self.sampler, Conversing)
        self._in_flight = self._sampling = 0  # accepted calls, and those of them that the sampler has
        self._flowing, self._empty = asyncio.Event(), asyncio.Event()
        self._flowing.set()
        self._empty.set()

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the adapters that the sampler has loaded, which requests may name in place of the policy."""
        return [name for name in getattr(self.sampler, "loaded", ()) if name != self.model]

    # -- sessions ------------------------------------------------------------------------------------------------------

    def open(
        self, *, seed: int, settings: SamplingParams | None = None, max_length: int | None = None, max_tokens: int | None = None,
        max_calls: int | None = None, trained: bool = True,
    ) -> Session:  # fmt: skip
        """Opens a session with a new secret.

        Args:
          seed: seed of all its samples.
          settings: how tokens are drawn; None is the run's settings.
          max_length: most tokens of a prompt and its completion; bounded by the service's length.
          max_tokens: most tokens sampled in all calls; None for no limit.
          max_calls: most calls; None for no limit.
          trained: whether the session is learned from; requests may then not change how tokens are drawn.
        """
        length = self.length if max_length is None else min(max_length, self.length)
        session = Session(
            id=secrets.token_hex(8), key=secrets.token_urlsafe(32), settings=settings or self.settings, seed=seed,
            max_length=length, max_tokens=max_tokens, max_calls=max_calls, trained=trained, on_close=self._closed,
        )  # fmt: skip
        self._sessions[session.id] = session
        return session

    def session(self, id: str) -> Session | None:
        """Returns an open session, or a recently closed one; None for others."""
        return self._sessions.get(id) or self._past.get(id)

    @property
    def sessions(self) -> Sequence[Session]:
        """The open sessions."""
        return tuple(self._sessions.values())

    def _closed(self, session: Session) -> None:
        del self._sessions[session.id]
        self._past[session.id] = _ended(session)
        self._forget(session)
        if len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
        self.counters["sessions"] += 1
        self.counters.update({name: int(value) for name, value in session.metrics().items()})

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def continue_(
        self, session: Session, ids: np.ndarray, *, max_tokens: int | None = None, stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:  # fmt: skip
        """Samples a continuation of `ids`, int32 [P], and records it in the session; raises as `call` does."""
        wish = Wish(max_tokens=max_tokens, stop_strings=tuple(stop_strings), stop_token_ids=tuple(stop_token_ids))
        return (await self.call(session, ids, wish)).completion

    async def call(self, session: Session, ids: np.ndarray, wish: Wish) -> Call:
        """Samples a continuation of `ids`, int32 [P], as a call of the session.

        A call that arrives while the weights change waits. Where the caller is cancelled, sampling ends and the call is not recorded.

        Raises:
          Ended: the session is closed, also while the call is in flight, or one of its limits is reached.
          ValueError: the prompt is too long (`session.TooLong`), or the sampler refuses the request.
          Overloaded: too many calls are in flight.
        """
        if self._in_flight >= self.most_waiting:
            raise Overloaded(f"{self._in_flight} calls are in flight or wait, the most that are taken")
        asked = session.begin(np.asarray(ids, np.int32), wish.fork, wish.adapter)
        work = asyncio.create_task(self._sampled(session, asked, wish))
        session.running(asked, work.cancel)
        self._in_flight += 1
        try:
            completion, served = await work
        except asyncio.CancelledError:
            session.give_up(asked)
            task = asyncio.current_task()
            if session.closed and not (task is not None and task.cancelling()):
                raise Ended("closed", f"the session {session.id} was closed") from None
            raise
        except BaseException:
            session.give_up(asked)
            raise
        finally:
            self._in_flight -= 1
        return session.finish(asked, completion, served)

    async def _sampled(self, session: Session, asked: Asked, wish: Wish) -> tuple[Completion, int]:
        """Returns the completion, and the version that was served when it was requested."""
        self.counters["held_calls"] += not self._flowing.is_set()
        while not self._flowing.is_set():  # another update may have begun before this task goes on
            await self._flowing.wait()
        self._empty.clear()
        self._sampling += 1
        try:
            settings = self._settings(session, len(asked.prompt), wish)
            seed = session.draw_seed(asked, wish.seed)
            given: dict[str, Any] = {}
            if self._converses:
                known = 0 if asked.parent is None else asked.parent.length
                given["conversation"] = Conversation(
                    id=session.id, length=session.max_length, known=known, at_once=self.at_once
                )
            served = self.sampler.version
            groups = self.sampler.sample([asked.prompt], 1, settings, [seed], **given)
            try:
                async for _, (completion,) in groups:
                    return completion, served
            finally:
                if (end := getattr(groups, "aclose", None)) is not None:
                    await end()  # an abandoned iterator would go on sampling
            raise RuntimeError("the sampler ended without a completion")
        finally:
            self._sampling -= 1
            if not self._sampling:
                self._empty.set()

    def _settings(self, session: Session, length: int, wish: Wish) -> SamplingParams:
        """Returns a call's sampling parameters: the session's, or the call's where it is not trained, with the stops of both, within
        all limits."""
        own = session.settings
        drawn = own if session.trained or wish.settings is None else wish.settings
        wished = own.max_tokens if wish.max_tokens is None else wish.max_tokens
        most = max(1, min(own.max_tokens, wished, session.max_length - length, session.left()))
        return replace(
            drawn, adapter=wish.adapter or own.adapter, max_tokens=most, min_tokens=min(drawn.min_tokens, most),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *wish.stop_token_ids))),
            stop_strings=tuple(dict.fromkeys((*own.stop_strings, *wish.stop_strings))),
        )  # fmt: skip

    # -- updates of the weights ----------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """Lets no call reach the sampler until `flow`; returns when those in progress have ended. Calls wait meanwhile.

        This is for a sampler that cannot sample while the learner updates, as the embedded one: around scoring, the update and its publication.
        """
        self._flowing.clear()
        await self._empty.wait()
        for session in self.sessions:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """Frees what the sampler keeps of a session."""
        if isinstance(self.sampler, Keeping):
            self.sampler.forget(session.id)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for `flow`."""
        return 0 if self._flowing.is_set() else self._in_flight - self._sampling

    def flow(self) -> None:
        """Lets the calls that waited, and later ones, reach the sampler."""
        self._flowing.set()

    async def close(self) -> None:
        """Closes all sessions, which ends their calls."""
        for session in self.sessions:
            session.close()
        await self._empty.wait()

    def take(self) -> Mapping[str, float]:
        """Returns the counts of sessions closed since the last call, and of open ones, named "agents/...".

        A step asks once; where the sampler has no call then, Python's garbage may be collected.
        """
        found = {f"agents/{name}": float(value) for name, value in self.counters.items()}
        self.counters.clear()
        if not self._sampling:
            COLLECTIONS.now()
        return found | {"agents/open_sessions": float(len(self._sessions)), "agents/in_flight": float(self._in_flight)}


def _ended(session: Session) -> Session:
    """The id and the secret of a closed session, by which late requests are told so; its calls are its owner's alone."""
    found = Session(id=session.id, key=session.key, settings=session.settings, seed=0, max_length=session.max_length)
    found.closed = True
    return found
