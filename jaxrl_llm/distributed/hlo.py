"""Reads a compiled program's optimized HLO: its collectives, which of them block, and the cycles that TPU's compiler expects.

Nothing here runs a program. A loop's body counts as often as its trip count says, so the figures are of the whole program on
one device. Cycles are the compiler's static estimates of its fusions (and of Pallas kernels, where libtpu was started with
--xla_jf_dump_static_llo_profile_to), without the time that a collective takes: they compare programs and do not predict seconds.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_BROKEN = re.compile(r"\n(?=[\"}][^\n])")  # the metadata of a Pallas call continues on the next lines
_NAME = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|[suf]\d+\w*|bf16|c64|c128)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{|(?:true|false)_computation=)((?:%[\w.\-]+(?:, )?)+)")
_CYCLES = (
    re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"'),
    re.compile(r'"estimated_cycles":"(\d+)"'),
)
_ENDLESS = 2**63 - 1  # the value of an estimate that the compiler could not make
_WHOLE = re.compile(r"[su]32\[\]")
_SUMS = ("all-reduce", "reduce-scatter")
# Opcodes that run a computation beside others; TPUs that have SparseCores exchange there by the second.
_STARTS = ("async-start", "call-start")
# Marks of an exchange that TPU's compiler carries out step by step, and of the step that waits for it.
_STEP, _LAST_STEP = "chain_id=", '"AsyncCollectiveDone"'
# Opcodes whose result is an operand, on another device or in another place, or the sum of it and another.
_MOVED = (
    "copy", "copy-start", "copy-done", "bitcast", "get-tuple-element", "collective-permute", "collective-permute-start",
    "collective-permute-done", "add",
)  # fmt: skip
# What a fusion of a product and such a sum has beside them.
_PRODUCTS = ("parameter", "constant", "convolution", "dot", "convert", "reshape", "transpose", "broadcast")
# Slices exchange over the network of their hosts, by transfers that TPU's runtime makes.
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,:]*)\}')
_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}


@dataclass(frozen=True)
class Instruction:
    """An instruction, one line of a computation.

    Attributes:
      name: the instruction's name without the percent sign.
      shape: its result's shape as HLO writes it.
      opcode: its opcode, such as fusion or all-gather-start.
      rest: everything behind the opcode.
      root: whether it is what its computation returns.
    """

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool = False

    @property
    def called(self) -> list[str]:
        """The computations that the instruction calls, without those of loops and branches."""
        return [name.strip(" %") for found in _CALLED.findall(self.rest) for name in found.split(",")]

    @property
    def branches(self) -> list[str]:
        return [name.strip(" %") for found in _BRANCHES.findall(self.rest) for name in found.split(",")]

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest, 1)])

    @property
    def cycles(self) -> int:
        """The compiler's estimate of one execution, in cycles; 0 where it gives none."""
        return 0 if self._stated == _ENDLESS else self._stated

    @property
    def unestimated(self) -> bool:
        """Whether the compiler tried to estimate its cycles and could not."""
        return self._stated == _ENDLESS

    @property
    def _stated(self) -> int:
        return next((int(found[1]) for pattern in _CYCLES if (found := pattern.search(self.rest))), 0)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective, an exchange between devices.

    Attributes:
      kind: one of KINDS.
      shape: the result as HLO writes it.
      bytes: bytes of the result or of the operands, whichever is larger, on one device.
      devices: number of devices that exchange with one another.
      asynchronous: whether computation may run meanwhile.
      times: number of executions in the whole program.
      looped: whether it is inside a loop.
      name: name of the instruction.
      operands: shapes of the operands, which sums are taken of; where the result is narrower, TPUs round a sum as they write it.
      network: whether it is between slices, over their hosts' network; `devices` are slices then.
    """

    kind: str
    shape: str
    bytes: int
    devices: int
    asynchronous: bool
    times: int
    looped: bool
    name: str
    operands: str = ""
    network: bool = False

    @property
    def sent(self) -> float:
        """The bytes that a device must send in the whole program, by an exchange around a ring."""
        share = (self.devices - 1) / self.devices
        return self.times * self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def bytes_of(shape: str) -> list[int]:
    """Returns the bytes of each array of a shape as HLO writes it."""
    found = []
    for dtype, sizes in _ARRAY.findall(shape):
        width = _BYTES.get(dtype) or max(int(re.findall(r"\d+", dtype)[0]) // 8, 1)
        found.append(width * math.prod(int(n) for n in sizes.split(",") if n))
    return found


class Program:
    """The computations of one optimized program.

    Attributes:
      computations: {name: instructions}.
      entry: the name of the computation that runs first.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", None
        for line in _BROKEN.sub(" ", text).splitlines():
            if found := _HEAD.match(line):
                current = self.computations.setdefault(found[2], {})
                self.entry = found[2] if found[1] else self.entry
            elif current is not None and (instruction := _instruction(line)) is not None:
                current[instruction.name] = instruction
        if not self.entry:
            raise ValueError("the text holds no ENTRY computation: give the text of a compiled program")

    @cached_property
    def executed(self) -> list[tuple[str, Instruction, int, bool]]:
        """(computation, instruction, executions, whether in a loop) of each instruction that runs, without the insides of fusions."""
        return list(self._walk(self.entry, 1, False))

    def _walk(self, name: str, times: int, looped: bool) -> Iterator[tuple[str, Instruction, int, bool]]:
        for instruction in self.computations[name].values():
            yield name, instruction, times, looped
            if instruction.opcode == "while":
                yield from self._walk(_named("body", instruction), times * self.trips(instruction, name), True)
            elif instruction.opcode in ("call", "conditional", *_STARTS):
                for called in (*instruction.called, *instruction.branches):
                    yield from self._walk(called, times, looped)

    def trips(self, loop: Instruction, place: str) -> int:
        """Returns how often the body of a loop of the computation `place` runs: XLA's known trip count, or the largest constant of the
        condition less the value that the count begins at, since a loop's first turn may be peeled off; 1 where there is neither."""
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found[1])
        condition = self.computations[_named("condition", loop)].values()
        most = max((value for one in condition if (value := _number(one)) is not None), default=1)
        counts = (one for one in condition if one.opcode == "get-tuple-element" and _WHOLE.match(one.shape))
        indices = [int(i[1]) for one in counts if (i := re.search(r"\bindex=(\d+)", one.rest))]
        return max(most - self._given(loop, place, indices[0]), 1) if indices else most

    def _given(self, loop: Instruction, place: str, index: int) -> int:
        """Returns the number at an index of a loop's initial state, 0 where it is no constant."""
        around = self.computations[place]
        state = around.get(loop.operands[0])
        one = around.get(state.operands[index]) if state is not None and state.opcode == "tuple" else None
        while one is not None and one.opcode in ("copy", "bitcast"):
            one = around.get(one.operands[0])
        return (_number(one) or 0) if one is not None else 0

    @cached_property
    def cycles(self) -> int:
        """Estimated cycles of the whole program on one device, without the time of collectives; 0 where none are given."""
        return sum(times * instruction.cycles for _, instruction, times, _ in self.executed)

    @cached_property
    def unestimated(self) -> int:
        """Executions of instructions whose cycles the compiler could not estimate, and which `cycles` leaves out."""
        return sum(times for _, instruction, times, _ in self.executed if instruction.unestimated)

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the program, in program order.

        TPU's compiler spreads an asynchronous one over several fusions with computation, of which the last waits for it, and
        writes a reduce-scatter as a fusion of an all-reduce that a slice follows.
        """
        found = []
        started = {c for _, i, _, _ in self.executed if i.opcode in _STARTS for c in i.called}
        for place, one, times, looped in self.executed:
            if one.opcode == "send" and (transfer := _TRANSFER.search(one.rest)):
                found.append(self._between_slices(one, transfer[1], place, (times, looped)))
            elif one.opcode != "fusion":
                kind = one.opcode.removesuffix("-start")
                if kind in KINDS:
                    asynchronous = one.opcode.endswith("-start") or place in started
                    found.append(self._collective(one, kind, place, asynchronous, (times, looped)))
                continue
            for name in one.called:
                inside = self.computations[name]
                waits = any(_LAST_STEP in i.rest for i in inside.values())
                for i in inside.values():
                    if i.opcode in KINDS and (waits or _STEP not in i.rest):
                        kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else i.opcode
                        found.append(self._collective(i, kind, name, waits, (times, looped)))
        return found

    def _collective(
        self, one: Instruction, kind: str, place: str, asynchronous: bool, runs: tuple[int, bool]
    ) -> Collective:
        around = self.computations[place]
        shapes = [around[name].shape for name in one.operands if name in around]
        operands = sum(map(sum, map(bytes_of, shapes)))
        results = bytes_of(one.shape)
        # The result of a start holds its operands too.
        result = max(results, default=0) if one.opcode.endswith("-start") else sum(results)
        return Collective(
            kind=kind, shape=one.shape, bytes=max(operands, result), devices=_group(one.rest),
            asynchronous=asynchronous and '"is_sync":true' not in one.rest, times=runs[0], looped=runs[1], name=one.name,
            operands=" ".join(shapes),
        )  # fmt: skip

    def _between_slices(self, one: Instruction, transfer: str, place: str, runs: tuple[int, bool]) -> Collective:
        """Returns an exchange between slices; it is asynchronous where the compiler placed computation before the wait for its answer."""
        around = list(self.computations[place].values())
        meeting = _MEETING.search(one.rest)
        answers = {i.name for i in around if i.opcode == "recv" and meeting and meeting[0] in i.rest}
        end = next(
            (n for n, i in enumerate(around) if i.opcode == "recv-done" and answers & set(i.operands)), len(around)
        )
        slices = _SLICES.search(one.rest)
        return Collective(
            kind=transfer.lower().replace("_", "-"), shape=one.shape, bytes=max(bytes_of(one.shape), default=0),
            devices=sum(map(_members, slices[1].split(","))) if slices else 2,
            asynchronous=any(i.cycles for i in around[around.index(one) : end]),
            times=runs[0], looped=runs[1], name=one.name, network=True,
        )  # fmt: skip

    @cached_property
    def waited(self) -> int:
        """The bytes of the largest collective inside a loop that blocks."""
        return max((one.bytes for one in self.collectives if one.looped and not one.asynchronous), default=0)

    @cached_property
    def narrow_sums(self) -> list[str]:
        """The names of instructions that add over devices in 16 bits, where one device alone would add in the matrix unit's 32.

        They are sums between devices, and products in a loop that passes shares of the weights, or of the sum, from device to device and
        from one turn to the next: such products are parts of one sum.
        """
        narrow = re.compile(r"\b(bf16|f16)\[")
        found = [one.name for one in self.collectives if one.kind in _SUMS and narrow.search(one.operands or one.shape)]
        for loop in (i for _, i, _, _ in self.executed if i.opcode == "while"):
            body = list(self.computations[_named("body", loop)].values())
            if self._circulates({i.name: i for i in body}):
                inside = [
                    i
                    for one in body
                    if one.opcode == "fusion"
                    for c in one.called
                    for i in self.computations[c].values()
                ]
                parts = [i for i in (*body, *inside) if i.opcode in ("convolution", "dot")]
                found += [i.name for i in parts if narrow.match(i.shape)]
        return found

    def _circulates(self, body: Mapping[str, Instruction]) -> bool:
        """Returns whether a loop's turn leaves to the next one what the last one left to it, sent to another device, with or without
        something added."""
        roots = [one for one in body.values() if one.root and one.opcode == "tuple"]
        left: list[tuple[str, bool]] = [(name, False) for one in roots for name in one.operands]
        seen: set[tuple[str, bool]] = set()
        while left:
            name, sent = left.pop()
            one = body.get(name)
            if one is None or (name, sent) in seen:
                continue
            seen.add((name, sent))
            source = body.get(one.operands[0]) if one.opcode == "get-tuple-element" else None
            if source is not None and source.opcode == "parameter":
                if sent:
                    return True
            elif self._passes(one):
                sent |= one.opcode.startswith("collective-permute")
                left += [(operand, sent) for operand in one.operands]
        return False

    def _passes(self, one: Instruction) -> bool:
        """Returns whether an instruction's result is an operand of it, elsewhere, or the sum of it and something else."""
        if one.opcode != "fusion":
            return one.opcode in _MOVED
        inside = {i.opcode for name in one.called for i in self.computations[name].values()}
        return "add" in inside and inside <= {*_MOVED, *_PRODUCTS}

    def arrays(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yields (instruction, dtype, sizes) of every array that is in memory while the program runs, without the insides of fusions."""
        for _, instruction, _, _ in self.executed:
            for dtype, sizes in _ARRAY.findall(instruction.shape):
                yield instruction.name, dtype, tuple(int(n) for n in sizes.split(",") if n)


def _instruction(line: str) -> Instruction | None:
    named = _NAME.match(line)
    if named is None:
        return None
    rest = line[named.end() :]
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
        shape, rest = rest[:end], rest[end:]
    else:
        shape, _, rest = rest.partition(" ")
        rest = " " + rest
    opcode = _OPCODE.match(rest)
    return None if opcode is None else Instruction(named[2], shape, opcode[1], rest[opcode.end() :], bool(named[1]))


def _closing(text: str, depth: int) -> int:
    """Returns the index of the parenthesis that closes `depth` open ones and those that the text opens; the text's length without one."""
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return index
    return len(text)


def _number(one: Instruction) -> int | None:
    """Returns the value of an instruction that is a constant whole number, None for any other."""
    found = re.match(r"(-?\d+)\)", one.rest) if one.opcode == "constant" and _WHOLE.match(one.shape) else None
    return int(found[1]) if found else None


def _named(attribute: str, loop: Instruction) -> str:
    found = re.search(rf"\b{attribute}=%([\w.\-]+)", loop.rest)
    assert found is not None, f"a loop without {attribute}: {loop.rest[:200]}"
    return found[1]


def _group(rest: str) -> int:
    """Returns how many devices exchange with one another, from an instruction's replica groups; 2 where pairs are named instead."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    return 2


def _members(part: str) -> int:
    """Returns how many numbers a part of a list stands for, such as 4 or 0:3."""
    first, _, last = part.partition(":")
    return int(last) - int(first) + 1 if last else 1


def summed(collectives: Sequence[Collective]) -> Mapping[tuple[str, bool], tuple[int, float, int]]:
    """Returns {(kind, whether asynchronous): (executions, bytes sent by a device, bytes of the largest)}; the kind names those between slices."""
    found: dict[tuple[str, bool], tuple[int, float, int]] = {}
    for one in collectives:
        key = one.kind + " between slices" * one.network, one.asynchronous
        times, sent, most = found.get(key, (0, 0.0, 0))
        found[key] = times + one.times, sent + one.sent, max(most, one.bytes)
    return found
