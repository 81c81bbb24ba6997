"""Stand-ins for a program's objects in its judge's process, and the pipe by which they are asked."""

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.rewards.services.untrusted.values import Decoder, Encoder, Line

DEEPEST = 200  # largest number of nested calls from one side to the other


class Unjudged(TypeError):
    """Raised where the test asks for what only the tested program could say."""


class Ended(BaseException):
    """Raised where the program has ended, or its answers cannot be read."""


class Peer:
    """The process of the program, as the judge sees it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.handles: dict[int, Handle] = {}
        self.classes: dict[int, Any] = {}
        self.lent: list[Any] = []  # functions and iterators of the test that the program was given
        self.depth = 0
        self.failure: Exception | None = None

    def receive(self) -> dict[str, Any]:
        """Returns the next message; raises Ended for anything else."""
        try:
            return self.line.receive()
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise Ended(f"{type(error).__name__}: {error}") from None

    def ask(self, verb: str, name: str, *args: Any, keep: bool = False, **kwargs: Any) -> Any:
        """Asks the program and returns its answer.

        Args:
          keep: whether the answer stays an object of the program's, whatever it is.
        """
        given = list(args)
        encoder = Encoder(self._lend)
        message = {"do": verb, "name": name, "keep": keep}
        try:
            message |= {"args": encoder.encode(given), "kwargs": encoder.encode(kwargs)}
            self.line.send(message)
        except OSError as error:
            raise Ended("the program has ended") from error
        answer = self._answer()
        if self.failure is not None:
            raise self.failure
        try:
            if "raised" in answer:
                raise self.error(answer)
            decoder = Decoder(self._borrowed, encoder.kept)
            value = decoder.decode(answer["value"])
            for known, content in zip(encoder.kept, answer["changed"]):
                if known is not given and known is not kwargs:
                    decoder.fill(known, content)
            return value
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if "raised" in answer:
                raise
            raise Ended(f"an answer that cannot be read ({type(error).__name__})") from None

    def _answer(self) -> dict[str, Any]:
        while True:
            message = self.receive()
            if "callback" not in message and "next" not in message:
                return message
            self.depth += 1
            if self.depth > DEEPEST:
                raise Ended("calls that never come back")
            self.line.send(self._called(message))
            self.depth -= 1

    def _called(self, message: dict[str, Any]) -> dict[str, Any]:
        """Calls a function of the test for the program."""
        try:
            decoder = Decoder(self._borrowed)
            args, kwargs = decoder.decode(message["args"]), decoder.decode(message["kwargs"])
            if "next" in message:
                found: Any = next(((False, item) for item in self.lent[message["next"]]), (True, None))
            else:
                found = self.lent[message["callback"]](*args, **kwargs)
            return {"value": Encoder(self._lend).encode(found)}
        except Exception as error:
            if isinstance(error, AssertionError | Unjudged):
                self.failure = error  # whatever the program makes of it
            name = type(error).__name__
            return {"raised": name if hasattr(builtins, name) else "RuntimeError", "says": str(error)[:2000]}

    def _lend(self, value: Any) -> list[Any]:
        if isinstance(value, Handle):
            return ["o", _number(value)]
        for number, known in self.classes.items():
            if known is value:
                return ["o", number]
        name = getattr(value, "__name__", "")
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["n", name]
        iterator = hasattr(value, "__next__")
        if not callable(value) and not iterator:
            raise Unjudged(f"a {type(value).__name__} of the test cannot be given to the program")
        self.lent.append(value)
        return ["I" if iterator else "F", len(self.lent) - 1]

    def _borrowed(self, tag: str, rest: list[Any]) -> Any:
        if tag == "o":
            number, base = rest
            if number not in self.handles:
                self.handles[number] = Handle(self, number, Decoder(self._borrowed).decode(base))
            return self.handles[number]
        if tag == "n":
            found = getattr(builtins, rest[0])
            if not isinstance(found, type):
                raise ValueError(f"{rest[0]} is no class")
            return found
        if tag in ("F", "I"):
            return self.lent[rest[0]]
        if tag == "E":
            number, name, bases = rest
            if number not in self.classes:
                kinds = tuple(self._borrowed(base[0], base[1:]) for base in bases) or (Exception,)
                self.classes[number] = type(str(name), kinds, {})
            return self.classes[number]
        raise ValueError(f"a value of an unknown kind {tag!r}")

    def error(self, answer: dict[str, Any]) -> BaseException:
        """Returns the exception that an answer describes."""
        kind = Decoder(self._borrowed).decode(answer["raised"])
        says = str(answer.get("says", ""))
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return Ended(f"{getattr(kind, '__name__', kind)}: {says}")
        try:
            return kind(*Decoder(self._borrowed).decode(answer["with"]))
        except TypeError:
            return RuntimeError(f"{kind.__name__}: {says}")


class Handle:
    """A stand-in for an object of the program.

    Attributes:
      _base: the plain value that it holds where its class derives from a plain one.
      _mixed: whether it comes from an operation between the program's object and a plain value of the test's.
    """

    __slots__ = ("_base", "_mixed", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, base: Any = None, mixed: bool = False) -> None:
        for name, value in zip(("_peer", "_number", "_base", "_mixed"), (peer, number, base, mixed)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array") or name in ("__iter__", "__len__"):
            raise AttributeError(name)
        return _asked(self, "builtin", "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _asked(self, "builtin", "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _asked(self, "builtin", "delattr", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _whole(self)
        return self._peer.ask("call", "", self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return _asked(self, "operator", "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _asked(self, "operator", "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _asked(self, "operator", "delitem", key)

    def __contains__(self, item: Any) -> bool:
        """Looks at the items here: the program is not told what is sought."""
        return any(item is each or item == each for each in self)

    def __iter__(self) -> Iterator[Any]:
        if self._base is not None:
            return iter(self._base)
        return _Items(_asked(self, "builtin", "iter"))

    def __next__(self) -> Any:
        return _asked(self, "builtin", "next")

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, *_: object) -> bool:
        """Returns whether the program's context manager suppresses the exception; it cannot suppress a failure of the test."""
        failed = kind is not None and (not issubclass(kind, Exception) or issubclass(kind, AssertionError | Unjudged))
        told = kind if kind is not None and getattr(builtins, kind.__name__, None) is kind and not failed else None
        dealt = self.__getattr__("__exit__")(told, None, None)
        return bool(dealt) and told is not None

    def __hash__(self) -> int:
        return hash(self._base) if self._base is not None else int(_asked(self, "builtin", "hash"))

    def __str__(self) -> str:
        return _of(str, _asked(self, "builtin", "str"))

    def __repr__(self) -> str:
        return _of(str, _asked(self, "builtin", "repr"))

    def __format__(self, how: str) -> str:
        return _of(str, _asked(self, "builtin", "format", how))

    def __bool__(self) -> bool:
        return _of(bool, _converted(self, "bool"))

    def __int__(self) -> int:
        return _of(int, _converted(self, "int"))

    def __index__(self) -> int:
        return _of(int, self._base if isinstance(self._base, int) else _asked(self, "operator", "index"))

    def __float__(self) -> float:
        return _of(float, _converted(self, "float"))

    def __len__(self) -> int:
        return _of(int, _converted(self, "len"))

    def __round__(self, *digits: int) -> Any:
        return round(self._base, *digits) if self._base is not None else _mixed(self, "builtin", "round", self, *digits)


class _Items:
    """The items of an object of the program's."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.items)


def _number(handle: Handle) -> int:
    return int(object.__getattribute__(handle, "_number"))


def _whole(handle: Handle) -> None:
    if handle._mixed:
        raise Unjudged(
            "the test operates on an object of the program and a plain value, which the program alone could judge"
        )


def _asked(handle: Handle, verb: str, name: str, *args: Any) -> Any:
    _whole(handle)
    return handle._peer.ask(verb, name, handle, *args)


def _converted(handle: Handle, name: str) -> Any:
    if handle._base is not None:
        return getattr(builtins, name)(handle._base)
    return _asked(handle, "builtin", name)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Unjudged(f"the program gave a {type(value).__name__}, where a {kind.__name__} is needed")
    return value


def _mixed(handle: Handle, verb: str, name: str, *args: Any) -> Handle:
    """Asks for an operation whose result stays with the program, and never becomes a plain value."""
    found = handle._peer.ask(verb, name, *args, keep=True)
    if not isinstance(found, Handle):
        raise Ended("an answer that is no object of the program")
    return Handle(handle._peer, _number(found), None, True)


def _operation(name: str, reflected: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def operate(self: Handle, *others: Any) -> Any:
        sides = (self, *others)
        plain = [side._base if isinstance(side, Handle) else side for side in sides]
        if self._base is not None and not any(isinstance(s, Handle) and s._base is None for s in sides):
            return function(*(plain[::-1] if reflected else plain))
        ordered = sides[::-1] if reflected else sides
        if all(isinstance(side, Handle) and not side._mixed for side in sides):
            return self._peer.ask("operator", name, *ordered)
        return _mixed(self, "operator", name, *ordered)

    return operate


def _comparison(name: str) -> Callable[[Handle, Any], bool]:
    function = getattr(operator, name)

    def compare(self: Handle, other: Any) -> bool:
        if other is None and name in ("eq", "ne"):
            return name == "ne"
        _whole(self)
        theirs = other._base if isinstance(other, Handle) else other
        if self._base is not None and not (isinstance(other, Handle) and other._base is None):
            return bool(function(self._base, theirs))
        if not isinstance(other, Handle):
            kind = type(other).__name__
            raise Unjudged(
                f"the test compares an object of the program with a {kind}, which the program alone could judge"
            )
        _whole(other)
        return bool(_of(bool, self._peer.ask("operator", name, self, other)))

    return compare


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lshift",
    "rshift",
]:
    setattr(Handle, f"__{_name.rstrip('_')}__", _operation(_name, False))
    setattr(Handle, f"__r{_name.rstrip('_')}__", _operation(_name, True))
for _name in ["neg", "pos", "abs", "invert"]:
    setattr(Handle, f"__{_name}__", _operation(_name, False))
for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    setattr(Handle, f"__{_name}__", _comparison(_name))


def is_instance(value: Any, kinds: Any) -> bool:
    """Returns `isinstance` for the objects of both sides."""
    if isinstance(kinds, tuple):
        return any(is_instance(value, kind) for kind in kinds)
    if isinstance(kinds, Handle):
        return isinstance(value, Handle) and bool(_of(bool, kinds._peer.ask("builtin", "isinstance", value, kinds)))
    return isinstance(value._base if isinstance(value, Handle) and value._base is not None else value, kinds)


def is_subclass(kind: Any, kinds: Any) -> bool:
    """Returns `issubclass` for the classes of both sides."""
    if isinstance(kind, Handle):
        return bool(_of(bool, kind._peer.ask("builtin", "issubclass", kind, kinds)))
    return issubclass(kind, kinds)
