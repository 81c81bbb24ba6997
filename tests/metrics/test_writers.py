"""Writers: what was written can be read back, and a resumed run shows no step twice."""

import io
import json
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from jaxrl_llm import train
from jaxrl_llm.metrics.console import FIRST_STEP, Console, first_step, short
from jaxrl_llm.metrics.writers import Jsonl, TensorBoard, WandB, Writers
from jaxrl_llm.protocols import Writer


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def board(folder):
    """What TensorBoard's own reader shows of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "images": 0})
    events.Reload()
    return events


def scalars(folder, name):
    return [(event.step, event.value) for event in board(folder).Scalars(name)]


def texts(folder, tag):
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in board(folder).Tensors(f"{tag}/text_summary")]


def test_jsonl_rows_are_on_disk_when_the_call_returns(tmp_path):
    writer = Jsonl().open(tmp_path / "run", None)
    writer.write(1, {"reward/mean": 0.25})
    writer.write(2, {"reward/mean": float("nan"), "loss/total": float("-inf")})
    writer.rollouts(2, [{"id": "a", "tokens": np.arange(2, dtype=np.int32), "reward": np.float32(0.5)}])
    assert rows(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": "NaN", "loss/total": "-Infinity"},
    ]
    assert rows(tmp_path / "run" / "rollouts.jsonl") == [{"step": 2, "id": "a", "tokens": [0, 1], "reward": 0.5}]


def test_a_resumed_run_drops_rows_after_the_restored_step_and_the_torn_line(tmp_path):
    writer = Jsonl().open(tmp_path, None)
    for step in range(5):
        writer.write(step, {"x": 10.0 + step})
        writer.rollouts(step, [{"id": "a"}, {"id": "b"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x": 1')
    resumed = Jsonl().open(tmp_path, 2)
    resumed.write(3, {"x": 13.0})
    assert [(r["step"], r["x"]) for r in rows(tmp_path / "metrics.jsonl")] == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert [r["step"] for r in rows(tmp_path / "rollouts.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert {f.name for f in tmp_path.iterdir()} == {"metrics.jsonl", "rollouts.jsonl"}


def test_a_run_that_starts_again_without_a_checkpoint_starts_its_files_again(tmp_path):
    Jsonl().open(tmp_path, None).write(0, {"x": 1.0})
    Jsonl().open(tmp_path, None).write(0, {"x": 2.0})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 0, "x": 2.0}]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_names_the_file_and_what_to_do(tmp_path):
    writer = Jsonl().open(tmp_path, None)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*free space, and start the run again.*metrics\.jsonl"):
        writer.write(1, {"x": 1.0})


def test_tensorboard_shows_scalars_documents_and_rollouts(tmp_path):
    writer = TensorBoard(rollouts_shown=1).open(tmp_path, None)
    writer.text("config", "```\nGRPO.clip_low = 0.2\n```")
    writer.write(1, {"loss/total": 0.5, "reward/mean": 1})
    sample = [{"id": "a7", "reward": 1.0, "response": "<b> 4 + 3\n= 7"}, {"id": "never shown"}]
    writer.rollouts(1, sample)
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "loss/total") == [(1, 0.5)]  # while the writer is open: a kill loses nothing
    assert scalars(folder, "reward/mean") == [(1, 1.0)]
    assert texts(folder, "config") == [(0, "```\nGRPO.clip_low = 0.2\n```")]
    shown = "**id** a7  **reward** 1.0\n\n**response**\n\n    <b> 4 + 3\n    = 7"
    assert texts(folder, "rollouts") == [(1, shown)]
    writer.close()


def test_a_resumed_run_shows_no_step_twice_on_tensorboard(tmp_path):
    folder = tmp_path / "tensorboard"
    writers = []
    for resume_step, last in ((None, 5), (3, 6), (4, 7)):  # killed twice, within the second that names an event file
        writer = TensorBoard().open(tmp_path, resume_step)
        writers.append(writer)
        if resume_step is None:
            writer.text("config", "a = 1")
        for step in range(0 if resume_step is None else resume_step + 1, last):
            writer.write(step, {"x": 100.0 * last + step})
            writer.rollouts(step, [{"id": str(step)}])
    assert scalars(folder, "x") == [(0, 500), (1, 501), (2, 502), (3, 503), (4, 604), (5, 705), (6, 706)]
    assert [step for step, _ in texts(folder, "rollouts")] == list(range(7))
    assert texts(folder, "config") == [(0, "a = 1")]
    for writer in writers:
        writer.close()


def test_a_torn_event_file_keeps_what_came_before_the_tear(tmp_path):
    writer = TensorBoard().open(tmp_path, None)
    writer.write(1, {"x": 1.0})
    writer.write(2, {"x": 2.0})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    resumed = TensorBoard().open(tmp_path, 2)
    resumed.write(3, {"x": 3.0})
    resumed.close()
    assert scalars(tmp_path / "tensorboard", "x") == [(1, 1.0), (3, 3.0)]


def test_a_metric_without_a_value_is_marked_on_the_board_and_warns_of_nothing(tmp_path, caplog, capfd):
    writer = TensorBoard().open(tmp_path, None)
    writer.write(1, {"eval/heldout/greedy": float("nan"), "loss/total": float("inf")})
    writer.close()
    ((step, value),) = scalars(tmp_path / "tensorboard", "eval/heldout/greedy")
    assert step == 1 and np.isnan(value) and scalars(tmp_path / "tensorboard", "loss/total") == [(1, float("inf"))]
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_run_that_starts_again_without_a_checkpoint_starts_its_board_again(tmp_path):
    for value in (1.0, 2.0):
        writer = TensorBoard().open(tmp_path, None)
        writer.text("config", f"a = {value}")
        writer.write(int(value), {"x": value})
        writer.close()
    assert scalars(tmp_path / "tensorboard", "x") == [(2, 2.0)]
    assert texts(tmp_path / "tensorboard", "config") == [(0, "a = 2.0")]


def test_no_metric_of_a_board_lies_beside_a_group_of_its_name(tmp_path):
    values = {
        "entropy": 1.5,
        "entropy/mean": 1.25,
        "logprob": -2.0,
        "compilations": 3.0,
        "compilations/step": 0.0,
        "stage": 1.0,
    }
    writer = TensorBoard().open(tmp_path, None)
    writer.write(1, values)
    writer.close()
    held = board(tmp_path / "tensorboard")
    tags = set(held.Tags()["scalars"])
    groups = {tag.partition("/")[0] for tag in tags if "/" in tag}
    assert not tags & groups and {"entropy/mean", "entropy/update", "compilations/total", "run/stage"} <= tags
    assert scalars(tmp_path / "tensorboard", "entropy/update") == [(1, 1.5)]
    assert scalars(tmp_path / "tensorboard", "entropy/mean") == [(1, 1.25)]


def test_a_board_has_a_dashboard_that_names_what_runs_write(tmp_path):
    TensorBoard().open(tmp_path, None).close()
    held = board(tmp_path / "tensorboard")
    layout = layout_pb2.Layout.FromString(held.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for part in layout.category for chart in part.chart}
    assert layout.category[0].title == "Does it learn"
    assert any(re.search(tag, "reward/mean") for tag in charts["reward"])
    assert any(re.search(tag, "eval/heldout/greedy") for tag in charts["held out"])
    assert not any(re.search(tag, "eval/heldout/greedy_length") for tag in charts["held out"])


STEP = {
    "reward/mean": 0.4125,
    "entropy/mean": 1.25,
    "kl/reference": 0.00002,
    "speed/tokens_per_s": 15300.0,
    "time/step_s": 2.0,
    "time/collect_s": 0.5,  # not shown: its parts are
    "time/sample_s": 0.5,
    "time/update_s": 1.4,
    "count/truncated": 3.0,
    "count/empty": 0.0,
}


def test_a_plain_line_shows_reward_entropy_kl_speed_times_and_counts(capsys, tmp_path):
    writer = Console(bar=False).open(tmp_path, None, 20)
    writer.write(0, {"eval/heldout/greedy": 0.25})
    writer.write(1, STEP)
    writer.write(2, {"eval/heldout/greedy": 0.5, **STEP})
    writer.close()
    line = "reward 0.412  entropy 1.250  kl 2.0e-05  tok/s 15.3k  2.00 s (sample 25%, update 70%)  truncated 3"
    assert capsys.readouterr().out.splitlines() == [
        "step 0/20  eval/heldout/greedy 0.250",
        f"step 1/20  {line}",
        FIRST_STEP,
        f"step 2/20  {line.replace('  2.00 s', '  eval/heldout/greedy 0.500  2.00 s')}",
        "trained to step 2/20 in 4 s; eval/heldout/greedy 0.250 -> 0.500",
        "counted: truncated 6",
    ]


def test_the_results_of_an_evaluation_are_printed_before_what_was_measured_beside_them():
    names = ("eval/a/greedy_length", "eval/a/greedy", "eval/a/sampled_truncated", "eval/a/sampled")
    assert Console().line(dict.fromkeys(names, 1.0)) == (
        "eval/a/greedy 1  eval/a/sampled 1  eval/a/greedy_length 1  eval/a/sampled_truncated 1"
    )


def test_a_first_step_is_called_healthy_only_where_it_is(capsys, tmp_path):
    Console(bar=False).open(tmp_path, None).write(1, {"reward/mean": 0.0, "reward/std": 0.0})
    assert "healthy" not in capsys.readouterr().out
    well = {"reward/std": 0.5, "entropy/mean": 1.25, "kl/reference": 0.0, "gap/mean": 1e-4, "loss/total": 0.02}
    assert first_step(well) == first_step({}) == FIRST_STEP
    unrewarded = {"reward/mean": 0.0, "entropy/mean": 5.7, "loss/total": 0.0, "count/invalid/mine": 4.0}
    assert first_step(unrewarded).startswith("look at the first step: every reward is invalid")
    assert first_step(well | {"count/invalid/mine": 1.0}) == FIRST_STEP
    said = first_step(well | {"reward/std": 0.0, "loss/total": 0.0})
    assert (
        said.startswith("look at the first step: reward/std is 0: all rewards are equal or invalid")
        and "healthy" not in said
    )
    for name, bad in (("entropy/mean", 1e-5), ("kl/reference", -0.5), ("gap/mean", 0.2), ("loss/total", float("nan"))):
        assert first_step(well | {name: bad}).startswith(f"look at the first step: {name} is {short(bad)}: ")


def test_a_resumed_run_is_not_told_of_its_first_step_and_prints_every_second_line(capsys, tmp_path):
    writer = Console(bar=False, every=2).open(tmp_path, 2)
    for step in (3, 4, 5):
        writer.write(step, {"reward/mean": 0.5, "loss/total": -0.25})
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 4  reward 0.500  loss -0.250",
        "trained from step 3 to step 5",
        "counted: nothing",
    ]


def test_the_end_says_what_rewards_and_held_out_results_became(capsys, tmp_path):
    writer = Console(bar=False, every=100).open(tmp_path, None, 40)
    writer.write(0, {"eval/heldout/greedy": 0.25, "eval/heldout/greedy_length": 9.0})
    for step in range(1, 41):  # rewards rise by 0.01 a step
        writer.write(step, {"reward/mean": 0.01 * step, "time/step_s": 2.0})
    writer.write(20, {"eval/heldout/greedy": 0.75})
    writer.write(40, {"eval/heldout/greedy": 0.5})
    writer.close()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        # 40 steps of 2 s; the means of the first and last tenth: (1 + 2 + 3 + 4) / 400 and (37 + 38 + 39 + 40) / 400
        "trained to step 40/40 in 80 s; reward 0.025 -> 0.385; eval/heldout/greedy 0.250 -> 0.500 (best 0.750 at step 20)",
        "counted: nothing",
    ]


@pytest.mark.parametrize(
    ("differing", "more", "said"),
    [
        (0.0, {}, "tokens compared 1500, differing 0"),
        (3.0, {}, "largest gap between sampler and learner 0.500"),
        (3.0, {"staleness/max": 2.0}, "largest gap between sampler and learner 0.500, of tokens up to 2 versions old"),
    ],
)
def test_the_end_says_how_far_the_samplers_log_probs_were_from_the_learners(capsys, tmp_path, differing, more, said):
    writer = Console(bar=False, every=100).open(tmp_path, None, None)
    first = {"gap/compared": 1000.0, "gap/differing": differing, "gap/max": differing / 6}
    second = {"gap/compared": 500.0, "gap/differing": 0.0, "gap/max": 0.0}
    for step, gaps in enumerate((first | more, {}, second)):
        writer.write(step + 1, {"loss/total": 1.0, **gaps})
    writer.close()
    assert capsys.readouterr().out.splitlines()[-2] == f"trained to step 3; {said}"


def test_a_bar_goes_on_from_the_restored_step_and_keeps_evaluations(monkeypatch, tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    writer = Console().open(tmp_path, 2, 4)
    writer.write(3, STEP)
    writer.write(3, {"eval/greedy": 1.0})
    writer.close()
    shown = terminal.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "2/4" in plain and "3/4" in plain and "reward 0.412" in plain
    assert "step 3/4  eval/greedy 1" in plain
    assert "\x1b[" in shown  # colours and a bar, on a terminal alone


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (87.0, "87"), (87.26, "87.3"), (-1.5, "-1.500"), (2.1e6, "2.1M"), (3e9, "3G"), (float("nan"), "nan")],
)
def test_numbers_are_said_shortly(value, said):
    assert short(value) == said


def test_a_console_that_never_prints_is_refused():
    with pytest.raises(ValueError, match=r"train\.Console\.every must be >= 1 \(got 0\)"):
        train.Console(every=0)


def test_writers_that_started_are_closed_where_another_fails(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        Writers.open([Console(bar=False), Jsonl()], tmp_path / "file" / "run", None)
    assert capsys.readouterr().out == "counted: nothing\n"  # what the console says when it is closed


@pytest.fixture
def wandb(monkeypatch):
    """A module that takes what wandb takes and notes it."""
    calls = []

    class Run:
        def __init__(self, **settings):
            calls.append(("init", settings))
            self.summary = {}

        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self):
            calls.append(("finish", self.summary))

    module = ModuleType("wandb")
    module.init = Run
    module.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_gets_one_run_that_a_resumed_one_rewinds(wandb, tmp_path):
    first = WandB(project="p").open(tmp_path / "run7", None)
    first.write(1, {"x": 1.0})
    first.rollouts(1, [{"id": "a", "reward": 0.5}, {"id": "b", "finish": "stop"}])
    first.text("config", "a = 1")
    first.close()
    settings = wandb[0][1]
    run_id = settings["id"]
    assert (settings["project"], settings["name"], settings["dir"]) == ("p", "run7", str(tmp_path / "run7"))
    assert wandb[1:] == [
        ("log", 1, {"x": 1.0}),
        ("log", 1, {"rollouts": (["id", "reward", "finish"], [["a", "0.5", ""], ["b", "", "stop"]])}),
        ("finish", {"config": "a = 1"}),
    ]
    wandb.clear()
    WandB(project="p").open(tmp_path / "run7", 10)
    assert wandb[0][1]["resume_from"] == f"{run_id}?_step=10"
    assert "id" not in wandb[0][1]


def test_a_missing_wandb_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxrl-llm\[wandb\]'"):
        WandB().open(tmp_path, None)


def test_writers_are_what_the_protocol_asks_for(tmp_path, wandb):
    for component in (Console(bar=False), Jsonl(), TensorBoard(), WandB()):
        writer = component.open(tmp_path, None)
        assert isinstance(writer, Writer)
        writer.close()
    assert issubclass(Writers, Writer)


WRITES = """
import importlib.util, pathlib, sys
from jaxrl_llm.metrics.writers import TensorBoard
writer = TensorBoard().open(pathlib.Path(sys.argv[1]), None)
writer.write(1, {"a": 2.0})
writer.close()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"tensorboardX", "torch"}), importlib.util.find_spec("torch").name)
"""


def test_tensorboard_is_written_without_pytorch_which_can_be_imported_after_it(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "['tensorboardX'] torch\n", done.stderr
    assert scalars(tmp_path / "tensorboard", "a") == [(1, 2.0)]
