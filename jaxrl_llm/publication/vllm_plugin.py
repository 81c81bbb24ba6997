"""The plugin of a vLLM server, which loads published weights from an orbax checkpoint while the server generates.

    vllm serve MODEL --worker-extension-cls jaxrl_llm.publication.vllm_plugin.OrbaxWorkerExtension

`stage` reads and checks a version in a thread of its own, without touching the model. `commit` loads the staged version, in the model's
own layer order, through vLLM's loaders (`reload_weights`). The plugin needs numpy, ml_dtypes and tensorstore beside vLLM.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.publication import cuda_ipc, held_weights, vllm_experts, vllm_fp8
from jaxrl_llm.publication.forward import forward_of
from jaxrl_llm.publication.held_weights import Held, WrongWeights
from jaxrl_llm.publication.parts import Target, whole_box
from jaxrl_llm.publication.reader import UNKNOWN, BadVersion, StagedVersion, Stager, check_sums
from jaxrl_llm.publication.vllm_targets import held_by, quantized_layers, targets_of

_LOG = logging.getLogger(__name__)
_VERSION = "jaxrl_llm_version"  # an attribute of the model, the same for every route of its weights
_MARK = "jaxrl_llm_mark"  # another: the mark by which the learner recognises its own commit
_HELD = "jaxrl_llm_held"  # another: the coverage of the comparison after the last load


class OrbaxWorkerExtension:
    """Methods that vLLM mixes into its workers; each is called on every rank through POST /collective_rpc.

    Arguments come as strings over HTTP. Errors are in the answer and never raised: where a call raises on several ranks, vLLM reads the
    first rank's answer alone, and takes the others' for answers to the next call.
    """

    def stage(self, path: str, version: str | int) -> dict[str, Any]:
        """Begins to read a published version and returns at once; `stage_status` reports the progress."""
        stager = self._orbax_stager
        try:
            _tensor_parallel_alone(self.vllm_config.parallel_config)  # type: ignore[attr-defined]
            stager.stage(path, int(version), targets_of(self._orbax_model))
        except Exception as failure:
            stager.refuse(UNKNOWN, f"version {version} cannot be staged: {failure}")
        return stager.status()

    def stage_status(self) -> dict[str, Any]:
        """Returns this rank's version, state (idle, staging, staged or failed), error, seconds, bytes, unchanged; and the mark of the last commit."""
        return self._orbax_stager.status() | {"mark": mark_of(self._orbax_model)}

    def commit(self, version: str | int, mark: str = "") -> dict[str, Any]:
        """Loads the staged version into the model; every request must be paused.

        Args:
          version: number of the version.
          mark: mark that is stored beside the weights and returned by `stage_status`, by which the learner recognises its commit.

        Returns:
          version: the version now in the model; -1 for a mixture, where loading failed: it stays staged, to be committed again before a resume.
          error: "" or why the version was not loaded. Where it is not staged on every rank, or the ranks' parts differ from the
            published tensors, the model is unchanged.
          checked: number of tensors whose checksums in the model after the load equal the published ones.
          unchecked: number of tensors that the model stores in another form, which were not compared.
          quantized: number of those of `checked` that the server then quantized to fp8; `rounding` is their relative error.
          was: the mark before; empty where there was none, or a load had failed.
          seconds: seconds that it took.
        """
        return self._orbax_answer(lambda: self._orbax_commit(int(version)), mark)

    def commit_ipc(self, version: str | int, memory: str, mark: str = "") -> dict[str, Any]:
        """Commits as `commit` does, but without staging, straight from the GPU memory of a learner on this host.

        Args:
          version: number of the version.
          memory: its place in memory, as `cuda_ipc.share` returns it. The learner keeps it until this returns.
          mark: mark, as for `commit`.
        """
        return self._orbax_answer(lambda: self._orbax_copy(int(version), memory), mark)

    def _orbax_answer(self, load: Callable[[], None], mark: str) -> dict[str, Any]:
        began, error, was = time.perf_counter(), "", mark_of(self._orbax_model)
        try:
            load()
            setattr(self._orbax_model, _MARK, mark)
        except Exception as failure:
            error = str(failure) or repr(failure)
        held: Held = getattr(self._orbax_model, _HELD, Held(checked=0, unchecked=()))
        return {
            "version": self.published_version(), "error": error, "checked": held.checked, "unchecked": len(held.unchecked),
            "quantized": held.quantized, "rounding": held.rounding, "was": was, "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def _orbax_commit(self, version: int) -> None:
        stager, model, device = self._orbax_stager, self._orbax_model, self.device  # type: ignore[attr-defined]
        targets = targets_of(model)
        staged = agreed(stager, version, targets, version_of(model) == version)
        if staged is None:
            return
        entries = staged.manifest.tensors
        published = {name: (entries[name].dtype, total) for name, total in staged.totals.items()}
        cure = "The version is still staged: commit again"
        self._orbax_load(version, lambda: whole_tensors(staged.parts, targets, device), published, cure)
        del staged
        stager.drop()

    def _orbax_copy(self, version: int, memory: str) -> None:
        targets, device = targets_of(self._orbax_model), self.device  # type: ignore[attr-defined]
        with ExitStack() as stack:
            tensors: Callable[[], Iterator[tuple[str, Any]]] | None = None
            error, published = "", dict[str, tuple[str, int]]()
            try:
                tensors = reached_tensors(memory, targets, self._orbax_forward, device, stack, published)
            except Exception as unreached:
                error = str(unreached) or repr(unreached)
            divided = any(not target.whole for target in targets.values())
            (without,) = sum_over_ranks([int(bool(error))]) if divided else [int(bool(error))]
            if tensors is None or without:
                raise BadVersion(error or f"{without} other ranks of this server do not reach the learner's memory")
            self._orbax_load(version, tensors, published, "Commit again")
        self._orbax_stager.drop()

    def _orbax_load(
        self,
        version: int,
        tensors: Callable[[], Iterator[tuple[str, Any]]],
        published: Mapping[str, tuple[str, int]],
        cure: str,
    ) -> None:
        """Loads the tensors and then compares the model's with them; `published` is complete once all tensors are loaded."""
        model = self._orbax_model
        set_version(model, UNKNOWN)
        try:
            with vllm_fp8.followed(quantized_layers(model), published) as quantized:
                self.reload_weights(weights_iterator=tensors())  # type: ignore[attr-defined]
            repack_tied_head(model)
            vllm_experts.repack(model)
            wait_for(self.device)  # type: ignore[attr-defined]
        except Exception as failure:
            with contextlib.suppress(Exception):  # ends vLLM's incomplete reload, so that the next one starts afresh
                self.reload_weights(weights_iterator=iter(()))  # type: ignore[attr-defined]
            raise RuntimeError(
                f"loading version {version} failed midway ({failure!r}): the model is a mixture of versions. "
                f"{cure}, and do not resume the server before"
            ) from failure
        try:
            held = held_weights.compare(
                held_by(model), targets_of(model), published, quantized.sums, quantized.rounding
            )
        except WrongWeights as wrong:
            raise WrongWeights(f"{wrong}. {cure}, and do not resume the server before") from None
        if held.unchecked and not hasattr(model, _HELD):
            _LOG.warning(
                "%d tensors cannot be compared with their checksums after a load, because vLLM keeps them in another form (%s ...): "
                "only the canary tells of them",
                len(held.unchecked), held.unchecked[0],
            )  # fmt: skip
        setattr(model, _HELD, held)
        set_version(model, version)

    def published_version(self) -> int:
        """Returns the version in the model, -1 before the first commit and after one that failed while loading."""
        return version_of(self._orbax_model)

    @cached_property
    def _orbax_stager(self) -> Stager:
        return stager_for(self.device, self._orbax_forward)  # type: ignore[attr-defined]

    @cached_property
    def _orbax_forward(self) -> dict[str, Any]:
        """The settings of the served model's forward pass, as vLLM read them from config.json and its overrides."""
        return forward_of(self.vllm_config.model_config.hf_config.to_dict())  # type: ignore[attr-defined]

    @property
    def _orbax_model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]


class PinnedBlock:
    """Host memory that is reused from version to version, since allocating its pages takes as long as filling them.

    Its pages are locked, so that a GPU copies from them directly, several times as fast as from other memory.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._block = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> np.ndarray:
        """Returns the block; allocates a new one where the size differs."""
        import torch

        if len(self._block) == nbytes:
            return self._block
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            if len(self._block):
                runtime.cudaHostUnregister(self._block.ctypes.data)
            self._block = np.empty(0, np.uint8)
            block = np.empty(nbytes, np.uint8)
            failed = int(runtime.cudaHostRegister(block.ctypes.data, nbytes, 0))
        if failed:
            _LOG.warning(
                "%d bytes of host memory cannot be locked (CUDA error %d): commits take longer", nbytes, failed
            )
        else:
            self._block = block
        return block


def stager_for(device: Any, forward: Mapping[str, Any]) -> Stager:
    """Returns a stager for a model with the forward settings `forward`, with memory that suits the device."""
    return Stager(PinnedBlock(device), forward) if device.type == "cuda" else Stager(forward=forward)


def _tensor_parallel_alone(parallel: Any) -> None:
    sizes = {name: getattr(parallel, name) for name in ("pipeline_parallel_size", "data_parallel_size")}
    if any(size != 1 for size in sizes.values()):
        raise NotImplementedError(f"{sizes}: weights are published to servers with tensor parallelism alone")


def version_of(model: Any) -> int:
    """Returns the published version that a model holds, -1 for none."""
    return getattr(model, _VERSION, UNKNOWN)


def set_version(model: Any, version: int) -> None:
    """Records the published version that a model holds, and clears the mark, which is another commit's."""
    setattr(model, _VERSION, version)
    setattr(model, _MARK, "")


def mark_of(model: Any) -> str:
    """Returns the mark of the commit that gave a model its weights; empty for none."""
    return getattr(model, _MARK, "")


def agreed(stager: Stager, version: int, targets: Mapping[str, Target], loaded: bool = False) -> StagedVersion | None:
    """Returns the staged version, once every rank has it and the sums of the ranks' parts equal the published checksums.

    No rank raises before all have exchanged their numbers, so none is left waiting.

    Args:
      stager: this rank's stager.
      version: the version to load.
      targets: this rank's parts by name.
      loaded: whether this rank's model already holds the version.

    Returns:
      The version, or None where nothing is staged and every rank's model already holds it, since a commit may be repeated.

    Raises:
      BadVersion: the version is not staged on every rank, or a sum differs from the manifest's checksum.
    """
    divided = [name for name, target in targets.items() if not target.whole]
    staged, missing = None, ""
    try:
        staged = stager.take(version)
    except BadVersion as not_there:
        missing = str(not_there)
    sums = staged.sums if staged is not None else {}
    mine = [int(staged is None), int(not loaded), *(sums.get(name, 0) for name in divided)]
    absent, without, *totals = sum_over_ranks(mine) if divided else mine
    if staged is None:
        if not without:
            return None
        raise BadVersion(missing)
    if absent:
        raise BadVersion(f"version {version} is not staged on {absent} other ranks of this server: stage it again")
    try:
        check_sums(f"version {version}", staged.manifest, dict(zip(divided, totals)))
    except BadVersion as damaged:
        stager.refuse(version, str(damaged))
        raise
    return staged


def sum_over_ranks(numbers: list[int]) -> list[int]:
    """Adds the numbers over the server's tensor-parallel ranks."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    total = torch.tensor(numbers, dtype=torch.int64)
    torch.distributed.all_reduce(total, group=get_tp_group().cpu_group)
    return total.tolist()


def whole_tensors(
    parts: Mapping[str, np.ndarray], targets: Mapping[str, Target], device: Any
) -> Iterator[tuple[str, Any]]:
    """Yields torch tensors of full size, as vLLM's loaders take them; of a tensor in parts, only the rank's part is set.

    Such tensors are made on the device one at a time, since vLLM keeps those of a layer until it has all. Experts are split into matrices.
    """
    import torch

    for name, part in parts.items():
        tensor, target = torch_tensor(part), targets[name]
        if vllm_experts.of_experts(name):
            yield from vllm_experts.from_host(name, tensor, target)
            continue
        if not target.whole:
            whole = torch.empty(target.shape, dtype=tensor.dtype, device=device)
            whole[target.box] = tensor.to(device)
            tensor = whole
        yield name, tensor


def torch_tensor(array: np.ndarray) -> Any:
    """Returns a NumPy array as a torch tensor that shares its memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def gpu_memory(device: Any) -> cuda_ipc.Memory:
    """Returns CUDA's driver with this rank's GPU current; raises BadVersion where the device is not a GPU."""
    if device.type != "cuda":
        raise BadVersion(f"the server runs on {device}: weights reach it through a checkpoint, not through GPU memory")
    driver = cuda_ipc.Cuda()
    driver.use(device.index or 0)
    return driver


def reached_tensors(
    memory: str,
    targets: Mapping[str, Target],
    forward: Mapping[str, Any],
    device: Any,
    stack: ExitStack,
    published: dict[str, tuple[str, int]],
) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Returns a function that yields the learner's tensors as torch's own; its memory stays mapped as long as the stack.

    Args:
      memory: the learner's description of it.
      targets: this rank's parts by name.
      forward: settings of the forward pass of this rank's model.
      device: device of the tensors.
      stack: unmaps the memory.
      published: receives the element type and the sum of each part as tensors are copied; a tensor that is divided over ranks is first
        compared whole with its checksum, then the part is summed.

    Raises:
      BadVersion: the tensors do not fit the model, or it computes differently.
      OSError: the memory cannot be reached.
    """
    driver, weights = gpu_memory(device), cuda_ipc.parse(memory)
    cuda_ipc.check(weights, targets, forward)
    bases = stack.enter_context(cuda_ipc.opened(weights, driver))

    def copied(tensor: cuda_ipc.RemoteTensor) -> Any:
        import torch

        whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
        wait_for(device)  # the memory may have been another tensor's, whose work is still queued
        cuda_ipc.copy_into(whole.data_ptr(), tensor, bases, driver)
        return whole

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, target in targets.items():
            tensor = weights.tensors[name]
            if vllm_experts.of_experts(name):
                yield from vllm_experts.from_learner(name, tensor, target, copied, published)
                continue
            whole = copied(tensor)
            published[name] = (tensor.dtype, _sum_of_part(name, whole, tensor, target))
            yield name, whole

    return tensors


def _sum_of_part(name: str, whole: Any, tensor: cuda_ipc.RemoteTensor, target: Target) -> int:
    """Returns the sum of this rank's part of a copied tensor; raises BadVersion where the whole differs from the published one."""
    said = int(tensor.checksum, 16)
    if target.whole:  # the model's own tensor is compared after the load
        return said
    all_of_it = Target(shape=target.shape, box=whole_box(target.shape))
    if (got := int(held_weights.tensor_sum(whole, all_of_it, tensor.dtype))) != said:
        raise BadVersion(f"tensor {name!r} arrived with checksum {got:08x}, published is {said:08x}")
    return int(held_weights.tensor_sum(whole[target.box], target, tensor.dtype))


def wait_for(device: Any) -> None:
    """Returns when a GPU has finished its queued work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def repack_tied_head(model: Any) -> None:
    """Packs a tied head anew: on a CPU vLLM multiplies by a packed copy of the output head, which a reload leaves unchanged where it is tied."""
    for module in model.modules():
        if type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding") and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
