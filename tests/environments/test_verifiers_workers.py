"""Tasks of verifiers are spread over their processes: a stand-in for verifiers' Python answers with its own number."""

import asyncio
import sys
from pathlib import Path

import pytest

from jaxrl_llm.environments.verifiers import Taskset, Workers

STANDS_IN = """#!{python}
import json, os, sys, time
print(json.dumps({{"ready": "0"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "cancel" in asked:
        continue
    time.sleep(0.1)  # holds up all others of its process
    print(json.dumps({{"id": asked["id"], "process": os.getpid(), "task": asked["task"]}}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    file = tmp_path / "python"
    file.write_text(STANDS_IN.format(python=sys.executable))
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("count", [1, 3])
def test_each_task_goes_to_the_process_that_plays_least(python: str, count: int) -> None:
    async def main() -> list[dict[str, int]]:
        workers = Workers(Taskset(python=python, environment={}, tokenizer="none", workers=count))
        try:
            return await asyncio.gather(*(workers.ask({"task": i}) for i in range(6)))
        finally:
            await workers.close()

    answers = asyncio.run(main())
    assert [answer["task"] for answer in answers] == [*range(6)]
    played = [answer["process"] for answer in answers]
    assert len(set(played)) == count
    assert all(played.count(process) == 6 // count for process in played)


def test_fewer_than_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workers must be >= 1 \(got 0\)"):
        Taskset(python="python", environment={}, tokenizer="none", workers=0)
