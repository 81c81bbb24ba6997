"""Compiled programs are kept between starts in a folder of the user, the machine and the version, and never trusted blindly."""

import os
import subprocess
import time
from pathlib import Path

import pytest
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


def test_what_was_not_read_for_a_month_is_deleted(tmp_path):
    now = time.time()
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
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*")) == ["here", "here/b", "here/c"]


def plan(environment):
    command = tiny_run.command(Path(environment["XDG_CACHE_HOME"]) / "run")
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
    assert len(programs) > 3
    second = plan(environment)
    assert second.stdout == first.stdout
    assert {f.name: f.stat().st_mtime_ns for f in folder.glob("*-cache")} == programs
    for file in folder.glob("*-cache"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # as a process leaves it that is killed
    third = plan(environment)
    assert (third.returncode, third.stdout) == (0, first.stdout)
    assert "Error reading persistent compilation cache entry" in third.stderr
