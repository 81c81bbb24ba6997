"""Malformed requests from a seed: JSON bodies that were cut, flipped, retyped or nested, and HTTP that is none."""

import asyncio
import json
import random
from typing import Any

ODD_TEXTS = (
    b"", b"null", b"0", b"[]", b'"text"', b"{", b"}", b"{}{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"\x00", b"{'a': 1}", b"NaN",
    b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a":' * 50_000, b'"\\ud800"', b"1" * 10_000, b"-" * 10_000,
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, 1.5, float("nan"), float("inf"), -0.0, "", "\x00", "\ud800", "a" * 20_000, "😀" * 500, [], {}, [[]],
    [None], {"": {}}, [[[[]]]], ["a"] * 2000, {"role": "x"}, "../../etc/passwd", "'; DROP TABLE runs; --", "<script>", "%s%n",
)  # fmt: skip
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"PATCH",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"post",
    b"\xff",
    b"",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value, its own first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


def retyped(rng: random.Random, value: Any) -> Any:
    """The value with one inside it replaced, removed or doubled."""
    value = json.loads(json.dumps(value))
    path = rng.choice(places(value))
    if not path:
        return rng.choice(ODD_VALUES)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    action = rng.random()
    if action < 0.7:
        holder[path[-1]] = rng.choice(ODD_VALUES)
    elif isinstance(holder, dict):
        old = holder.pop(path[-1])
        if action < 0.85:
            holder[str(path[-1]) + rng.choice(("_", " ", "\x00", "2"))] = old
    else:
        holder += [holder[path[-1]]] * rng.randrange(1, 50)
    return value


def body(rng: random.Random, valid: Any) -> bytes:
    """A body that is, most often, not what the service takes."""
    text, kind = json.dumps(valid).encode(), rng.randrange(8)
    if kind <= 3:
        return json.dumps(retyped(rng, valid), ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    if kind == 4:
        return text[: rng.randrange(len(text))]
    if kind == 5:
        damaged = bytearray(text)
        for _ in range(rng.randrange(1, 9)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    if kind == 6:
        at = rng.randrange(len(text))
        return text[:at] + rng.randbytes(rng.randrange(1, 64)) + text[at:]
    return rng.choice(ODD_TEXTS)


def request(rng: random.Random, path: str, valid: Any, headers: dict[str, str]) -> tuple[bytes, bool]:
    """A whole request as bytes, and whether it is malformed as HTTP too, as one of six is."""
    content, method, target = body(rng, valid), b"POST", path.encode()
    lines = [b"Host: localhost", b"Content-Type: application/json", *(f"{n}: {v}".encode() for n, v in headers.items())]
    length: bytes | None = str(len(content)).encode()
    malformed = rng.random() < 1 / 6
    if malformed:
        odd = rng.randrange(9)
        if odd == 0:
            method = rng.choice(METHODS)
        elif odd == 1:
            target = rng.choice(
                (b"/" * 5000, b"/..%2f..%2fetc/passwd", b"*", b"http://evil/", path.encode() + b"?\xff=\x00", b"")
            )
        elif odd == 2:
            length = rng.choice(
                (b"-1", b"1e3", b"999999999999999", str(len(content) + 50).encode(), b"0", b"\xb2", b"1, 2")
            )
        elif odd == 3:
            length = None
        elif odd == 4:
            length, content = None, rng.choice((b"zz\r\n", b"5\r\nab", b"-1\r\n\r\n", b"ffffffffffffffff\r\n"))
            lines.append(b"Transfer-Encoding: chunked")
        elif odd == 5:
            lines += [b"X: " + b"a" * rng.choice((9_000, 70_000))]
        elif odd == 6:
            lines += [
                rng.choice((b"no colon", b"a b: c", b": empty", b"Host: other", b"X: \x00", b"Expect: 100-continue"))
            ]
        elif odd == 7:
            return rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n", True
        else:
            lines += [f"X-{i}: {i}".encode() for i in range(3000)]
    if length is not None:
        lines.append(b"Content-Length: " + length)
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", *lines, b"", content]), malformed


async def status(host: str, port: int, raw: bytes, *, ends: bool = False, limit_s: float = 30.0) -> int | None:
    """The status that raw bytes are answered with, None where the connection is closed without; TimeoutError for neither.

    Args:
      ends: says, after a while without an answer, that nothing more comes.
    """
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(host, port)
        answer = asyncio.ensure_future(reader.readline())
        try:
            writer.write(raw)
            if ends:
                await asyncio.wait({answer}, timeout=0.3)
                writer.write_eof()
            line = await answer
            return int(line.split()[1]) if line.startswith(b"HTTP/") else None
        except OSError:
            return None
        finally:
            answer.cancel()
            writer.transport.abort()
