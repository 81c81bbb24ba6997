"""What a run does to the process of a user, who may have imported JAX and set up logging before."""

import logging
import subprocess
import sys

import tiny_run

from jaxrl_llm.metrics.run_folder import JsonLines


def test_the_log_of_a_run_adds_nothing_to_what_other_handlers_get(tmp_path, monkeypatch):
    got: list[str] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            got.append(record.getMessage())

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [Own()])
    monkeypatch.setattr(root, "level", logging.WARNING)
    lines = JsonLines(tmp_path / "log.jsonl", 0, dict)
    lines.attach()
    logging.getLogger("jaxrl_llm.train").info("quiet")
    logging.getLogger("jaxrl_llm.train").warning("loud")
    lines.detach()
    assert got == ["loud"]
    assert [text in (tmp_path / "log.jsonl").read_text() for text in ("quiet", "loud")] == [True, True]


def test_the_compilation_cache_is_used_where_jax_is_imported_already(tmp_path):
    program = (
        "import jax; from jaxrl_llm.distributed import compilation_cache; compilation_cache.keep(); "
        "jax.jit(lambda x: x + 1)(1.0).block_until_ready(); print(jax.config.jax_compilation_cache_dir)"
    )
    environment = {n: v for n, v in tiny_run.environment().items() if not n.startswith("JAX_COMPILATION")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(tiny_run.ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and list(tmp_path.glob("jaxrl_llm/jax/*/*"))
