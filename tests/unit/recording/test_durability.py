# SPDX-License-Identifier: Apache-2.0
"""Files whole or not at all; training goes on; what is lost is counted and named once."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import (
    REPO,
    collects,
    counts_by_layer,
    every_load_file,
    is_complete_json,
    layer_pass,
    python,
    read,
)

from rl_insight_hooks import atomic, writer
from rl_insight_hooks.schema import decode_load_file

A, B = [1, 2, 3, 4], [4, 0, 0, 1]


def record_steps(rih, root, steps, counts=A, role="r"):
    for step in steps:
        with rih.record(root, step=step, role=role):
            layer_pass(counts)


# -- atomic writes ---------------------------------------------------------------------------------------


def test_mode_honours_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        atomic.write_atomic(tmp_path / "f", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_failed_write_leaves_the_old_file_and_no_temp(tmp_path, monkeypatch, failing):
    target = tmp_path / "f.json"
    atomic.write_atomic(target, b"old")

    def broken(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, failing, broken)
    with pytest.raises(OSError, match="No space"):
        atomic.write_atomic(target, b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_file_system_without_fsync_is_named_once(tmp_path, monkeypatch, caplog):
    def no_fsync(fd):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(atomic, "_no_fsync_warned", False)
    monkeypatch.setattr(atomic.os, "fsync", no_fsync)
    with caplog.at_level(logging.WARNING):
        atomic.write_atomic(tmp_path / "a", b"1")
        atomic.write_atomic(tmp_path / "b", b"2")
    assert (tmp_path / "b").read_bytes() == b"2"
    assert len(caplog.records) == 1


def test_write_that_is_short_is_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(atomic.os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    atomic.write_atomic(tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_sweep_takes_only_temp_files_of_the_dead(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    node = atomic.temp_name("a.json").split(".")[3]
    (tmp_path / f".a.json.{node}.{dead.pid}.0.tmp").write_text("x")
    (tmp_path / f".a.json.{node}.{os.getpid()}.0.tmp").write_text("x")
    (tmp_path / f".a.json.other-{node}.{dead.pid}.0.tmp").write_text("x")  # of another node
    (tmp_path / ".notes.tmp").write_text("x")
    assert atomic.sweep_temp_files(tmp_path) == 1
    assert (tmp_path / ".notes.tmp").exists()


_WRITE_FOREVER = """
import os
import sys
import rl_insight_hooks as rih
from tiny_run import layer_pass
root = sys.argv[1]
step = 0
while True:
    step += 1
    with rih.record(root, step=step % 7, role="r"):
        layer_pass([step, 2, 3, 4])
    if step == 1:
        os.write(1, b"ready\\n")  # one write: the parent writes to the same pipe
"""


@pytest.mark.slow
def test_200_kills_leave_only_whole_files(tmp_path):
    """SIGKILL at random moments while writing: every file that is there parses and is complete."""
    rng = random.Random(7)
    env = {**os.environ, "PYTHONPATH": str(REPO / "tests/support")}
    seen = 0
    num_kills = 0
    # one process forks a child for every kill, so that torch is imported once
    forker = tmp_path / "forker.py"
    forker.write_text(
        "import os, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from tiny_run import torch_npu\n"
        "torch_npu()\n"
        "import rl_insight_hooks.session, rl_insight_hooks.integrations.torch_npu\n"
        f"CODE = {_WRITE_FOREVER!r}\n"
        "for line in sys.stdin:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        exec(CODE)\n"
        "    os.write(1, f'{pid}\\n'.encode())\n"
        "    os.waitpid(pid, 0)\n"
        "    os.write(1, b'reaped\\n')\n"
    )
    root = tmp_path / "data"
    process = subprocess.Popen(
        [sys.executable, str(forker), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=REPO,
    )
    try:
        for _ in range(200):
            process.stdin.write("go\n")
            process.stdin.flush()
            lines = sorted(process.stdout.readline().strip() for _ in range(2))
            assert lines[1] == "ready", lines
            pid = lines[0]
            time.sleep(rng.uniform(0.0, 0.03))
            os.kill(int(pid), signal.SIGKILL)
            num_kills += 1
            assert process.stdout.readline().strip() == "reaped"
            for path in root.rglob("*.json"):
                assert is_complete_json(path), path
                if path.name == "group_list.json":
                    load = decode_load_file(path.read_bytes())
                    assert all(sum(r.counts) == r.num_assignments > 0 for r in load.records)
                    seen += 1
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdin.close()
        process.stdout.close()
    assert num_kills == 200
    assert seen > 200


# -- disks that fail -------------------------------------------------------------------------------------


def test_full_disk_is_named_once_and_written_later(rih, npu, tmp_path, monkeypatch, caplog):
    real = atomic.os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "write", full)
    with caplog.at_level(logging.WARNING):
        record_steps(rih, tmp_path, range(1, 6))
        rih.flush()
    assert every_load_file(tmp_path) == []
    named = [r for r in caplog.records if "cannot write" in r.message]
    assert len(named) == 1
    monkeypatch.setattr(atomic.os, "write", real)
    record_steps(rih, tmp_path, [6])
    rih.flush()
    assert sorted(f.step for f in every_load_file(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert collects(tmp_path)["0"]["3"] == 6 * 4


def test_disk_that_stays_full_keeps_a_bounded_backlog(rih, npu, tmp_path, monkeypatch, session):
    monkeypatch.setattr(writer, "MAX_UNWRITTEN_FILES", 4)

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(atomic.os, "write", full)
        record_steps(rih, tmp_path, range(1, 11))
        rih.flush()
        assert session.writer.num_unwritten == 4
    record_steps(rih, tmp_path, [11])
    rih.flush()
    lost = {k: v for k, v in read(tmp_path, 11, "r").dropped.items() if "lost" in k}
    # collects is one file, rewritten: of ten step files and it, four wait, the others are lost
    assert sum(lost.values()) >= 7


def test_folder_deleted_in_the_middle_of_a_run(rih, npu, tmp_path):
    root = tmp_path / "data"
    record_steps(rih, root, [1])
    rih.flush()
    shutil.rmtree(root)
    record_steps(rih, root, [2])
    rih.flush()
    assert [f.step for f in every_load_file(root)] == [2]


def test_path_below_a_file_does_not_stop_training(rih, npu, tmp_path):
    (tmp_path / "file").write_text("x")
    record_steps(rih, tmp_path / "file" / "below", [1])
    assert rih.flush()
    assert (tmp_path / "file").read_text() == "x"


def test_slow_fsync_does_not_slow_the_region(rih, npu, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.os, "fsync", lambda fd: time.sleep(0.2))
    record_steps(rih, tmp_path, [1])  # warm-up
    began = time.perf_counter()
    record_steps(rih, tmp_path, range(2, 7))
    assert time.perf_counter() - began < 0.2 * 5
    rih.flush()
    assert len(every_load_file(tmp_path)) == 6


def test_writer_that_is_behind_drops_and_counts(rih, npu, tmp_path, monkeypatch, session):
    import threading

    gate = threading.Event()
    real = writer.write_atomic
    monkeypatch.setattr(writer, "MAX_QUEUED_REGIONS", 3)
    monkeypatch.setattr(writer, "write_atomic", lambda *a: (gate.wait(30), real(*a)))
    record_steps(rih, tmp_path, range(1, 9))
    gate.set()
    rih.flush()
    record_steps(rih, tmp_path, [9])
    rih.flush()
    num_written = len(every_load_file(tmp_path))
    dropped = sum(read(tmp_path, 9, "r").dropped.values())
    assert num_written + dropped == 9
    assert dropped == 5


def test_clock_that_goes_back(rih, npu, tmp_path, monkeypatch):
    times = iter([1000.0, 900.0, 800.0, 700.0])
    monkeypatch.setattr(time, "time", lambda: next(times, 600.0))
    record_steps(rih, tmp_path, [1])
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert load.ended_unix_s >= load.started_unix_s
    assert counts_by_layer(load) == [A]


# -- processes -------------------------------------------------------------------------------------------


def test_new_run_keeps_the_old_collects_under_another_name(rih, npu, tmp_path, caplog):
    old = tmp_path / "eplb_token_collects_0.json"
    tmp_path.mkdir(exist_ok=True)
    old.write_text('{"0": {"0": 5}}')
    with caplog.at_level(logging.WARNING):
        record_steps(rih, tmp_path, [1])
        rih.flush()
    assert collects(tmp_path)["0"] == {"0": 1, "1": 2, "2": 3, "3": 4}
    (kept,) = tmp_path.glob("eplb_token_collects_0.json.*.old")
    assert kept.read_text() == '{"0": {"0": 5}}'
    assert any(kept.name in r.message for r in caplog.records)


def test_resume_goes_on_with_the_old_collects(rih, npu, tmp_path):
    (tmp_path / "eplb_token_collects_0.json").write_text('{"0": {"0": 5, "3": 1}, "9": {"1": 2}}')
    rih.configure(resume=True)
    record_steps(rih, tmp_path, [1])
    rih.flush()
    assert collects(tmp_path) == {"0": {"0": 6, "1": 2, "2": 3, "3": 5}, "9": {"1": 2}}


def test_torn_collects_cannot_be_resumed_and_are_kept(rih, npu, tmp_path, caplog):
    (tmp_path / "eplb_token_collects_0.json").write_text('{"0": {"0"')
    rih.configure(resume=True)
    with caplog.at_level(logging.WARNING):
        record_steps(rih, tmp_path, [1])
        rih.flush()
    assert collects(tmp_path)["0"]["3"] == 4
    assert len(list(tmp_path.glob("*.old"))) == 1


def test_two_processes_of_one_rank_do_not_overwrite_each_other(rih, npu, tmp_path):
    record_steps(rih, tmp_path, [1])
    rih.flush()
    code = """
        import sys, time
        import rl_insight_hooks as rih
        from tiny_run import layer_pass
        with rih.record(sys.argv[1], step=1, role="r"):
            layer_pass([9, 9, 9, 9])
            print("in", flush=True)
            sys.stdin.readline()
        rih.flush()
    """
    # a process that began before the other one's file was written, and ends after it
    import textwrap

    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO / "tests/support")},
    )
    assert process.stdout.readline().strip() == "in"
    record_steps(rih, tmp_path, [2, 1], counts=B)
    rih.flush()
    _, err = process.communicate("go\n", timeout=60)
    assert process.returncode == 0, err
    assert counts_by_layer(read(tmp_path, 1, "r")) == [B]
    (conflict,) = (tmp_path / "step_1/r/rank0").glob("group_list.conflict-*.json")
    assert counts_by_layer(decode_load_file(conflict.read_bytes())) == [[9, 9, 9, 9]]
    assert "two processes of rank 0" in err


def test_exit_in_the_middle_of_a_region_writes_what_there_is(tmp_path):
    python(
        """
        import sys
        import rl_insight_hooks as rih
        from tiny_run import layer_pass
        region = rih.record(sys.argv[1], step=1, role="r")
        region.__enter__()
        layer_pass([1, 2, 3, 4])
        """,
        args=[tmp_path],
    )
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [A]
    assert any("end of the process" in note for note in load.notes)


@pytest.mark.parametrize("host_handler", [False, True])
def test_sigterm_writes_and_dies_as_the_host_would(tmp_path, host_handler):
    done = python(
        f"""
        import os, signal, sys
        import rl_insight_hooks as rih
        from tiny_run import layer_pass
        def host(signum, frame):
            print("host handler", flush=True)
            os._exit(7)
        if {host_handler}:
            signal.signal(signal.SIGTERM, host)
        region = rih.record(sys.argv[1], step=1, role="r")
        region.__enter__()
        layer_pass([1, 2, 3, 4])
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        """,
        args=[tmp_path],
        check=False,
    )
    assert done.returncode == (7 if host_handler else -signal.SIGTERM)
    assert ("host handler" in done.stdout) is host_handler
    assert counts_by_layer(read(tmp_path, 1, "r")) == [A]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_recording_process(tmp_path, method):
    """A fork inside a region (a data loader) writes nothing; a child that records does so for itself."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import multiprocessing, os, sys
import rl_insight_hooks as rih
from tiny_run import layer_pass

def loader():
    layer_pass([9, 9, 9, 9])

def ranked(root):
    os.environ["RANK"] = "1"
    with rih.record(root, step=1, role="r"):
        layer_pass([0, 5, 0, 0])
    assert rih.flush()

if __name__ == "__main__":
    import torch
    torch.set_num_threads(1)
    context = multiprocessing.get_context({method!r})
    root = sys.argv[1]
    with rih.record(root, step=1, role="r"):
        layer_pass([1, 2, 3, 4])
        for target, args in ((loader, ()), (ranked, (root,))):
            child = context.Process(target=target, args=args)
            child.start()
            child.join(60)
            assert child.exitcode == 0, child.exitcode
        layer_pass([1, 0, 0, 0])
    assert rih.flush()
"""
    )
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "data")],
        check=True,
        timeout=120,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO / "tests/support")},
    )
    files = {f.rank: f for f in every_load_file(tmp_path / "data")}
    assert sorted(files) == [0, 1]
    assert sum(map(sum, counts_by_layer(files[0]))) == 11
    assert counts_by_layer(files[1]) == [[0, 5, 0, 0]]


@pytest.mark.slow
def test_ten_thousand_regions_in_flat_memory(rih, npu, tmp_path, session):
    import resource

    rih.configure(collects=False)

    def run(steps):
        for step in steps:
            with rih.record(tmp_path, step=step % 5, role="r"):
                npu.npu_grouped_matmul([x], [w], group_list=counts, group_list_type=1, group_type=0)
            if step % 500 == 0:
                rih.flush()
        rih.flush()

    import torch

    x, w, counts = torch.ones(10, 4), torch.ones(4, 4, 6), torch.tensor(A)
    run(range(1000))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_slots = len(session.recorder.pool.slots)
    run(range(1000, 10_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 20_000
    assert len(session.recorder.pool.slots) == num_slots
    assert counts_by_layer(read(tmp_path, 9999 % 5, "r")) == [A]


def test_stated_memory_of_the_recorder(rih, npu, tmp_path, session):
    """rows x width x 8 bytes, a row for each (layer, phase), in chunks of 64 rows (docs/overhead.md)."""
    with rih.record(tmp_path, step=1, role="r"):
        for _ in range(70):
            layer_pass(A)
    assert session.recorder.pool.nbytes == 2 * 64 * 4 * 8


def test_taking_out_and_watching_again_takes_no_more_rows(rih, npu, tmp_path, session):
    from tiny_moe import TinyMoe

    model = TinyMoe(vocab=8, hidden=4, width=4, num_layers=3, num_experts=4, top_k=2)
    num_slots = set()
    for step in range(5):
        rih.watch(model)
        with rih.record(tmp_path, step=step, role="r"):
            layer_pass(A)
        rih.uninstall()
        num_slots.add(len(session.recorder.pool.slots))
    assert len(num_slots) == 1


def test_readonly_folder(rih, npu, tmp_path):
    root = tmp_path / "readonly"
    root.mkdir()
    root.chmod(0o555)
    try:
        if os.access(root, os.W_OK):  # root may write everywhere: take the folder's name instead
            root.rmdir()
            Path(root).write_text("not a folder")
        record_steps(rih, root, [1])
        assert rih.flush()
    finally:
        if root.is_dir():
            root.chmod(0o755)
    assert counts_by_layer_or_none(root) is None


def counts_by_layer_or_none(root):
    files = every_load_file(root) if root.is_dir() else []
    return counts_by_layer(files[0]) if files else None


def test_no_two_roles_share_a_folder_and_each_name_fits_the_file_system():
    from rl_insight_hooks.paths import role_dir

    roles = ["a/b", "a_b", "a\\b", ".", "..", "", "x" * 300, "x" * 301, "\u6f14" * 200]
    folders = [role_dir(role) for role in roles]
    assert len(set(folders)) == len(roles)
    assert role_dir("a_b") == "a_b"
    for folder in folders:
        assert 0 < len(folder.encode()) <= 255
        assert "/" not in folder
        assert folder not in (".", "..")


def test_roles_with_odd_names_are_written_and_read_by_their_names(rih, npu, tmp_path):
    from rl_insight_hooks.report.load import load

    roles = ("a/b", "a_b", "x" * 300)
    for role in roles:
        with rih.record(tmp_path, step=1, role=role):
            layer_pass([1, 2])
    rih.flush()
    assert set(load(tmp_path).roles) == set(roles)


def test_flush_writes_itself_where_no_thread_can_start(rih, npu, tmp_path, monkeypatch):
    """As at interpreter exit since Python 3.12."""
    import threading

    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass([1, 2])
    assert rih.flush()
    (file,) = every_load_file(tmp_path)
    assert [record.counts for record in file.records] == [[1, 2]]
