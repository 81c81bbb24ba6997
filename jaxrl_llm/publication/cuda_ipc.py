"""Copies weights from one process's GPU memory into another's on the same host, by CUDA's inter-process handles (ctypes; no JAX, no PyTorch).

The learner shares its arrays: it copies them into an allocation on each of its GPUs that other processes can open (those of JAX from
0.11 on cannot be), and describes each shard's place there and in the tensor. The sampler opens the allocations and copies shards into
its own tensors, from the same GPU or another one. An allocation keeps its contents until it is shared anew.
"""

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.publication.manifest import Manifest, element_type
from jaxrl_llm.publication.parts import Target
from jaxrl_llm.publication.reader import BadVersion, check_forward

_HANDLE_BYTES = 64
_ALIGNED = 256  # bytes to which the beginnings of tensors are aligned
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address determines the GPU


@runtime_checkable
class Memory(Protocol):
    """The operations of a GPU driver that are needed here."""

    def shared(self, device: int, number: int, size: int) -> tuple[str, int]:
        """Returns the handle, in hexadecimal, and the address of allocation `number` on a device, of at least `size` bytes."""
        ...

    def opened(self, handle: str) -> Any:
        """Returns a context manager that maps another process's allocation and yields its address."""
        ...

    def copy(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Copies rows of `width` bytes that lie a pitch apart, and returns when the copy is complete."""
        ...


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A box of a tensor in another process's memory.

    Attributes:
      allocation: index into the handles.
      offset: bytes from the start of the allocation.
      start: index of the box's first element, one number an axis.
      shape: shape of the box.
    """

    allocation: int
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RemoteTensor:
    """A tensor whose shards lie in another process's memory.

    Attributes:
      shape: shape of the whole tensor.
      dtype: NumPy's name of the element type.
      checksum: checksum of the whole tensor, as in the manifest.
      shards: disjoint boxes that cover it.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True)
class RemoteWeights:
    """All tensors of a version in a learner's memory.

    Attributes:
      handles: handles of the allocations, in hexadecimal.
      tensors: the tensors by Hugging Face name.
      forward: settings of the policy's forward pass, as in the manifest.
    """

    handles: tuple[str, ...]
    tensors: Mapping[str, RemoteTensor]
    forward: Mapping[str, Any]


def share(arrays: Mapping[str, Any], manifest: Manifest, memory: Memory, number: int) -> str:
    """Copies JAX arrays (vectors and matrices, already computed) into memory that other processes of this host can open.

    Args:
      arrays: the arrays by Hugging Face name.
      manifest: the version's manifest.
      memory: the driver, which copies and owns the allocations.
      number: number of the allocation, whose contents are overwritten.

    Returns:
      The text that describes the arrays' places.

    Raises:
      ValueError: an array is not wholly on this process's devices.
      OSError: there is no memory for the copy outside of JAX's pool.
    """
    tensors: dict[str, Any] = {}
    copies: dict[int, list[tuple[int, int, int]]] = {}  # by device: address, place and bytes of each part
    used: dict[int, int] = {}
    for name, array in arrays.items():
        if not array.is_fully_addressable:
            raise ValueError(
                f"{name!r} lies on devices of other hosts too: the fast path needs one process for all of them"
            )
        boxes: dict[tuple[int, ...], Any] = {}
        for shard in array.addressable_shards:
            start = tuple(axis.indices(n)[0] for axis, n in zip(shard.index, array.shape, strict=True))
            if start in boxes:  # a copy of a box on another device
                continue
            device, size = shard.device.local_hardware_id or 0, shard.data.nbytes
            place = used.get(device, 0)
            used[device] = place + -(-size // _ALIGNED) * _ALIGNED
            copies.setdefault(device, []).append((shard.data.unsafe_buffer_pointer(), place, size))
            boxes[start] = [list(used).index(device), place, start, shard.data.shape]
        entry = {"shape": array.shape, "dtype": str(array.dtype), "checksum": manifest.tensors[name].checksum}
        tensors[name] = entry | {"shards": list(boxes.values())}
    handles = []
    for device, parts in copies.items():
        handle, address = memory.shared(device, number, used[device])
        handles.append(handle)
        for source, place, size in parts:
            memory.copy(address + place, size, source, size, size, 1)
    return json.dumps({"handles": handles, "tensors": tensors, "forward": dict(manifest.forward)})


def parse(text: str) -> RemoteWeights:
    """Parses the text of `share`; raises BadVersion where it is not such a text."""
    try:
        content = json.loads(text)
        return RemoteWeights(
            handles=tuple(str(handle) for handle in content["handles"]),
            tensors={name: _tensor(entry) for name, entry in content["tensors"].items()},
            forward=dict(content["forward"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        raise BadVersion(f"the description of the learner's memory cannot be read: {wrong!r}") from wrong


def _tensor(entry: Mapping[str, Any]) -> RemoteTensor:
    element_type(entry["dtype"])
    shards = tuple(
        Shard(allocation=int(a), offset=int(offset), start=tuple(map(int, start)), shape=tuple(map(int, shape)))
        for a, offset, start, shape in entry["shards"]
    )
    return RemoteTensor(
        shape=tuple(map(int, entry["shape"])), dtype=str(entry["dtype"]), checksum=str(entry["checksum"]), shards=shards
    )


def check(weights: RemoteWeights, targets: Mapping[str, Target], forward: Mapping[str, Any]) -> None:
    """Raises BadVersion where the model computes differently, the tensors do not fit it, or shards do not cover them exactly.

    Args:
      weights: the weights that the learner describes.
      targets: this rank's parts by name.
      forward: settings of the forward pass of the server's model.
    """
    check_forward("the learner's memory", weights.forward, forward)
    missing, extra = sorted(targets.keys() - weights.tensors.keys()), sorted(weights.tensors.keys() - targets.keys())
    if missing or extra:
        raise BadVersion(f"the learner's memory lacks {missing[:3]} and holds {extra[:3]} too many, against the model")
    for name, tensor in weights.tensors.items():
        if tensor.shape != targets[name].shape:
            raise BadVersion(f"tensor {name!r} has shape {tensor.shape}, the server's model has {targets[name].shape}")
        for shard in tensor.shards:
            inside = len(shard.start) == len(shard.shape) == len(tensor.shape) and all(
                first >= 0 and n > 0 and first + n <= most
                for first, n, most in zip(shard.start, shard.shape, tensor.shape)
            )
            if not inside or not 0 <= shard.allocation < len(weights.handles) or shard.offset < 0:
                raise BadVersion(f"tensor {name!r} has a shard {shard} outside of it")
        apart = not any(_overlap(a, b) for a, b in combinations(tensor.shards, 2))
        if not apart or sum(math.prod(shard.shape) for shard in tensor.shards) != math.prod(tensor.shape):
            raise BadVersion(f"the shards of tensor {name!r} do not cover it once")


def _overlap(a: Shard, b: Shard) -> bool:
    return all(x < y + n and y < x + m for x, m, y, n in zip(a.start, a.shape, b.start, b.shape))


def copy_into(to: int, tensor: RemoteTensor, bases: Mapping[int, int], memory: Memory) -> None:
    """Copies a tensor's shards to a contiguous tensor at an address.

    Args:
      to: address of the tensor's first element.
      tensor: the tensor to copy.
      bases: addresses of the opened allocations.
      memory: the driver that copies.
    """
    size = element_type(tensor.dtype).itemsize
    columns = tensor.shape[-1]
    for shard in tensor.shards:
        width = shard.shape[-1] * size
        row, column = (0, shard.start[0]) if len(shard.shape) == 1 else shard.start
        rows = 1 if len(shard.shape) == 1 else shard.shape[0]
        first = to + (row * columns + column) * size
        memory.copy(first, columns * size, bases[shard.allocation] + shard.offset, width, width, rows)


@contextmanager
def opened(weights: RemoteWeights, memory: Memory) -> Iterator[dict[int, int]]:
    """Maps all allocations; yields their addresses by index."""
    with ExitStack() as stack:
        yield {i: stack.enter_context(memory.opened(handle)) for i, handle in enumerate(weights.handles)}


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


class _Copy2D(ctypes.Structure):
    """The structure CUDA_MEMCPY2D of the driver's interface."""

    _fields_ = tuple(
        (f"{end}_{field}", kind)
        for end in ("source", "to")
        for field, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_uint),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ) + (("width", ctypes.c_size_t), ("height", ctypes.c_size_t))


class Cuda:
    """The CUDA driver. Its calls need a current context: `use` makes a device's primary one current, which JAX and PyTorch share."""

    def __init__(self) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise OSError(
                f"TRANSFER = 'cuda_ipc' needs the CUDA driver on the host of learner and servers ({error}): use TRANSFER = 'orbax'"
            ) from error
        self._call("cuInit", 0)
        self._allocations: dict[tuple[int, int], tuple[int, int]] = {}  # by device and number: address and bytes

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            raise OSError(f"{function} failed with {(name.value or b'error').decode()} ({code})")

    def use(self, device: int) -> None:
        """Makes the primary context of a device current in this thread; `device` is its number in this process."""
        found, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(found), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
        self._call("cuCtxSetCurrent", context)

    def shared(self, device: int, number: int, size: int) -> tuple[str, int]:
        """Implements `Memory.shared`; raises OSError where the device has no such memory outside of JAX's pool."""
        self.use(device)
        old, room = self._allocations.pop((device, number), (0, 0))
        if room < size:
            if old:
                self._call("cuMemFree_v2", ctypes.c_uint64(old))
            address = ctypes.c_uint64()
            try:
                self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            except OSError as error:
                raise OSError(
                    f"TRANSFER = 'cuda_ipc' needs {size / 2**20:.0f} MiB of GPU memory outside of JAX's pool, twice: lower "
                    f"XLA_PYTHON_CLIENT_MEM_FRACTION, or use TRANSFER = 'orbax' ({error})"
                ) from error
            old, room = address.value, size
        self._allocations[device, number] = old, room
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(old))
        return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES).hex(), old

    @contextmanager
    def opened(self, handle: str) -> Iterator[int]:
        """Implements `Memory.opened`; raises OSError where the allocation is gone or its GPU cannot be reached."""
        address = ctypes.c_uint64()
        content = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), content, _ENABLE_PEERS)
        try:
            yield address.value
        finally:
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, rows: int) -> None:
        """Implements `Memory.copy`."""
        if to_pitch == source_pitch == width:
            self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(width * rows))
            self._call("cuCtxSynchronize")
            return
        plan = _Copy2D(
            source_type=_UNIFIED, source_device=source, source_pitch=source_pitch,
            to_type=_UNIFIED, to_device=to, to_pitch=to_pitch, width=width, height=rows,
        )  # fmt: skip
        self._call("cuMemcpy2DUnaligned_v2", ctypes.byref(plan))
        self._call("cuCtxSynchronize")
