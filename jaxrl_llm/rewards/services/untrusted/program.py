"""Runs a program as the sandbox's guard starts it, and answers the judge's calls of its functions (standard library only).

The text of values.py comes before this one's in the interpreter that runs it; the judge imports that file for itself.
A program can do here what it likes: it is given arguments and answers by itself, but tests, expected values and
verdicts are in another process. Descriptor 3 brings the program, 5 the calls, 4 takes the answers.
"""

from __future__ import annotations

import builtins
import os
import site
import sys

from jaxrl_llm.rewards.services.untrusted.values import Decoder, Encoder, Line, based

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

SOURCE, ANSWERS, CALLS = 3, 4, 5


class Server:
    """A server that answers calls on the names of a program; objects that are not plain stay here, and are sent by number."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope, self.line = scope, Line(CALLS, ANSWERS)
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.foreigners: dict[int, tuple[Any, list[Any]]] = {}

    def number(self, value: Any) -> int:
        """Returns the number of an object, which it keeps for ever."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def encoder(self, known: Sequence[Any] = ()) -> Encoder:
        """Returns an encoder of one message."""

        def other(value: Any) -> list[Any]:
            if id(value) in self.foreigners:
                return self.foreigners[id(value)][1]
            name = getattr(value, "__name__", "") if isinstance(value, type) else ""
            if name and getattr(builtins, name, None) is value:
                return ["n", name]
            if isinstance(value, type) and issubclass(value, BaseException):
                bases = [other(base) for base in value.__bases__ if issubclass(base, BaseException)]
                return ["E", self.number(value), value.__name__, bases]
            return ["o", self.number(value), encoder.encode(based(value))]

        encoder = Encoder(other, known)
        return encoder

    def foreign(self, tag: str, rest: list[Any]) -> Any:
        """Returns what the judge sent that is not plain: an object of this side, a builtin, or a function or an iterator of its own."""
        if tag == "o":
            return self.objects[rest[0]]
        if tag == "n":
            return getattr(builtins, rest[0])
        if tag == "F":
            stub: Any = lambda *a, **k: self.ask({"callback": rest[0]}, list(a), k)  # noqa: E731
        elif tag == "I":
            stub = self.items(rest[0])
        else:
            raise ValueError(f"a value of an unknown kind {tag!r}")
        self.foreigners[id(stub)] = (stub, [tag, *rest])
        return stub

    def items(self, number: int) -> Iterator[Any]:
        """Yields the items of an iterator of the judge's."""
        while True:
            done, value = self.ask({"next": number}, [], {})
            if done:
                return
            yield value

    def ask(self, what: dict[str, Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function of the judge's, such as a key for sorting."""
        encoder = self.encoder()
        self.line.send({**what, "args": encoder.encode(args), "kwargs": encoder.encode(kwargs)})
        answer = self.serve()
        if "raised" in answer:
            raise getattr(builtins, answer["raised"], RuntimeError)(answer["says"])
        return Decoder(self.foreign).decode(answer["value"])

    def serve(self) -> dict[str, Any]:
        """Answers calls until the judge answers one of this side's; raises EOFError where the calls end."""
        while True:
            message = self.line.receive()
            if "do" not in message:
                return message
            self.line.send(self.answered(message))

    def answered(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a call: its value, and the content of mutable arguments where it has changed."""
        decoder = Decoder(self.foreign)
        try:
            args, kwargs = decoder.decode(message["args"]), decoder.decode(message["kwargs"])
            known = [decoder.kept[number] for number in sorted(decoder.kept)]
            value = self.done(message["do"], message["name"], args, kwargs)
            encoder, now = self.encoder(known), self.encoder()
            encoded = ["o", self.number(value), None] if message["keep"] else encoder.encode(value)
            same = now.encode(args) == message["args"] and now.encode(kwargs) == message["kwargs"]
            return {"value": encoded, "changed": [] if same else [encoder.content(one) for one in known]}
        except BaseException as error:
            return self.raised(error)

    def raised(self, error: BaseException) -> dict[str, Any]:
        """Returns the message that describes an exception."""
        says = str(error)[:2000]
        plain = all(arg is None or type(arg) in (bool, int, float, str, bytes) for arg in error.args)
        encoder = self.encoder()
        args = encoder.encode(error.args if plain else (says,))
        return {"raised": encoder.encode(type(error)), "with": args, "says": says}

    def done(self, verb: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carries out one request of the judge."""
        if verb == "get":
            return self.scope[name]
        if verb == "builtin":
            return getattr(builtins, name)(*args)
        if verb == "operator":
            import operator

            return getattr(operator, name)(*args)
        return args[0](*args[1:], **kwargs)


def main() -> None:
    """Runs the program: as the main module where nobody calls it, else as a module that answers until the calls end."""
    with os.fdopen(SOURCE, "rb") as source:
        called = source.readline() == b"called\n"
        program = source.read().decode("utf-8", "surrogatepass")
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path += site.getsitepackages()
    module = type(sys)("program" if called else "__main__")
    sys.modules["program" if called else "__main__"] = module
    if not called:
        exec(compile(program, "program.py", "exec"), module.__dict__)  # nosec B102
        return
    server = Server(module.__dict__)
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)  # nosec B102
        first: dict[str, Any] = {"names": [name for name in module.__dict__ if isinstance(name, str)]}
    except BaseException as error:
        first = server.raised(error)
    server.line.send(first)
    try:
        server.serve()
    except EOFError:  # nobody calls any more
        return
