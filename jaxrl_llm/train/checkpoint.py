"""Writes atomic checkpoints of everything that a bit-exact resume needs, by orbax.

A checkpoint holds the train state, the frozen models that change, and a JSON of the host's state: stage and step, the data stream's
position, controllers, best evaluation; the groups of a run that samples ahead are bytes beside it. A stage's reference, which never
changes, is written once, and its checkpoints name it by its checksums. An interrupted save leaves no
checkpoint, and the last complete one is found. The JSON holds a checksum of every array, of these bytes and of itself, which are compared
when a checkpoint is read.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm import components
from jaxrl_llm.distributed import serialization, tree_sums
from jaxrl_llm.distributed.memory import ran_out
from jaxrl_llm.distributed.tree_sums import NONE_FILLED, Damaged, Sizes

_PACKED = "deferred"  # the item of a checkpoint that holds the deferred parts of the host's state, and the entry about them there
_MOVED = ("best", "controls")  # the entries of the host's state that an evaluation changes
_REFERENCE = "reference"  # names a stage's reference, and the record of it in checkpoints
_TORN = ".orbax-checkpoint-tmp"  # part of the names of folders that are still being written


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The rule that says when to save checkpoints, and which to keep.

    Attributes:
      every: number of steps between saves; the last step of a stage is always saved.
      keep: number of last checkpoints that are kept.
      best: evaluation metric whose highest value's checkpoint is kept too, such as "eval/heldout/greedy"; None keeps none.
    """

    every: int = 50
    keep: int = 2
    best: str | None = None

    def __post_init__(self) -> None:
        components.at_least(self, 1, "every", "keep")


class Checkpoints:
    """The checkpoints of a run folder, RUN/checkpoints/STEP; the best one is also under RUN/best/STEP, as the newest there.

    Where the best one is newer than the last checkpoint, the best one up to the last checkpoint stays beside it: a run that is killed
    resumes from the last checkpoint, and the newer best one then belongs to a discarded future.

    The reference of a stage that begins after STEP is under RUN/reference/STEP.

    Args:
      run_dir: the run folder.
      config: when to save, and what to keep.
      deferred: whether the host's state may hold deferred parts (serialization.Deferred), as that of a run that samples ahead does; all
        processes of the run must agree.
    """

    def __init__(self, run_dir: Path, config: Checkpointing, *, deferred: bool = False) -> None:
        self.config, self._deferred = config, deferred
        self.folder = (run_dir / "checkpoints").absolute()
        self._references = (run_dir / _REFERENCE).absolute()
        self._held: dict[
            int, dict[str, str]
        ] = {}  # {first step: record in checkpoints} of the references that this start wrote or read
        self._evaluated = run_dir / "evaluated.json"
        self._last = _manager(self.folder, config.keep)
        self._best = _manager((run_dir / "best").absolute(), None) if config.best else None
        self._managers = [manager for manager in (self._last, self._best) if manager]

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None."""
        return self._last.latest_step()

    def best_until(self, step: int) -> float | None:
        """Returns the value of the best checkpoint of `step` or before it, or None; removes those of a discarded future."""
        if self._best is None:
            return None
        for later in [s for s in self._best.all_steps() if s > step]:
            self._best.delete(later)
        kept = self._best.latest_step()
        return None if kept is None else _host(self._best, kept)[0]["best"]

    def host(self, step: int) -> dict[str, Any]:
        """Returns the host's state of the checkpoint at `step`, without its deferred parts; raises ValueError where it is damaged."""
        return self._amended(step, _host(self._last, step)[0])

    def whole_host(self, step: int) -> dict[str, Any]:
        """Returns the host's state of the checkpoint at `step` with its deferred parts in place; raises ValueError where it is damaged."""
        return self._amended(step, _whole_host(self._last, step))

    def amend(self, step: int, host: dict[str, Any]) -> None:
        """Records that the evaluation which the checkpoint at `step` left to a later start is done, and what it changed; atomically."""
        if jax.process_index():
            return
        known = {"step": step, **{name: host[name] for name in _MOVED}}
        whole, torn = self._evaluated, self._evaluated.with_suffix(".torn")
        torn.write_text(json.dumps(known) + "\n")
        torn.replace(whole)

    def _amended(self, step: int, host: dict[str, Any]) -> dict[str, Any]:
        """Returns the host's state with what `amend` recorded of it."""
        known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._evaluated.read_text())
        if "pending" not in host or known.get("step") != step:
            return host
        return {name: x for name, x in host.items() if name != "pending"} | {name: known[name] for name in _MOVED}

    def restore(self, step: int, abstract: dict[str, Any], sizes: Sizes = NONE_FILLED) -> dict[str, Any]:
        """Restores the device trees of a checkpoint, in the shardings of `abstract` (any mesh); `sizes` has the own shapes of padded leaves.

        Raises:
          ValueError: the checkpoint is of another model, optimizer or algorithm, or damaged.
        """
        return restore(self._last, step, abstract, sizes)

    def save(
        self,
        step: int,
        trees: dict[str, Any],
        host: dict[str, Any],
        *,
        sizes: Sizes = NONE_FILLED,
        last: bool = True,
        best: bool = False,
    ) -> None:
        """Saves in the background after copying to the host; raises OSError where this save or the one before it fails.

        Args:
          trees: device pytrees by name.
          host: the host's state, JSON-like but for its deferred parts, which are made where a save is due.
          sizes: the own shapes of padded arrays.
          last: whether to save it as the last checkpoint.
          best: whether to save it as the best one.
        """
        wanted = [manager for manager, asked in ((self._best, best), (self._last, last)) if asked and manager]
        if not wanted:
            return
        args: dict[str, Any] = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        if self._deferred:
            host, data = serialization.split(host)
            host[_PACKED] = {"bytes": len(data), "crc32": zlib.crc32(data)}
            # The array of process 0 is written; those of the others, which sample nothing ahead, are not looked at.
            args[_PACKED] = ocp.args.StandardSave({"bytes": np.frombuffer(data, np.uint8)})
        args["host"] = ocp.args.JsonSave(tree_sums.signed(host, trees, sizes))
        for manager in wanted:
            if jax.process_count() > 1:
                self.wait()  # the saves of two managers would meet at one barrier of the processes
            if manager is self._best:
                self._forget_worse(manager)
            with _written(manager, f"checkpoint {step}"):
                manager.save(step, args=ocp.args.Composite(**args))

    def keep(self, offset: int, tree: Any, sizes: Sizes = NONE_FILLED) -> dict[str, Any]:
        """Stores the reference of the stage that begins after step `offset`, unless this start has; returns the record of it for checkpoints.

        It is on disk on return, so that no checkpoint names an absent one. A reference that an earlier start left, which ended before
        its first checkpoint, is replaced. Raises OSError where it cannot be written.
        """
        if offset not in self._held:
            host = tree_sums.signed({}, {_REFERENCE: tree}, sizes)
            args = {_REFERENCE: ocp.args.StandardSave(tree), "host": ocp.args.JsonSave(host)}
            manager = _manager(self._references, None)
            with _written(manager, "the reference"), contextlib.closing(manager):
                if offset in manager.all_steps():
                    manager.delete(offset)
                manager.save(offset, args=ocp.args.Composite(**args))
                manager.wait_until_finished()
            self._held[offset] = _said(tree_sums.opened(host, self._references)[1], tree)
        return {_REFERENCE: self._held[offset]}

    def kept(self, offset: int, said: dict[str, str], shapes: Callable[[str], Any], sizes: Sizes = NONE_FILLED) -> Any:
        """Reads the reference that a checkpoint names.

        Args:
          offset: the step after which the stage begins.
          said: the checkpoint's record of the reference.
          shapes: dtype -> the shapes and shardings of a reference whose weights have it.
          sizes: the own shapes of padded arrays.

        Raises:
          ValueError: it is not there, is another one than the checkpoint's, or damaged.
        """
        where = f"{self._references}/{offset}"
        if not Path(where).is_dir():
            raise Damaged(
                f"the reference {where}, which the checkpoint needs, is not there: put it back, or set RUN_DIR to another folder"
            )
        with contextlib.closing(_manager(self._references, None)) as manager:
            tree = restore(manager, offset, {_REFERENCE: shapes(said["dtype"])}, sizes)[_REFERENCE]
            if said != _said(_host(manager, offset)[1], tree):
                raise Damaged(
                    f"the reference {where} is another one than the checkpoint's: put its own back, or set RUN_DIR to another folder"
                )
        self._held[offset] = said
        return tree

    def _forget_worse(self, best: ocp.CheckpointManager) -> None:
        """Removes best checkpoints that no start needs any more: a better one exists that is no newer than the checkpoint a killed run resumes from."""
        with _written(self._last):
            self._last.wait_until_finished()
        durable = self.latest()
        for worse in [s for s in sorted(best.all_steps()) if durable is not None and s <= durable][:-1]:
            best.delete(worse)

    def wait(self) -> None:
        """Waits until every save is on disk."""
        for manager in self._managers:
            with _written(manager):
                manager.wait_until_finished()

    def close(self) -> None:
        """Closes the managers after the saves in progress; raises OSError where one fails."""
        with contextlib.ExitStack() as closing:
            for manager in self._managers:
                closing.callback(_written(manager)(manager.close))


def _said(sums: Mapping[str, str], tree: Any) -> dict[str, str]:
    """Returns the record of a reference in checkpoints: the dtype of most of its bytes, and a hash of the checksums of all."""
    dtypes = Counter[str]()
    for x in jax.tree.leaves(tree):
        dtypes[x.dtype.name] += x.nbytes
    text = json.dumps(dict(sums), sort_keys=True)
    return {"dtype": dtypes.most_common(1)[0][0], "sums": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
    # Removes what an interrupted save left. Orbax would do so in the background, and fail the next save where something is gone already.
    for torn in folder.glob(f"*{_TORN}*") if jax.process_index() == 0 else ():
        shutil.rmtree(torn, ignore_errors=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
    return ocp.CheckpointManager(folder, options=options)


def restore(
    manager: ocp.CheckpointManager, step: int, abstract: dict[str, Any], sizes: Sizes = NONE_FILLED
) -> dict[str, Any]:
    """Reads the trees named by `abstract` (leaves: ShapeDtypeStruct with shardings, padded where `sizes` says so) from one checkpoint."""
    host, written = _host(manager, step)
    theirs = host.get(tree_sums.SIZES, {})
    try:
        filled = bool(sizes or theirs)
        for name, tree in abstract.items() if filled else ():
            got, want = (tree_sums.within(one, f"['{name}']") for one in (theirs, sizes))
            tree_sums.check_sizes(f"{manager.directory}/{step}/{name}", tree, got, want)
        args = {name: ocp.args.StandardRestore(tree, strict=not filled) for name, tree in abstract.items()}
        restored = manager.restore(step, args=ocp.args.Composite(**args))
        trees = {name: restored[name] for name in abstract}
        _same_shapes(trees, abstract)
    except Exception as error:  # orbax raises errors of any type, bare Exception among them
        if ran_out(error):
            raise
        raise ValueError(
            f"the checkpoint {manager.directory}/{step} is of another model, optimizer or algorithm, or damaged: {_first_line(error)}. "
            f"Give the run another RUN_DIR, or the model that the checkpoint was made with; if it is damaged, {_way_out(manager, step)}"
        ) from error
    try:
        tree_sums.check(trees, written, f"{manager.directory}/{step}", sizes=sizes)
    except Damaged as error:
        raise Damaged(f"{error}: {_way_out(manager, step)}") from error
    return trees


def _host(manager: ocp.CheckpointManager, step: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the host's state of a checkpoint and the checksums of its arrays."""
    where = f"{manager.directory}/{step}"
    try:
        content = manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]
        return tree_sums.opened(content, where)
    except Exception as error:  # orbax raises errors of any type, bare Exception among them
        if ran_out(error):
            raise
        raise Damaged(f"{where} is damaged ({_first_line(error)}): {_way_out(manager, step)}") from error


def _whole_host(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """Returns the host's state of a checkpoint, with its deferred parts where it has any."""
    where = f"{manager.directory}/{step}"
    host, _ = _host(manager, step)
    written = host.pop(_PACKED, None)
    if written is None:
        return host
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**{_PACKED: ocp.args.StandardRestore()}))
        data = np.asarray(restored[_PACKED]["bytes"]).tobytes()
    except Exception as error:  # orbax raises errors of any type, bare Exception among them
        raise Damaged(
            f"the sampled groups in {where} are damaged ({_first_line(error)}): {_way_out(manager, step)}"
        ) from error
    if written != {"bytes": len(data), "crc32": zlib.crc32(data)}:
        raise Damaged(f"the sampled groups in {where} are not what was written: {_way_out(manager, step)}")
    return dict(serialization.whole(host, data))


def _way_out(manager: ocp.CheckpointManager, step: int) -> str:
    """Returns what to do about a damaged checkpoint."""
    before = [s for s in manager.all_steps() if s < step]
    then = f"go on from step {max(before)}" if before else "begin anew"
    return f"move {manager.directory}/{step} away, and the same command will {then}"


def _same_shapes(trees: dict[str, Any], abstract: dict[str, Any]) -> None:
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(trees), jax.tree.leaves(abstract), strict=True):
        if got.shape != want.shape:
            raise ValueError(f"{jax.tree_util.keystr(path)} has shape {got.shape} where the model has {want.shape}")


def last_step(folder: Path) -> int:
    """Returns the step of the last complete checkpoint under `folder`.

    Raises:
      FileNotFoundError: there is none.
    """
    steps = sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.is_dir() else []
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {folder}: give a run folder that a run has saved to")
    return steps[-1]


def read_host(folder: Path, step: int) -> dict[str, Any]:
    """Returns the host's state of a checkpoint, read without a manager; raises ValueError where it is damaged."""
    return _read(folder, step)[0]


def _read(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, str]]:
    where = folder / str(step)
    try:
        return tree_sums.opened(json.loads((where / "host" / "metadata").read_text()), where)
    except (ValueError, AttributeError) as error:
        raise Damaged(f"the checkpoint {where} is damaged: {_first_line(error)}") from error


@contextlib.contextmanager
def _written(manager: ocp.CheckpointManager, which: str = "a checkpoint") -> Iterator[None]:
    """Turns the error of a save into one that says where it failed, and what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        folder = Path(manager.directory)
        free = shutil.disk_usage(folder.parent if folder.parent.exists() else "/").free
        raise OSError(
            f"{which} could not be written to {folder} ({_first_line(error)}; {free / 2**20:.0f} MiB free). "
            "Earlier checkpoints are whole: free some space or set RUN_DIR to another disk, and start the same command again"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]


def read_model(folder: Path, step: int, abstract: Any, name: str = "policy", own: Any = None) -> Any:
    """Reads one model's trained parameters alone, in the shardings of `abstract`; optimizer state is not read.

    `own` is a tree like `abstract` with the own shapes of its leaves; None where none is padded.

    Raises:
      ValueError: the checkpoint is of another model, or damaged.
    """
    host, written = _read(folder, step)
    inside, path = f"['state'].params['{name}']", folder.absolute() / str(step) / "state"
    theirs = tree_sums.within(host.get(tree_sums.SIZES, {}), inside)
    sizes = tree_sums.filled_up(abstract, abstract if own is None else own)
    item = {"params": {name: abstract}}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    try:
        if sizes or theirs:
            tree_sums.check_sizes(path, abstract, theirs, sizes, at=("params", name))
            how = jax.tree.map(lambda one: dataclasses.replace(one, strict=False), how)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(path, args=arguments)["params"][name]
        _same_shapes(restored, abstract)
    except Exception as error:  # orbax raises errors of any type, bare Exception among them
        if ran_out(error):
            raise
        raise ValueError(f"the checkpoint {path} is of another model, or damaged: {_first_line(error)}") from error
    tree_sums.check(restored, written, path, inside=inside, sizes=sizes)
    return restored
