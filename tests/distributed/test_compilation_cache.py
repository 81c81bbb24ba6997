"""Compiled programs are kept between starts in a folder of the user, the machine and the version, and never trusted blindly."""

import ast
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import several_hosts
import tiny_run

from jaxrl_llm.distributed import compilation_cache

pytestmark = pytest.mark.slow

BASE = Path("jaxrl_llm") / "jax"


def test_the_folder_is_the_users_and_named_by_version_and_machine(tmp_path):
    import jax

    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert compilation_cache.apply(environment) == ""
    folder = Path(environment["JAX_COMPILATION_CACHE_DIR"])
    assert folder.parent == tmp_path / BASE and folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    assert folder.name.startswith(f"jax-{jax.__version__}-linux-")
    assert environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    alone = {"HOME": str(tmp_path)}
    assert compilation_cache.apply(alone) == ""
    assert Path(alone["JAX_COMPILATION_CACHE_DIR"]) == tmp_path / ".cache" / BASE / folder.name


@pytest.mark.parametrize(
    "own",
    [
        {"JAX_COMPILATION_CACHE_DIR": "/mine"},
        {"JAX_COMPILATION_CACHE_DIR": ""},
        {"JAX_ENABLE_COMPILATION_CACHE": "False"},
    ],
)
def test_the_users_own_settings_stand(tmp_path, own):
    environment = {"XDG_CACHE_HOME": str(tmp_path), **own}
    assert compilation_cache.apply(environment) == ""
    assert environment == {"XDG_CACHE_HOME": str(tmp_path), **own} and not list(tmp_path.iterdir())


def test_another_processor_or_version_has_another_folder(tmp_path, monkeypatch):
    here = compilation_cache.machine()
    assert here == compilation_cache.machine()
    for text in ("flags\t: sse avx\n\nflags\t: other", "flags\t: sse avx avx512f\n\nflags\t: other"):
        (tmp_path / "cpuinfo").write_text(text)
        found = compilation_cache._processor(tmp_path / "cpuinfo")
        assert found == [text.partition("\n")[0]]
    with monkeypatch.context() as patch:
        patch.setattr(compilation_cache, "_processor", lambda: ["flags : sse avx"])
        assert compilation_cache.machine() != here
    version = compilation_cache.importlib.metadata.version
    monkeypatch.setattr(
        compilation_cache.importlib.metadata, "version", lambda name: version(name) + ("1" if name == "jaxlib" else "")
    )
    assert compilation_cache.machine() != here


def test_a_folder_that_others_could_fill_is_not_used(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    compilation_cache.apply(environment)
    Path(environment["JAX_COMPILATION_CACHE_DIR"]).chmod(0o777)
    again = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "others may write to it" in compilation_cache.apply(again)
    assert "JAX_COMPILATION_CACHE_DIR" not in again


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert "are not kept between starts: " in compilation_cache.apply(environment)
    assert "JAX_COMPILATION_CACHE_DIR" not in environment


def test_what_was_not_read_for_a_month_is_deleted_and_a_folder_whose_first_program_is_still_compiled_is_not(tmp_path):
    now = time.time()
    (tmp_path / "begun").mkdir()
    month = 31 * 24 * 3600
    for name, atime, mtime in (
        ("old/a", now - month, now - month),
        ("here/b", now, now - month),
        ("here/c", now - month, now),
    ):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        os.utime(file, (atime, mtime))
    compilation_cache.trim(tmp_path, now)
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*")) == ["begun", "here", "here/b", "here/c"]


def test_the_machine_is_named_once_however_many_files_lie_beside_its_folder(tmp_path, monkeypatch):
    asked, name = [], compilation_cache.machine()
    monkeypatch.setattr(compilation_cache, "machine", lambda: asked.append(1) or name)
    for number in range(50):
        (tmp_path / f"jit_{number}-cache").write_text(
            ""
        )  # as where a folder of programs is named by JAX's own variable
    (tmp_path / name).mkdir()
    compilation_cache.trim(tmp_path, time.time())
    assert len(asked) == 1 and len(list(tmp_path.iterdir())) == 51 and (tmp_path / name).is_dir()


# The stage of demonstrations alone: the programs of one update, without a sampler's.
ONE_STAGE = {"train.Run.stages": "[@sft/train.Stage()]", "sft/train.Stage.evaluations": "[]", "qwen3.Qwen3.layers": 1}


def plan(environment):
    command = tiny_run.command(Path(environment["XDG_CACHE_HOME"]) / "run", **ONE_STAGE)
    return subprocess.run(
        [*command, "--dry_run"], cwd=tiny_run.ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_second_start_compiles_nothing_and_one_that_finds_broken_programs_compiles_them(tmp_path):
    environment = {**tiny_run.environment(), "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        environment.pop(name, None)
    first = plan(environment)
    assert first.returncode == 0, first.stderr
    (folder,) = (tmp_path / BASE).iterdir()
    programs = {f.name: f.stat().st_mtime_ns for f in folder.glob("*-cache")}
    assert {name.partition("-")[0] for name in programs} == {"jit_accumulate", "jit__applied"}
    second = plan(environment)
    assert second.stdout == first.stdout
    assert {f.name: f.stat().st_mtime_ns for f in folder.glob("*-cache")} == programs
    for file in folder.glob("*-cache"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # as a process leaves it that is killed
    third = plan(environment)
    assert (third.returncode, third.stdout) == (0, first.stdout)
    assert "Error reading persistent compilation cache entry" in third.stderr


def test_a_folder_of_all_hosts_is_taken_in_place_of_the_users_own(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path / "own"), "JAXRL_LLM_COMPILED": str(tmp_path / "shared")}
    assert compilation_cache.apply(environment) == ""
    folder = Path(environment["JAX_COMPILATION_CACHE_DIR"])
    assert folder == tmp_path / "shared" / BASE / compilation_cache.machine() and folder.is_dir()
    assert not (tmp_path / "own").exists()
    (tmp_path / "file").write_text("")
    said = compilation_cache.apply({"JAXRL_LLM_COMPILED": str(tmp_path / "file")})
    assert "not kept between starts" in said and "set JAXRL_LLM_COMPILED to a folder of your own" in said


def test_object_storage_takes_programs_that_took_long_where_its_library_is_there(monkeypatch):
    there: list[str] = []
    monkeypatch.setattr(compilation_cache.importlib.util, "find_spec", lambda name: name if name in there else None)
    for address, library in (("gs://bucket/compiled/", "gcsfs"), ("s3://bucket/compiled", "s3fs")):
        environment = {"JAXRL_LLM_COMPILED": address}
        assert f"is read by {library}, which is not installed: pip install {library}" in compilation_cache.apply(
            environment
        )
        there.append(library)
        assert compilation_cache.apply(environment) == ""
        at = f"{address.rstrip('/')}/jaxrl_llm/jax/{compilation_cache.machine()}"
        assert environment == {"JAXRL_LLM_COMPILED": address, "JAX_COMPILATION_CACHE_DIR": at}
    said = compilation_cache.apply({"JAXRL_LLM_COMPILED": "ftp://host/compiled"})
    assert "ftp://host/compiled is of no kind that is known: use gs://, s3:// or a folder" in said


def starts(folders, **more):
    """What two processes, each with a home of its own, say of a program of them both: [[misses, hits] of each], and all output."""
    own = [[f"XDG_CACHE_HOME={folder}", *(f"{n}={v}" for n, v in more.items())] for folder in folders]
    unset = ["-u", "JAX_COMPILATION_CACHE_DIR", "-u", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    command = [sys.executable, "-c", several_hosts.COMPILING]
    both = several_hosts.ended(several_hosts.start(command, 2, 1, prefixes=[["env", *unset, *one] for one in own]))
    assert [status for status, _ in both] == [0, 0], both
    said = both[0][1]
    return ast.literal_eval(said.partition("misses and hits ")[2].partition("\n")[0]), said


def test_the_second_start_of_two_hosts_compiles_nothing_where_they_share_a_folder(tmp_path):
    homes = [tmp_path / "first", tmp_path / "second"]
    found, said = starts(homes, JAXRL_LLM_COMPILED=tmp_path / "shared")
    assert all(sum(one) == 1 for one in found)
    assert sum(misses for misses, _ in found) >= 1  # the slower may find the other's
    assert "compile anew" not in said
    found, _ = starts(homes, JAXRL_LLM_COMPILED=tmp_path / "shared")
    assert found == [[0, 1], [0, 1]]


def test_hosts_that_share_no_folder_are_told_that_all_but_one_compile_anew(tmp_path):
    homes = [tmp_path / "first", tmp_path / "second"]
    starts(homes)
    found, said = starts(homes)
    assert found == [[0, 1], [1, 0]]
    assert (
        "1 of 2 processes compile anew at each start (process 1 (" in said
        and "set JAXRL_LLM_COMPILED on all hosts" in said
    )


# The commands that compile programs, with words that each accepts; `launch` is tested above.
COMPILES = {
    "kernels.bench": ["--op=attention"], "tools.bench": [], "tools.chat": [str(tiny_run.ROOT)], "tools.doctor": [],
    "tools.export": [".", "--out=model"], "tools.hidden_states": [".", "text", "--output=x.npz"], "tools.phase_times": [],
    "tools.plan": ["--gin_file=gin/quickstart.gin"], "eval.pair_accuracy": ["--model=m", "--pairs=p"],
}  # fmt: skip
# Two read arrays of checkpoints and traces, and one measures how long compiling takes.
KEEPS_NONE = {"eval.reports.phase_switch", "metrics.profiling", "kernels.tpu_cycles"}
HERE = {"kernels": "kernels", "eval": "eval", "data": "data", "jaxrl_llm": ""}


class Kept(Exception):
    """The command keeps its programs."""


@pytest.mark.parametrize("command", COMPILES)
def test_every_command_that_compiles_keeps_its_programs(command, monkeypatch):
    module = importlib.import_module(f"jaxrl_llm.{command}")

    def keep():
        raise Kept

    monkeypatch.setattr(compilation_cache, "keep", keep)
    with pytest.raises(Kept):
        module.main(COMPILES[command])


def test_no_other_command_imports_jax():
    found = set()
    for folder, name in HERE.items():
        for file in (tiny_run.ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            guards = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
            imports = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            if guards and "jax" in imports:
                parts = file.relative_to(tiny_run.ROOT / folder).with_suffix("").parts
                found.add(".".join([*filter(None, [name]), *parts]))
    assert {"tools.doctor", "tools.bench"} <= found <= COMPILES.keys() | KEEPS_NONE


PROGRAM = """
import jax, jax.numpy as jnp
from jaxrl_llm.distributed import compilation_cache
compilation_cache.keep()
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8))).block_until_ready()
"""


def test_programs_are_kept_where_jax_was_imported_before(tmp_path):
    environment = {**tiny_run.environment(), "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        environment.pop(name, None)
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, cwd=tiny_run.ROOT, env=environment, check=True, timeout=120)
    (folder,) = (tmp_path / BASE).iterdir()
    assert list(folder.glob("jit__lambda*-cache"))
