"""Plays tasks of verifiers for a run, by the Python of an environment in which verifiers is installed, without this package.

It reads JSON lines on its standard input and writes them on its standard output:
    {"list": COUNT}                                                        -> {"tasks": [{"index", "messages"}, ...]}
    {"id", "task", "base_url", "key", "model", "sampling"}                  -> {"id", "rewards", "ok", "errors", "stop", "info"}
    {"cancel": ID}
The first line of its own is {"ready": version of verifiers}. What tasksets print goes to the standard error.
"""

import asyncio
import itertools
import json
import os
import sys
from typing import Any

MOST_LINE = 1 << 26


def environment_of(config: dict[str, Any]) -> Any:
    """Loads the environment of verifiers that a config names."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(config))


def messages_of(data: Any) -> list[dict[str, str]]:
    """Returns the first messages of a task, with their text alone."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    said = []
    for message in data.prompt or ():
        content = message.content
        if not isinstance(content, str):
            content = "".join(getattr(part, "text", "") for part in content or ())
        said.append({"role": message.role, "content": content})
    return [*system, *said] or [{"role": "user", "content": ""}]


class Worker:
    """Plays tasks of one environment.

    Args:
      environment: the environment of verifiers.
      renderer: the folder of the tokenizer and the settings of renderers.
      say: writes an answer.
    """

    def __init__(self, environment: Any, renderer: dict[str, Any], say: Any) -> None:
        self.environment, self.renderer, self.say = environment, renderer, say
        self._source = iter(environment.taskset)
        self._tasks: list[Any] = []
        self._playing: dict[str, asyncio.Task[None]] = {}

    def task(self, index: int) -> Any:
        """Returns task number `index`; raises IndexError where there are fewer."""
        self._tasks += itertools.islice(self._source, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]

    def hear(self, asked: dict[str, Any]) -> None:
        """Handles a message; what it asks for is played in a task of its own."""
        if "list" in asked:
            self.say(self.listed(int(asked["list"])))
        elif "cancel" in asked:
            if (playing := self._playing.get(asked["cancel"])) is not None:
                playing.cancel()
        else:
            self._playing[asked["id"]] = asyncio.create_task(self._answered(asked))

    def listed(self, count: int) -> dict[str, Any]:
        """Returns the first `count` tasks, or all where there are fewer."""
        found = []
        for index in range(count):
            try:
                found.append({"index": index, "messages": messages_of(self.task(index).data)})
            except IndexError:
                break
        return {"tasks": found}

    async def _answered(self, asked: dict[str, Any]) -> None:
        variable = f"KEY_OF_{asked['id'].upper()}"
        os.environ[variable] = asked["key"]
        try:
            self.say({"id": asked["id"], **await self._played(asked, variable)})
        except asyncio.CancelledError:
            self.say({"id": asked["id"], "ok": False, "errors": ["cancelled"]})
        except Exception as error:  # a taskset is foreign code: any exception concerns this rollout alone
            self.say({"id": asked["id"], "ok": False, "errors": [f"{type(error).__name__}: {error}"]})
        finally:
            del os.environ[variable], self._playing[asked["id"]]

    async def _played(self, asked: dict[str, Any], variable: str) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        client = TrainClientConfig(
            base_url=asked["base_url"], api_key_var=variable, renderer=self.renderer["config"],
            renderer_model_name=self.renderer["folder"],
        )  # fmt: skip
        context = ModelContext(model=asked["model"], client=client, sampling=SamplingConfig(**asked["sampling"]))
        episode = await self.environment.run_episode(self.task(asked["task"]), context)
        return told(episode)


def told(episode: Any) -> dict[str, Any]:
    """Returns what a run reads of an episode: the weighted rewards of its traces by name, summed over traces, and what failed."""
    rewards: dict[str, float | None] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            known = rewards.get(name, 0.0)
            rewards[name] = None if reward is None or known is None else known + float(reward.value)
    failed = [error for source in (episode, *episode.traces) if not source.ok for error in source.errors]
    ok = bool(episode.ok and episode.traces and all(trace.ok for trace in episode.traces))
    return {
        "ok": ok, "rewards": rewards, "errors": [f"{error.type}: {error.message}" for error in failed],
        "stop": next((str(t.stop_condition) for t in reversed(episode.traces) if t.stop_condition), "done"),
        "info": {
            "traces": [trace.id for trace in episode.traces], "branches": sum(len(trace.branches) for trace in episode.traces),
            "metrics": {name: value for trace in episode.traces for name, value in trace.metrics.items()},
        },
    }  # fmt: skip


async def serve(settings: dict[str, Any], answers: Any) -> None:
    """Plays the requested tasks until the standard input ends."""
    import verifiers

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what, default=str) + "\n")
        answers.flush()

    reader = asyncio.StreamReader(limit=MOST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    environment = environment_of(settings["environment"])
    async with environment.serving():
        worker = Worker(environment, settings["renderer"], say)
        say({"ready": verifiers.__version__})
        while line := await reader.readline():
            worker.hear(json.loads(line))


def main() -> None:
    """Serves by the settings in the first argument."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # tasksets print to standard output
        asyncio.run(serve(json.loads(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
