"""The viewer's curves and table in headless Chromium: groups, a log axis, stages, settings that differ, and a narrow screen."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from viewer_rows import rollout, write_run

from jaxrl_llm.eval.viewer.folders import find
from jaxrl_llm.eval.viewer.server import Pages
from jaxrl_llm.metrics.writers import Jsonl

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'jaxrl-llm[browser]'")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs of two stages whose learning rates differ, and a server of them."""
    top = tmp_path_factory.mktemp("runs")
    for name, rate in (("one", 0.1), ("two", 0.2)):
        even = [rollout("even", "x", 1.0), rollout("even", "y", 1.0, group=0)]
        tokens = {"streams": {"token": ["x", "y"], "entropy": [0.0, 2.5]}}
        mixed = [rollout("mixed", "xy", 0.0, **tokens), rollout("mixed", "y", 1.0), rollout("mixed", "z", None)]
        held = [rollout("held", "x", 0.0, kind="eval/heldout"), rollout("held", "y", 9.0, kind="eval/heldout")]
        folder = write_run(top / name, {1: even, 2: even, 8: [*held, *even, *mixed]})
        writer = Jsonl().open(folder, 8)
        for step in range(9, 13):
            row = {
                "reward/mean": 10.0 ** (step - 10),
                "loss/total": 10.5 - step,
                **{f"eval/heldout/{n}": 1.0 for n in ("greedy", "greedy_truncated", "prompts", "sampled")},
                "gap/mean": 0.15 * (step - 8) ** 2,
                "stage": float(step > 10),
                **dict.fromkeys((f"count/{n}" for n in range(60)), 1.0),  # as many as a real run has
            }
            writer.write(step, row)
        written = f"train.Run.tags = \\\n    ('same',\n     'a = {name}')\n\n# Parameters for train.Run:\nSEED = 0\n"
        (folder / "config.gin").write_text(f"from {name} import grpo\nLEARNING_RATE = {rate}\n{written}")
        (folder / "health.json").write_text(json.dumps({"time": 1000.0, "outcome": "ended"}))
    loop, started = asyncio.new_event_loop(), threading.Event()
    port: list[int] = []

    async def serve() -> None:
        runner = web.AppRunner(Pages(find([top])).application())
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        port.append(site._server.sockets[0].getsockname()[1])
        started.set()

    threading.Thread(target=lambda: (loop.create_task(serve()), loop.run_forever()), daemon=True).start()
    assert started.wait(60)
    yield f"http://127.0.0.1:{port[0]}"
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as running:
        if not found and not Path(running.chromium.executable_path).exists():
            pytest.skip("no Chromium on the path: install it, or run `playwright install chromium`")
        with running.chromium.launch(executable_path=found, args=["--no-sandbox"]) as opened:
            yield opened


def opened(browser, address: str, wanted: str, width: int = 1200):
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    page.wait_for_selector(wanted, timeout=60_000)
    return page


def test_curves_stand_in_groups_with_their_range_a_log_axis_and_the_stages(url, browser):
    page = opened(browser, f"{url}/?view=curves&runs=one&metrics=loss/total,reward/mean&log=1", ".chart")
    assert page.locator(".charts h3").all_inner_texts() == ["loss", "reward"]
    loss, reward = page.locator(".chart").all()
    assert "-1.500" in loss.inner_text() and "not positive: linear" in loss.inner_text()
    assert "0.100 … 100" in reward.inner_text()  # 10 ** -1 to 10 ** 2
    ticks = reward.locator("svg text[text-anchor=end]").all_text_contents()
    assert {"0.1", "1", "10", "100"} <= set(ticks)
    assert reward.locator("line.stage").count() == 1  # the second stage begins with step 11


def test_the_settings_of_two_runs_that_differ_are_listed(url, browser):
    page = opened(browser, f"{url}/?view=curves&runs=one,two&metrics=reward/mean&diff=1", ".diff")
    assert page.locator(".diff summary").inner_text() == "2 settings differ"  # imports are none
    assert page.locator(".diff tbody tr").all_inner_texts() == [
        "LEARNING_RATE\t0.1\t0.2",
        "train.Run.tags\t('same', 'a = one')\t('same', 'a = two')",  # written over several lines
    ]


@pytest.mark.parametrize("way", [".runs th a", "#views a:has-text('rollouts')"])
def test_a_run_opens_at_the_most_mixed_group_of_its_newest_step(way, url, browser):
    page = opened(browser, url, ".runs a")
    assert page.locator(".state.good").first.inner_text() == "finished"
    page.locator(way).first.click()
    page.wait_for_selector(".card", timeout=60_000)
    assert page.locator("select[name=step]").input_value() == "8"
    assert page.locator("a.group[aria-current] code").inner_text() == "mixed"  # and not the held-out one
    assert page.locator(".card [data-t]").evaluate_all("all => all.map(x => x.className)") == ["", "s9"]  # by entropy
    assert "invalid" in page.locator(".cards").inner_text()


def test_the_list_of_runs_has_results_and_no_counts_beside_them(url, browser):
    page = opened(browser, url, ".runs a")
    heads = page.locator(".runs thead th").all_inner_texts()
    assert [head for head in heads if "/" in head] == ["heldout/greedy", "heldout/sampled"]


@pytest.mark.parametrize("view", ["runs", "curves", "rollouts", "compare"])
def test_pages_fit_a_screen_of_420_points(view, url, browser):
    page = opened(browser, f"{url}/?view={view}", "main > *", width=420)
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.parametrize(("view", "what"), [("curves&metrics=reward/mean", ".chart svg"), ("rollouts", ".card")])
def test_what_is_chosen_is_seen_on_a_narrow_screen_without_scrolling(view, what, url, browser):
    page = opened(browser, f"{url}/?view={view}", what, width=420)
    box = page.locator(what).first.bounding_box()
    assert box["y"] + min(box["height"], 120) <= 900  # the window's height


def test_a_short_log_axis_has_round_ticks(url, browser):
    page = opened(browser, f"{url}/?view=curves&runs=one&metrics=gap/mean&log=1", ".chart")
    assert page.locator(".chart svg text[text-anchor=end]").all_text_contents() == ["0.2", "0.5", "1", "2"]
