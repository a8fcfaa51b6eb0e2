# SPDX-License-Identifier: Apache-2.0
"""watch: what it shows of a folder that grows, against plain loops."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
import typer
from collect_data import (
    NUM_EXPERTS,
    NUM_LAYERS,
    counts_of,
    write_collects,
    write_node,
    write_step_file,
)
from typer.testing import CliRunner

from rl_insight_hooks.errors import DataError, IncompleteDataError, UsageError
from rl_insight_hooks.packfile import pack_steps
from rl_insight_hooks.report import live
from rl_insight_hooks.report.commands.watch import watch
from rl_insight_hooks.report.live import Follower, direction
from rl_insight_hooks.report.live_render import snapshot_lines

app = typer.Typer()
app.command()(watch)


def max_over_mean(step: int, ranks, layer: int) -> float:
    sums = [0] * NUM_EXPERTS
    for rank in ranks:
        for expert, count in enumerate(counts_of(step, rank, layer)):
            sums[expert] += count
    return max(sums) / (sum(sums) / NUM_EXPERTS)


def test_worst_layers_are_those_of_the_sum_over_ranks(tmp_path):
    write_node(tmp_path, range(4), range(3), world_size=4)
    (view,) = Follower(tmp_path).poll().roles
    truth = {layer: max_over_mean(2, range(4), layer) for layer in range(NUM_LAYERS)}
    assert view.shown.step == 2
    assert [one.layer for one in view.shown.layers] == sorted(truth, key=lambda n: -truth[n])
    for one in view.shown.layers:
        assert one.max_over_mean == pytest.approx(truth[one.layer])
    worst = [max(max_over_mean(step, range(4), n) for n in range(NUM_LAYERS)) for step in range(3)]
    assert view.trend == pytest.approx(worst)
    assert view.steps == (0, 1, 2)


def test_an_unfinished_step_is_said_and_the_one_before_is_shown(tmp_path):
    write_node(tmp_path, range(4), [1, 2], world_size=4)
    write_node(tmp_path, [0, 2], [3], world_size=4)
    follower = Follower(tmp_path)
    snapshot = follower.poll()
    (view,) = snapshot.roles
    assert (view.shown.step, view.missing, view.newest_missing) == (2, (), (1, 3))
    assert snapshot.is_complete
    assert "step 3 is not finished: ranks 1, 3 missing so far" in "\n".join(
        snapshot_lines(snapshot, num_layers=3)
    )
    write_node(tmp_path, [1, 3], [3], world_size=4)
    (view,) = follower.poll().roles
    assert (view.shown.step, view.newest_missing) == (3, ())


def test_a_rank_that_stopped_is_missing(tmp_path):
    write_node(tmp_path, range(4), [1, 2], world_size=4)
    write_node(tmp_path, range(3), [3, 4, 5], world_size=4)
    snapshot = Follower(tmp_path).poll()
    (view,) = snapshot.roles
    assert view.shown.step == 4
    assert view.missing == (3,)
    assert not snapshot.is_complete
    assert "MISSING: rank 3 did not write step 4" in "\n".join(
        snapshot_lines(snapshot, num_layers=1)
    )


def test_a_poll_reads_only_what_is_new(tmp_path, monkeypatch):
    write_node(tmp_path, range(2), range(10), world_size=2)
    reads = []
    real = live.load
    monkeypatch.setattr(live, "load", lambda paths, **kw: reads.append(paths) or real(paths, **kw))
    follower = Follower(tmp_path)
    first = follower.poll()
    assert len(reads) == 10
    assert follower.poll() == first
    assert len(reads) == 10
    write_node(tmp_path, range(2), [10], world_size=2)
    assert follower.poll() != first
    assert len(reads) == 11
    write_step_file(tmp_path, 10, 0, ended=200.0, seed_rank=5)  # a rerun
    follower.poll()
    assert len(reads) == 12


def test_packed_steps_are_remembered_and_deleted_ones_forgotten(tmp_path):
    write_node(tmp_path, [0], range(6), world_size=1)
    follower = Follower(tmp_path)
    before = follower.poll()
    pack_steps(tmp_path, "actor_update", 0, range(4))
    assert not (tmp_path / "step_0").exists()
    assert follower.poll() == before
    shutil.rmtree(tmp_path / "packed")
    (view,) = follower.poll().roles
    assert view.steps == (4, 5)


def test_roles_collects_and_an_empty_folder(tmp_path):
    assert Follower(tmp_path / "none").poll().roles == ()
    write_collects(tmp_path, 0, '{"0": {"0": 30, "1": 10}}')
    write_collects(tmp_path, 1, '{"0": {"0": 30, "1": 50}}')
    (view,) = Follower(tmp_path).poll().roles
    assert view.shown.role == "rollout"
    assert view.shown.layers[0].num_assignments == 120
    assert view.shown.layers[0].max_over_mean == pytest.approx(1.0)
    assert view.shown.ranks == {0, 1}
    write_node(tmp_path, [0], [1], role="a", world_size=1)
    write_node(tmp_path, [0], [1], role="b", world_size=1)
    assert [v.shown.role for v in Follower(tmp_path).poll().roles] == ["a", "b"]
    assert [v.shown.role for v in Follower(tmp_path, role="b").poll().roles] == ["b"]


def test_a_torn_file_is_a_problem_not_an_end(tmp_path):
    write_node(tmp_path, range(2), [1, 2], world_size=2)
    path = write_step_file(tmp_path, 2, 1)
    path.write_bytes(path.read_bytes()[:40])
    snapshot = Follower(tmp_path).poll()
    assert any(str(path) in text for text in snapshot.problems)
    assert not snapshot.is_complete


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([1.0, 1.0, 1.0], ""),
        ([1.0, 1.0, 1.2, 1.2], "rising"),
        ([1.2, 1.2, 1.0, 1.0], "falling"),
        ([1.0, 1.1, 1.0, 1.1, 1.0], "steady"),
    ],
)
def test_direction(values, word):
    assert direction(values) == word


def test_once(tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path), "--once"])
    assert isinstance(result.exception, DataError)
    write_node(tmp_path, range(2), [1, 2], world_size=2)
    result = CliRunner().invoke(app, [str(tmp_path), "--once", "--top", "2"])
    assert result.exit_code == 0
    assert "actor_update  step 2" in result.stdout
    assert "1 more layers" in result.stdout
    assert "\x1b" not in result.stdout
    result = CliRunner().invoke(app, [str(tmp_path), "--once", "--json"])
    said = json.loads(result.stdout)
    assert said["roles"][0]["shown"]["ranks"] == [0, 1]
    write_node(tmp_path, [0], [3, 4], world_size=2)
    result = CliRunner().invoke(app, [str(tmp_path), "--once"])
    assert isinstance(result.exception, IncompleteDataError)
    for bad in (["--interval", "0"], ["--top", "0"]):
        result = CliRunner().invoke(app, [str(tmp_path), "--once", *bad])
        assert isinstance(result.exception, UsageError)


def test_prometheus_text(tmp_path):
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client is not installed"
    )
    data, target = tmp_path / "data", tmp_path / "moe.prom"
    write_node(data, range(2), [1, 2], world_size=2)
    result = CliRunner().invoke(app, [str(data), "--once", "--prometheus", str(target)])
    assert result.exit_code == 0, result.output
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(target.read_text())
        for sample in family.samples
    }
    role = ("role", "actor_update")
    assert samples["rl_insight_moe_step", (role,)] == 2
    assert samples["rl_insight_moe_ranks", (role,)] == 2
    for layer in range(NUM_LAYERS):
        value = samples["rl_insight_moe_max_over_mean", (("layer", str(layer)), role)]
        assert value == pytest.approx(max_over_mean(2, range(2), layer))
    result = CliRunner().invoke(app, [str(data), "--once", "--prometheus", str(tmp_path / "no/x")])
    assert isinstance(result.exception, UsageError)


def test_tensorboard_scalars(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    data, log = tmp_path / "data", tmp_path / "log"
    write_node(data, range(2), [1, 2, 3], world_size=2)
    write_node(data, [0], [4], world_size=2)  # not finished: not logged
    result = CliRunner().invoke(app, [str(data), "--once", "--tensorboard", str(log)])
    assert result.exit_code == 0, result.output
    events = EventAccumulator(str(log))
    events.Reload()
    found = {
        event.step: float(tensor_util.make_ndarray(event.tensor_proto))
        for event in events.Tensors("moe_load/actor_update/max_over_mean")
    }
    assert found == {
        step: pytest.approx(
            max(max_over_mean(step, range(2), layer) for layer in range(NUM_LAYERS)), rel=1e-5
        )
        for step in (1, 2, 3)
    }


RUN = [sys.executable, "-m", "rl_insight_hooks.report.main", "watch", "--interval", "0.1"]


def heed_ctrl_c():
    """A shell starts its background jobs with SIGINT ignored, and what these tests start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_on_terminal(data: pathlib.Path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RUN, str(data)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "60", "LINES": "12"},
        preexec_fn=heed_ctrl_c,
    )
    os.close(theirs)
    return process, ours


def read_until(fd: int, needle: str, seconds: float = 30.0) -> str:
    text, deadline = "", time.monotonic() + seconds
    while needle not in text and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.2)[0]:
            try:
                text += os.read(fd, 65536).decode()
            except OSError:
                break
    assert needle in text, text
    return text


def test_on_a_terminal_it_repaints_and_ctrl_c_leaves_it_clean(tmp_path):
    write_node(tmp_path, range(2), [1], world_size=2)
    process, fd = start_on_terminal(tmp_path)
    try:
        text = read_until(fd, "step 1")
        assert text.startswith("\x1b[?1049h")
        write_node(tmp_path, range(2), [2], world_size=2)
        read_until(fd, "step 2")
        process.send_signal(signal.SIGINT)
        text = read_until(fd, "\x1b[?1049l")
        assert "\x1b[?25h" in text  # the cursor is back
        assert process.wait(10) == 130
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        os.close(fd)


def test_without_a_terminal_it_appends_what_is_new(tmp_path):
    write_node(tmp_path, range(2), [1], world_size=2)
    process = subprocess.Popen(
        [*RUN, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_ctrl_c,
    )
    try:
        assert process.stdout is not None
        text = read_until(process.stdout.fileno(), "step 1")
        write_node(tmp_path, range(2), [2], world_size=2)
        text += read_until(process.stdout.fileno(), "step 2")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert "\x1b" not in text
        assert text.count("actor_update  step 1") == 1
    finally:
        process.kill()
        process.communicate()
