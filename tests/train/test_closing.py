"""What a run holds is closed when it ends, also where closing a part of it fails."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jaxrl_llm import components
from jaxrl_llm.distributed.preemption import STOPPED
from jaxrl_llm.metrics.writers import Writers
from jaxrl_llm.rewards.by_source import BySource
from jaxrl_llm.rewards.weighted import Weighted
from jaxrl_llm.samplers.servers.client import FleetClient
from jaxrl_llm.train.run import Trainer


class Held:
    """Something to close, which says so and may fail."""

    needs_stats = False

    def __init__(self, name: str, closed: list[str], fails: bool = False) -> None:
        self.name, self.closed, self.fails = name, closed, fails

    async def score(self, rollouts: Any, stats: Any = None) -> Any: ...

    write = rollouts = image = text = cut = score  # of a writer; none is called

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails:
            raise OSError(f"{self.name} does not close")

    async def aclose(self) -> None:
        self.close()


def test_rewards_within_rewards_are_closed_where_one_fails():
    closed: list[str] = []
    inner = BySource(rewards={"a": Held("a", closed, fails=True)}, default=Held("b", closed))
    with pytest.raises(OSError, match="a does not close"):
        components.close([Weighted(parts={"inner": inner, "c": Held("c", closed)}), None])
    assert sorted(closed) == ["a", "b", "c"]


@pytest.mark.filterwarnings("error")
def test_what_an_event_loop_closes_is_left_to_its_player():
    closed: list[str] = []
    held, player = Held("a", closed), SimpleNamespace(close=Held("b", closed).aclose)
    components.close([player, held])
    gc.collect()  # where a coroutine that nothing awaits would be warned of
    assert closed == ["a"]


def test_a_run_closes_everything_where_its_sampler_does_not_close():
    closed: list[str] = []
    trainer = object.__new__(Trainer)
    trainer.config = SimpleNamespace(stages=[SimpleNamespace(closing=(Held("reward", closed),))])  # type: ignore[assignment]
    trainer.sampler = SimpleNamespace(close=Held("sampler", closed, fails=True).aclose)  # type: ignore[assignment]
    trainer.auxiliary = [SimpleNamespace(stop=Held("companion", closed, fails=True).aclose)]  # type: ignore[list-item]
    trainer.players = [SimpleNamespace(close=Held("player", closed, fails=True).aclose)]  # type: ignore[list-item]
    trainer.stopped, trainer.status = "", 0
    trainer.checkpoints = Held("checkpoints", closed)  # type: ignore[assignment]
    trainer.writers = Writers([Held("first writer", closed, fails=True), Held("writer", closed)])  # type: ignore[list-item]
    ended: list[BaseException | None] = []
    trainer.watching = SimpleNamespace(at=lambda what: None, end=ended.append)  # type: ignore[assignment]
    with pytest.raises(OSError, match="does not close"):
        asyncio.run(trainer.close())
    assert sorted(closed) == ["checkpoints", "companion", "first writer", "player", "reward", "sampler", "writer"]
    assert isinstance(ended[0], OSError)


@pytest.mark.parametrize("full", ["checkpoints", "writers"])
def test_a_disk_that_is_full_when_a_run_closes_ends_it_resumably_and_with_one_line(capsys, full):
    closed: list[str] = []
    trainer = object.__new__(Trainer)
    trainer.config, trainer.auxiliary, trainer.players = SimpleNamespace(stages=[]), [], []  # type: ignore[assignment]
    trainer.stopped, trainer.status = "", 0
    trainer.watching = SimpleNamespace(at=lambda what: None, end=lambda error: None)  # type: ignore[assignment]
    trainer.sampler = SimpleNamespace(close=Held("sampler", closed).aclose)  # type: ignore[assignment]
    for name in ("checkpoints", "writers"):
        setattr(trainer, name, Held(name, closed, fails=name == full))
    asyncio.run(trainer.close())
    assert sorted(closed) == ["checkpoints", "sampler", "writers"]
    assert trainer.status == STOPPED
    assert capsys.readouterr().out == f"stopped by {full} does not close; the same command goes on\n"


def test_of_a_full_disk_the_first_failure_is_told(capsys):
    trainer = object.__new__(Trainer)
    trainer.stopped, trainer.status = "", 0
    with trainer.writing():
        raise OSError("no room for metrics")
    trainer.written(Held("checkpoints", [], fails=True).close)
    assert (trainer.stopped, trainer.status, capsys.readouterr().out) == ("no room for metrics", STOPPED, "")


def test_a_disk_that_is_full_in_an_evaluation_ends_the_run_resumably():
    class Full:
        def rollouts(self, step: int, rows: Any) -> None:
            raise OSError("no room for rollouts")

    async def answers() -> Any:
        return {"eval/heldout/greedy": 0.5}, []

    trainer = object.__new__(Trainer)
    trainer.stopped, trainer.status, trainer.progress, trainer.writers = "", 0, Mock(), Full()  # type: ignore[assignment]
    trainer.sampler = SimpleNamespace(version=3)  # type: ignore[assignment]
    trainer.bases = {}
    stage = SimpleNamespace(
        config=SimpleNamespace(evaluations=[1]), held_out=SimpleNamespace(answers=answers), measure=lambda state: {}
    )
    found = asyncio.run(trainer.evaluate(stage, None, 3))  # type: ignore[arg-type]
    assert (found, trainer.status, trainer.stopped) == ({"eval/heldout/greedy": 0.5}, STOPPED, "no room for rollouts")


def test_servers_are_stopped_where_a_connection_does_not_close():
    closed: list[str] = []
    client = object.__new__(FleetClient)
    client._publication, client.remove = None, True
    client._fleet = SimpleNamespace(close=Held("fleet", closed, fails=True).aclose)  # type: ignore[assignment]
    client.disconnect = Held("servers", closed, fails=True).aclose
    client.publisher = SimpleNamespace(close=lambda remove: closed.append(f"publisher {remove}"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="does not close"):
        asyncio.run(client.close())
    assert closed == ["fleet", "servers", "publisher True"]
