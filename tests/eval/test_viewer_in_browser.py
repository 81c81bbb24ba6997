"""The viewer's page in headless Chromium: what it shows, what it refuses to run, and how quick it is on 100,000 rollouts."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from viewer_rows import record, rollout, write_results, write_run

from jaxrl_llm.eval.viewer import procedural_run

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install 'jaxrl-llm[browser]'", exc_type=ImportError
)

ROLLOUTS = 100_000
HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><b>bold</b>'
THOUGHT = "<think>six and seven</think> 13"
STREAMS = {
    "token": ["<think>", "six and", " seven", "</think>", " 13"], "logprob": [-0.1, -3.5, -1.0, None, -0.2],
    "sampler_logprob": [-0.1, -3.0, -1.0, None, -0.25], "entropy": [0.0, 2.5, 1.0, None, 0.3], "advantage": [-1, 1, 1, None, 1],
}  # fmt: skip

TOLD = "<tool_response>\n132\n</tool_response><script>window.hacked = 3</script>"
PLAYED = {
    "branches": [
        {"prefix": "Add 47 and 85.", "finish": "stop", "turns": [[0, 9, 0], [30, 33, 2]], "pieces": [
            {"by": "policy", "text": "python(47 + 85)"}, {"by": "told", "text": TOLD}, {"by": "policy", "text": "It is 132."},
        ]},
        {"prefix": "Add 47 and 85.", "finish": "length", "turns": [[0, 9, 0], [20, 40, 1]], "pieces": [
            {"by": "copied", "text": "python(47 + 85)"}, {"by": "told", "text": "an edited answer"}, {"by": "policy", "text": "Hm, 130"},
        ]},
    ], "valid": True, "error": "", "rewards": {"game": 0.5}, "info": {"stop": "done", "calls": {"ok": 1}},
}  # fmt: skip

# Milliseconds from an action until the page has been drawn anew and painted.
TIMED = """async () => {
  const before = document.body.dataset.drawn, start = performance.now();
  ACTION;
  while (document.body.dataset.drawn === before) await new Promise(requestAnimationFrame);
  return performance.now() - start;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with playwright.sync_playwright() as running:
        if not found and not Path(running.chromium.executable_path).exists():
            pytest.skip("no Chromium on the path: install it, or run `playwright install chromium`")
        with running.chromium.launch(executable_path=found, args=["--no-sandbox"]) as opened:
            yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run, a short one with a hostile rollout and a chain of thought, and two results of one set."""
    top = tmp_path_factory.mktemp("shown")
    procedural_run.main([str(top / "long"), "--rollouts", str(ROLLOUTS), "--words", "30"])
    group = [rollout("sum", THOUGHT, 1.0, streams=STREAMS), rollout("sum", "14", 0.0)]
    played = [
        rollout("add", "It is 132.", 1.0, **PLAYED),
        rollout("add", "", None, **{**PLAYED, "valid": False, "error": "TimeoutError: step"}),
    ]
    write_run(top / "short", {1: group, 2: [rollout("bad", HOSTILE, 0.5, question=HOSTILE)]})
    write_run(top / "played", {1: played})
    for name, scores in (("before", (0.0, 1.0, 0.0)), ("after", (1.0, 1.0, 1.0))):
        write_results(top / name, [record(f"q{i}", 0, f"{name} {i}", score) for i, score in enumerate(scores)])
    return top


def crowded() -> float:
    """How much longer things may take because other work shares the processors; 1 on a machine of one's own."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Served:
    """The viewer as a user starts it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "jaxrl_llm.eval.viewer", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert self.process.stdout is not None
        self.url = next(m[0] for line in self.process.stdout if (m := re.search(r"http://127\.0\.0\.1:\d+", line)))

    def wait_for_index(self) -> None:
        stop = time.monotonic() + 120
        while time.monotonic() < stop:
            with urllib.request.urlopen(f"{self.url}/api/runs") as answer:
                if all(one["progress"] == 1 and one["rollouts"] for one in json.load(answer)):
                    return
            time.sleep(0.2)
        pytest.fail("the index is not complete after two minutes")

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    server = Served(folder)
    yield server
    with server.process:
        server.process.terminate()


@pytest.fixture
def page(browser, served):
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(20_000)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda r: problems.append(r.url) if not r.url.startswith(served.url) else None)
    yield opened
    context.close()
    assert not problems, "errors, or requests to other hosts"


def drawn(page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")


def test_the_first_paint_of_a_long_run_waits_for_no_index(browser, served, page):
    start = time.perf_counter()
    drawn(page, served.url)
    page.wait_for_selector("text=long")
    assert time.perf_counter() - start < 2 * crowded()
    assert page.locator("table.runs tbody tr").count() == 5


def test_steps_and_filters_of_a_long_run_change_at_once_within_a_gibibyte(served, page):
    served.wait_for_index()
    drawn(page, f"{served.url}/?view=rollouts&run=long&step=250")
    key = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
    fill = "const i = document.querySelector('%s'); i.value = '%s'; i.dispatchEvent(new Event('change'))"
    stepped = [page.evaluate(TIMED.replace("ACTION", key % name)) for name in "]]][["]
    assert page.locator("label:has-text('step') select").input_value() == "251"
    drawn(page, f"{served.url}/?view=rollouts&run=long")
    filtered = [
        page.evaluate(TIMED.replace("ACTION", fill % ("[data-search]", text)))
        for text in ("99999", "carry the", "never there", "")
    ]
    filtered += [page.evaluate(TIMED.replace("ACTION", fill % ("input[type=number]", low))) for low in ("0.5", "1.05")]
    print(f"load {crowded():.1f}, step {stepped} ms, filter {filtered} ms, server {served.peak_mib():.0f} MiB")
    assert statistics.median(stepped) < 300 * crowded() and statistics.median(filtered) < 300 * crowded()
    assert served.peak_mib() < 1024
    drawn(page, f"{served.url}/?view=rollouts&run=long&text=99999")
    assert page.locator("li .group").count() == 1 and "99999" in page.locator("mark").first.inner_text()


def test_a_rollout_with_script_tags_is_text(served, page):
    drawn(page, f"{served.url}/?view=rollouts&run=short&step=2")
    assert page.locator(".card .text").inner_text() == HOSTILE
    assert page.locator(".question .text").inner_text() == HOSTILE
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img, main b").count() == page.locator(".reference b").count()


def test_tokens_are_coloured_by_each_stream_and_tell_their_values(served, page):
    drawn(page, f"{served.url}/?view=rollouts&run=short&step=1&fold=0")
    seen = []
    for _ in range(5):
        page.keyboard.press("c")
        page.wait_for_function(
            "label => new URLSearchParams(location.search).get('colour') !== label", arg=seen[-1][0] if seen else None
        )
        page.wait_for_selector(".legend")
        classes = page.locator(".card").first.locator("[data-t]").evaluate_all("all => all.map(x => x.className)")
        seen.append((page.evaluate("new URLSearchParams(location.search).get('colour')"), classes))
    assert dict(seen) == {
        "logprob": ["", "s8", "s2", "", ""],  # 9 levels over 4 nats
        "sampler_logprob": ["", "s7", "s2", "", "s1"],
        "entropy": ["", "s9", "s5", "", "s1"],  # over 2 nats
        "advantage": ["n9", "p9", "p9", "", "p9"],  # over the largest of the group
        "gap": ["", "n9", "", "", "p1"],
    }
    page.locator("[data-t='1']").hover()
    assert "learner − sampler\t-0.5000" in page.locator("#tip").inner_text()


def test_branches_show_who_wrote_what(served, page):
    drawn(page, f"{served.url}/?view=rollouts&run=played&step=1&text=132")
    first, second = page.locator(".card").all()
    assert first.locator(".branch h4").all_inner_texts() == [
        "branch 1 of 2 · 2 turns · stop",
        "branch 2 of 2 · 2 turns · length",
    ]
    seen = {by: first.locator(f".branch > .{by}").all_inner_texts() for by in ("policy", "copied", "told")}
    assert seen["policy"] == ["python(47 + 85)", "It is 132.", "Hm, 130"] and seen["copied"] == ["python(47 + 85)"]
    assert seen["told"] == [TOLD, "an edited answer"] and page.evaluate("window.hacked") is None
    assert first.locator(".branch mark").all_inner_texts() == ["132", "132"]
    colours = {
        by: first.locator(f".branch > .{by}").first.evaluate(
            "x => [getComputedStyle(x).color, getComputedStyle(x).opacity].join()"
        )
        for by in ("policy", "copied", "told")
    }
    assert len(set(colours.values())) == 3
    assert "TimeoutError: step" in second.inner_text() and second.locator(".flag.invalid").count() == 1
    first.locator("summary", has_text="ended by done").click()
    assert "reward game" in first.inner_text()


def test_chains_of_thought_fold(served, page):
    drawn(page, f"{served.url}/?view=rollouts&run=short&step=1")
    card = page.locator(".card").first
    assert card.locator("details").get_attribute("open") is None and "13" in card.inner_text()
    page.keyboard.press("t")
    page.wait_for_selector(".card details[open]")
    assert "six and seven" in card.locator("details").inner_text()


def test_two_results_are_compared_on_their_prompts_and_the_address_keeps_what_is_seen(served, page):
    drawn(page, f"{served.url}/?view=compare&run_a=before&run_b=after")
    assert [x.split("\n") for x in page.locator("li .group").all_inner_texts()] == [
        ["q0", "0 → 1"],
        ["q2", "0 → 1"],
        ["q1", "1 → 1"],
    ]
    assert "0.667 ± 0.653" in page.locator(".summary").first.inner_text()  # 1.96 std(1, 0, 1) / sqrt(3)
    page.keyboard.press("j")
    page.wait_for_function("() => document.querySelector('.sides')?.innerText.includes('after 2')")
    other = page.context.new_page()
    drawn(other, page.url)
    assert other.locator(".sides").inner_text() == page.locator(".sides").inner_text()
    assert other.locator("[aria-current=true] code").inner_text() == "q2"
    page.go_back()
    page.wait_for_function("() => document.querySelector('.sides')?.innerText.includes('after 0')")


def test_a_filter_that_is_chosen_keeps_the_keyboard_and_the_form_follows_the_run(served, page):
    drawn(page, f"{served.url}/?view=rollouts&run=long&step=3")
    page.locator("select[name=run]").select_option("short")
    page.wait_for_function("() => document.querySelector('.card')?.innerText.includes('13')")
    assert page.locator("select[name=step] option").all_inner_texts() == ["all 2", "1", "2"]
    page.locator("select[name=step]").focus()
    page.locator("select[name=step]").select_option("2")
    page.wait_for_selector("code:has-text('bad')")
    assert page.evaluate("document.activeElement.name") == "step"


def test_a_smoothed_curve_is_the_mean_around_each_point_over_the_curve_itself(served, page):
    drawn(page, f"{served.url}/?view=curves&runs=long&metrics=reward/mean")
    heights = "() => [...document.querySelectorAll('.line')].map(l => l.getAttribute('d').match(/[\\d.]+ [\\d.]+/g).map(p => +p.split(' ')[1]))"
    (raw,) = page.evaluate(heights)
    page.locator("select[name='smooth over ']").select_option("5")
    page.wait_for_selector(".line.faint")
    faint, smooth = page.evaluate(heights)
    assert faint == raw and "smooth=5" in page.url
    expected = [np.mean(raw[max(i - h, 0) : i + h + 1]) for i in range(len(raw)) for h in [min(2, i, len(raw) - 1 - i)]]
    np.testing.assert_allclose(smooth, expected, atol=0.11)  # coordinates have one decimal


def test_a_point_of_a_curve_leads_to_its_rollouts(served, page):
    drawn(page, f"{served.url}/?view=curves&runs=short&metrics=reward/mean")
    box = page.locator(".chart svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.97, box["y"] + box["height"] / 2)
    page.wait_for_function("() => new URLSearchParams(location.search).get('step') === '2'")
    page.wait_for_selector("code:has-text('bad')")
