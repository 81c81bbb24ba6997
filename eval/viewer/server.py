"""The viewer's server: the page's files and its JSON answers, on loopback only."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxrl_llm import serving
from jaxrl_llm.eval.viewer import query
from jaxrl_llm.eval.viewer.folders import Shown, find
from jaxrl_llm.eval.viewer.query import Query
from jaxrl_llm.serving import Patience

ASSETS = Path(__file__).parent / "assets"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LOOK_AGAIN_S = 1.0
# Only scripts and styles of the page's own files may run, so that the page never executes text of a rollout.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """Answers requests about the shown runs.

    Args:
      shown: the runs and results at the start.
      paths: folders that are searched for later ones.
    """

    def __init__(self, shown: Sequence[Shown], paths: Sequence[Path] = ()) -> None:
        self.shown = {one.name: one for one in shown}
        self.paths = paths
        self.patience = Patience()
        self._stopped = threading.Event()
        self._said: set[str] = set()

    def application(self) -> web.Application:
        """Returns the web application; while it runs, a thread indexes new lines of the files."""
        app = web.Application(
            middlewares=[serving.middleware(self.patience), serving.guard(serving.LOOPBACK_NAMES, HEADERS)]
        )
        app.router.add_get("/", self._asset)
        app.router.add_get("/assets/{name}", self._asset)
        for name, answer in (
            ("runs", self.runs), ("run", self.run), ("curves", self.curves), ("groups", self.groups),
            ("group", self.group), ("compare", self.compare),
        ):  # fmt: skip
            app.router.add_get(f"/api/{name}", self._json(answer))
        app.cleanup_ctx.append(self._indexing)
        return app

    # -- indexing ------------------------------------------------------------------------------------------------------

    async def _indexing(self, app: web.Application) -> AsyncIterator[None]:
        thread = threading.Thread(target=self.follow, daemon=True)
        thread.start()
        yield
        self._stopped.set()
        await asyncio.to_thread(thread.join, 5)

    def follow(self) -> None:
        """Indexes all files, a chunk of each in turn, then waits for new lines, until the application ends."""
        while not self._stopped.wait(0):
            self._look()
            for one in self.shown.values():
                with contextlib.suppress(OSError):  # a folder that is being moved is read again later
                    one.log.update()
            growing = [one.index.update() for one in self.shown.values()]
            while growing and not self._stopped.is_set():
                growing = [one for one in growing if self._goes_on(one)]
            self._stopped.wait(LOOK_AGAIN_S)

    def _look(self) -> None:
        """Adds the runs and results that began since the last look, named relative to the same folder as the first ones."""
        first = next(iter(self.shown.values()), None)
        if not self.paths or first is None:
            return
        top = first.path.parents[len(Path(first.name).parts) - 1]
        # The folder is being moved, or there are more runs than are shown: earlier findings stay.
        with contextlib.suppress(ValueError, OSError):
            later = find(self.paths, top, {one.path for one in self.shown.values()})
            self.shown = self.shown | {one.name: one for one in later}

    def _goes_on(self, index: Iterator[int]) -> bool:
        try:
            return next(index, None) is not None
        except OSError:  # the folder is being moved
            return False
        except Exception as error:  # a file that cannot be indexed leaves the others visible
            said = f"warning: a file cannot be indexed: {type(error).__name__}: {error}"
            if said not in self._said:
                self._said.add(said)
                print(said, file=sys.stderr, flush=True)
            return False

    # -- answers -------------------------------------------------------------------------------------------------------

    def runs(self, asked: dict[str, str]) -> Any:
        """Returns the table of runs."""
        return [one.facts() for one in self.shown.values()]

    def run(self, asked: dict[str, str]) -> Any:
        """Returns one run: its steps of a kind, the values of filters, its metrics' names and gin text."""
        one = self._one(asked.get("run", ""))
        steps = query.steps(one.index, asked.get("kind", ""))
        return {"steps": steps, "names": one.names(), "metrics": sorted(one.log.values), "config": one.config()}

    def curves(self, asked: dict[str, str]) -> Any:
        """Returns {run: {metric: [steps, values]}} of the requested runs and metrics, which are separated by commas."""
        runs = [self._one(name) for name in asked.get("runs", "").split(",") if name] or list(self.shown.values())
        names = [name for name in asked.get("metrics", "").split(",") if name]
        return {one.name: {name: one.log.curve(name) for name in names if name in one.log.values} for one in runs}

    def groups(self, asked: dict[str, str]) -> Any:
        """Returns a page of groups."""
        return query.groups(self._one(asked.get("run", "")).index, Query.of(asked), _place(asked, "after"))

    def group(self, asked: dict[str, str]) -> Any:
        """Returns complete rollouts of one prompt."""
        return query.members(self._one(asked.get("run", "")).index, Query.of(asked), _place(asked, "first"))

    def compare(self, asked: dict[str, str]) -> Any:
        """Compares two sides on the same prompts; a side's parameters end in its letter: run_a, step_a, kind_a."""
        sides = []
        for letter in ("a", "b"):
            mine = {n.removesuffix(f"_{letter}"): v for n, v in asked.items() if n.endswith(f"_{letter}")}
            sides.append((self._one(mine.get("run", "")).index, Query.of(mine)))
        return query.compare(sides[0], sides[1], _place(asked, "after"))

    def _one(self, name: str) -> Shown:
        if name not in self.shown:
            raise LookupError(f"no run {name!r} here; there are {', '.join(self.shown)}")
        return self.shown[name]

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        file = ASSETS / request.match_info.get("name", "index.html")
        if file.parent != ASSETS or not file.is_file():
            raise web.HTTPNotFound()
        return web.Response(body=file.read_bytes(), content_type=TYPES[file.suffix], charset="utf-8")

    def _json(self, answer: Callable[[dict[str, str]], Any]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return web.json_response(await asyncio.to_thread(answer, dict(request.query)))
            except (ValueError, LookupError) as error:
                status = 400 if isinstance(error, ValueError) else 404
                return web.json_response({"error": str(error.args[0])}, status=status)

        return handle


def _place(asked: dict[str, str], name: str) -> int:
    text = asked.get(name) or "0"
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number (got {text!r})")
    return int(text)
