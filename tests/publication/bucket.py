"""A server that speaks as much of the JSON API of Google's storage and of S3 as tensorstore needs; objects in memory."""

import asyncio
import hashlib
import threading
from collections import Counter
from typing import Any
from xml.sax.saxutils import escape

from aiohttp import web

KEY = "a-key-of-the-tests"
TOKEN = "a-token-of-the-tests"


class Bucket:
    """Objects by key, of one bucket under any name.

    Attributes:
      objects: {key: (generation, content)}.
      fails: requests that are answered with 503 from now on.
      refuses: requests whose key ends like this are answered with 403.
      counts: requests by verb.
      written: keys in the order of their writing.
      sent: bytes that were read of objects, by key.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.fails = 0
        self.refuses = ""
        self.counts: Counter[str] = Counter()
        self.written: list[str] = []
        self.sent: Counter[str] = Counter()
        self.generation = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/storage/v1/b/{bucket}/o", self.google_list)
        app.router.add_post("/upload/storage/v1/b/{bucket}/o", self.google_write)
        app.router.add_route("*", "/storage/v1/b/{bucket}/o/{key:.+}", self.google)
        app.router.add_get("/{bucket}/", self.amazon_list)
        app.router.add_route("*", "/{bucket}/{key:.+}", self.amazon)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, self.host, 0).start())
        self.url = f"http://{self.host}:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def _refused(self, request: web.Request, key: str) -> web.Response | None:
        self.counts[request.method] += 1
        signed = request.headers.get("Authorization", "")
        if signed != f"Bearer {TOKEN}" and f"AWS4-HMAC-SHA256 Credential={KEY}/" not in signed:
            return web.Response(status=401, text="no credentials")
        if self.fails > 0:
            self.fails -= 1
            return web.Response(status=503, text="try again")
        if self.refuses and key.endswith(self.refuses):
            return web.Response(status=403, text="not allowed")
        return None

    def _read(self, request: web.Request, key: str) -> web.Response:
        if key not in self.objects:
            return web.Response(status=404)
        generation, content = self.objects[key]
        headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
        if "Range" not in request.headers:
            self.sent[key] += len(content)
            return web.Response(body=content, headers=headers)
        asked = request.http_range
        start, stop = asked.start or 0, len(content) if asked.stop is None else min(asked.stop, len(content))
        if start >= len(content):
            return web.Response(status=416)
        self.sent[key] += stop - start
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return web.Response(status=206, body=content[start:stop], headers=headers)

    def _write(self, key: str, content: bytes) -> int:
        self.generation += 1
        self.objects[key] = (self.generation, content)
        self.written.append(key)
        return self.generation

    # -- Google ----------------------------------------------------------------------------------------------------

    async def google(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if (refused := self._refused(request, key)) is not None:
            return refused
        if request.method == "GET":
            return self._read(request, key)
        assert request.method == "DELETE"
        return web.Response(status=204 if self.objects.pop(key, None) else 404)

    async def google_write(self, request: web.Request) -> web.Response:
        key, content = request.query["name"], await request.read()
        if (refused := self._refused(request, key)) is not None:
            return refused
        return web.json_response(self._described(key, self._write(key, content)))

    async def google_list(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request, "")) is not None:
            return refused
        first, last = request.query.get("startOffset", ""), request.query.get("endOffset", "\U0010ffff")
        found = [key for key in self.keys() if first <= key < last]
        return web.json_response({"items": [self._described(key, self.objects[key][0]) for key in found]})

    def _described(self, key: str, generation: int) -> dict[str, str]:
        size = len(self.objects[key][1])
        return {"name": key, "generation": str(generation), "metageneration": "1", "size": str(size), "bucket": "b"}

    # -- S3 --------------------------------------------------------------------------------------------------------

    async def amazon(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if (refused := self._refused(request, key)) is not None:
            return refused
        if request.method == "GET":
            return self._read(request, key)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return web.Response(status=204)
        assert request.method == "PUT"
        content = await request.read()
        if hashlib.sha256(content).hexdigest() != request.headers["x-amz-content-sha256"]:
            return web.Response(status=400, text="the content is not what was signed")
        return web.Response(headers={"ETag": f'"{self._write(key, content)}"'})

    async def amazon_list(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request, "")) is not None:
            return refused
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key][1])}</Size></Contents>"
            for key in self.keys(request.query.get("prefix", ""))
        )
        text = f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>'
        return web.Response(text=text, content_type="application/xml")


def pointed_at(bucket: Bucket, patch: Any) -> None:
    """Has clients of S3 in this process reach the bucket, by pytest's monkeypatch."""
    patch.setenv("AWS_ENDPOINT_URL", bucket.url)
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", "a secret of the tests")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
