"""The viewer's server: answers, refusals, and folders that it can and cannot show."""

import asyncio
import json
import re
import time
from collections.abc import Mapping

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from viewer_rows import record, rollout, write_results, write_run

from jaxrl_llm.eval.viewer import procedural_run
from jaxrl_llm.eval.viewer.__main__ import main
from jaxrl_llm.eval.viewer.curves import MetricLog
from jaxrl_llm.eval.viewer.folders import find
from jaxrl_llm.eval.viewer.server import ASSETS, Pages
from jaxrl_llm.metrics.writers import Jsonl

HOSTILE = "<script>window.hacked = 1</script>"


@pytest.fixture
def folders(tmp_path):
    steps = {s: [rollout(p, f"{HOSTILE} {s}", r) for p, r in (("a", s), ("a", None), ("b", -s))] for s in (1, 2, 5)}
    write_run(tmp_path / "runs" / "one", steps)
    results = write_results(tmp_path / "results", [record("a", 0, "yes", 1.0), record("a", 1, "no", 0.0)])
    summary = {
        "metrics": {"avg@2": 0.5},
        "ci95": {"avg@2": None},
        "n": {"avg@2": 1},
        "model": {"path": "m"},
        "commit": "c",
    }
    (results / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_a_run_that_begins_later_is_found_under_the_same_root(folders):
    paths = [folders / "runs", folders / "later"]
    (folders / "later").mkdir()
    pages = Pages(find(paths[:1]), paths)
    assert list(pages.shown) == ["one"]
    (held,) = pages.shown.values()
    write_run(folders / "runs" / "deep" / "two", {1: [rollout("a", "x", 1.0)]})
    write_run(folders / "later" / "three", {1: [rollout("a", "x", 1.0)]})
    pages._look()
    assert list(pages.shown) == ["one", "deep/two", "../later/three"] and pages.shown["one"] is held
    assert [row["name"] for row in pages.runs({})] == ["one", "deep/two", "../later/three"]


def answers(folder, *asked: tuple[str, Mapping[str, str]], host: str | None = None):
    """(status, body, headers) of each request to a server of `folder`; JSON bodies are parsed."""

    async def talk():
        pages = Pages(find([folder]))
        for one in pages.shown.values():
            one.log.update()
            list(one.index.update())
        async with TestClient(TestServer(pages.application())) as client:
            found = []
            for path, parameters in asked:
                headers = {"Host": host} if host else {}
                answer = await client.get(path, params=parameters, headers=headers)
                text = await answer.text()
                body = json.loads(text) if answer.content_type == "application/json" else text
                found.append((answer.status, body, answer.headers))
            return found

    return asyncio.run(talk())


def test_the_table_tells_runs_from_evaluations_and_shows_what_they_left(folders):
    ((status, runs, _),) = answers(folders, ("/api/runs", {}))
    assert status == 200
    by_name = {one["name"]: one for one in runs}
    assert set(by_name) == {"runs/one", "results"}
    run, results = by_name["runs/one"], by_name["results"]
    assert (run["kind"], run["rollouts"], run["steps"], run["reward"], run["commit"]) == ("run", 9, 5, 0, "abc")
    assert (results["kind"], results["rollouts"], results["metrics"], results["model"]) == (
        "evaluation",
        2,
        {"avg@2": 0.5},
        "m",
    )
    assert run["notices"] == results["notices"] == []


def test_the_table_says_what_a_run_does_how_long_it_took_and_what_was_invalid(tmp_path):
    healths = {
        "ended": ({"time": 1000.0, "outcome": "ended"}, "ended"),
        "failed": ({"time": 1000.0, "outcome": "ValueError: no"}, "ValueError: no"),
        "going": ({"time": time.time(), "doing": "sample"}, "running: sample"),
        "lost": ({"time": time.time() - 3600}, "lost: it says nothing any more"),
        "unknown": (None, None),
    }
    for name, (health, _) in healths.items():
        folder = write_run(tmp_path / name, {1: [rollout("a", "x", 1.0)]})
        writer = Jsonl().open(folder, 1)
        for step in (2, 3):
            writer.write(step, {"time/step_s": 2.5, "count/invalid/judge": float(step)})
        if health is not None:
            (folder / "health.json").write_text(json.dumps(health))
    ((_, runs, _),) = answers(tmp_path, ("/api/runs", {}))
    by_name = {one["name"]: one for one in runs}
    assert {name: by_name[name]["status"] for name in healths} == {
        name: status for name, (_, status) in healths.items()
    }
    assert {one["duration"] for one in runs} == {5.0} and by_name["ended"]["seen"] == 1000.0
    assert all(one["notices"] == ["5 invalid rewards (judge)"] for one in runs)


def test_a_run_its_groups_and_a_group_are_answered_as_json(folders):
    run = {"run": "runs/one"}
    about, groups, group, curves, compared = answers(
        folders, ("/api/run", run), ("/api/groups", {**run, "step": "2"}), ("/api/group", {**run, "step": "2", "prompt": "a"}),
        ("/api/curves", {"metrics": "reward/mean,absent"}),
        ("/api/compare", {"run_a": "runs/one", "step_a": "1", "run_b": "runs/one", "step_b": "5"}),
    )  # fmt: skip
    assert about[1]["steps"] == [{"step": s, "rollouts": 3, "reward": 0} for s in (1, 2, 5)]
    assert [(g["prompt"], g["rewards"]) for g in groups[1]["groups"]] == [("a", [2, None]), ("b", [-2])]
    assert [r["response"] for r in group[1]["rows"]] == [f"{HOSTILE} 2"] * 2
    assert curves[1] == {"runs/one": {"reward/mean": [[1, 2, 5], [0, 0, 0]]}, "results": {}}
    assert [(p["prompt"], p["a"], p["b"]) for p in compared[1]["prompts"]] == [("a", 1, 5), ("b", -1, -5)]


@pytest.mark.parametrize(
    ("path", "parameters", "status", "says"),
    [
        ("/api/groups", {"run": "none"}, 404, "no run 'none' here; there are runs/one, results|results, runs/one"),
        ("/api/groups", {"run": "results", "low": "high"}, 400, "low must be a number"),
        ("/api/groups", {"run": "results", "order": "up"}, 400, "order must be one of"),
        ("/api/groups", {"run": "results", "after": "-1"}, 400, "after must be a whole number"),
    ],
)
def test_bad_requests_say_what_is_wrong(folders, path, parameters, status, says):
    ((found, body, _),) = answers(folders, (path, parameters))
    assert found == status and re.search(says, body["error"])


def test_only_the_pages_own_files_are_served_and_scripts_of_nobody_else_can_run(folders):
    page, script, escape, secret = answers(
        folders, ("/", {}), ("/assets/main.js", {}), ("/assets/..%2Fserver.py", {}), ("/assets/none.js", {})
    )
    assert (page[0], script[0], escape[0], secret[0]) == (200, 200, 404, 404)
    for _, _, headers in (page, script, escape):
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self';" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert script[2]["Content-Type"].startswith("text/javascript")


def test_another_host_name_is_refused(folders):
    ((status, body, _),) = answers(folders, ("/api/runs", {}), host="evil.example:8123")
    assert status == 403 and "localhost" in body


def test_the_pages_files_ask_nothing_of_the_network_and_parse_no_html():
    for file in ASSETS.iterdir():
        text = file.read_text()
        outside = set(re.findall(r"https?://[\w./]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, f"{file.name} names {outside}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|DOMParser", text), (
            file.name
        )
        assert len(text.splitlines()) <= 400


def test_what_cannot_be_shown_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert "nothing to show" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    assert "absent is no folder" in capsys.readouterr().err


def test_results_of_another_version_or_unfinished_are_marked_and_still_shown(tmp_path):
    folder = write_results(tmp_path / "r", [record("a", 0, "yes", 1.0)])
    (folder / "identity.json").write_text('{"schema": 99}')
    ((_, (one,), _),) = answers(folder, ("/api/runs", {}))
    assert one["rollouts"] == 1
    assert any("schema 99" in n for n in one["notices"]) and any("not finished" in n for n in one["notices"])


def test_curves_of_many_steps_keep_their_mean_and_few_points(tmp_path):
    file = tmp_path / "metrics.jsonl"
    values = np.random.default_rng(0).normal(size=1000)
    file.write_text(
        "".join(json.dumps({"step": i, "x": v}) + "\n" for i, v in enumerate(values.tolist())) + '{"step": 1000, "x"'
    )
    log = MetricLog(file)
    assert log.step is None
    log.update()
    steps, found = log.curve("x", points=100)
    assert len(found) == 100 and np.mean(found) == pytest.approx(values.mean())
    assert steps[0] == pytest.approx(np.mean(np.arange(10))) and log.step == 999
    with file.open("a") as opened:
        opened.write(': "NaN"}\n{"step": 1001, "x": 7}\n')
    log.update()
    assert log.last("x") == 7 and len(log.curve("x", 5000)[0]) == 1001  # what is no number is left out


def test_a_metric_that_never_had_a_number_has_no_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "x": null, "y": "none"}\n')
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.update()
    assert log.step is None and log.curve("x") == ([], [])


def test_the_procedural_run_is_one_that_the_viewer_shows(tmp_path, capsys):
    assert procedural_run.main([str(tmp_path / "long"), "--rollouts", "400"]) == 0
    ((_, (run,), _), (_, group, _)) = answers(
        tmp_path, ("/api/runs", {}), ("/api/group", {"run": "long", "prompt": "sums/3"})
    )
    assert (run["rollouts"], run["steps"], run["notices"]) == (400, 2, [])
    for row in group["rows"]:
        assert "".join(row["streams"]["token"]) == row["response"]
        assert row["tokens"] == len(row["streams"]["token"]) == len(row["streams"]["entropy"])
        assert row["parts"]["correct"] == (row["response"].split()[-1] == row["reference"])


def test_requests_of_other_sites_are_refused(folders):
    async def talk():
        async with TestClient(TestServer(Pages(find([folders])).application())) as client:
            host = f"{client.host}:{client.port}"
            cases = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": f"http://{host}"}, {}]
            return [(await client.get("/api/runs", headers=headers)).status for headers in cases]

    assert asyncio.run(talk()) == [403, 403, 200, 200]


def test_a_configuration_that_is_a_link_is_not_followed(folders, tmp_path):
    (tmp_path / "secret").write_text("secret")
    config = folders / "runs" / "one" / "config.gin"
    config.unlink(missing_ok=True)
    config.symlink_to(tmp_path / "secret")
    ((_, about, _),) = answers(folders, ("/api/run", {"run": "runs/one"}))
    assert about["config"] == ""
    config.unlink()
    config.write_text("own")
    ((_, about, _),) = answers(folders, ("/api/run", {"run": "runs/one"}))
    assert about["config"] == "own"


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": ' + "9" * 30 + ', "prompt": "p", "response": "", "reward": 1}']
)
def test_a_line_that_cannot_be_read_ends_neither_the_indexing_nor_other_runs(folders, line, capsys):
    run = folders / "runs" / "one"
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        with (run / name).open("a") as file:
            file.write(line + "\n")
    (run / "run.json").write_text("[" * 100_000)

    async def talk():
        pages = Pages(find([folders]))
        async with TestClient(TestServer(pages.application())) as client:
            for _ in range(100):
                await asyncio.sleep(0.1)
                runs = {one["name"]: one for one in await (await client.get("/api/runs")).json()}
                if runs["results"]["rollouts"] == 2:
                    break
            with (folders / "results" / "samples.jsonl").open("a") as file:
                file.write(json.dumps(record("b", 0, "later", 1.0)) + "\n")
            for _ in range(100):
                await asyncio.sleep(0.1)
                runs = {one["name"]: one for one in await (await client.get("/api/runs")).json()}
                if runs["results"]["rollouts"] == 3:
                    return runs
            return runs

    assert asyncio.run(talk())["results"]["rollouts"] == 3
