# SPDX-License-Identifier: Apache-2.0
"""collect over a real sshd: three hosts, one refusing, one with a torn file; rsync and tar."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from collect_data import make_file, tree, write_collects, write_node, write_step_file

from rl_insight_hooks.report.collect.gather import gather
from rl_insight_hooks.report.collect.node import INCLUDE
from rl_insight_hooks.report.collect.ssh_address import parse_address
from rl_insight_hooks.report.collect.ssh_transport import SshSettings, SshSource

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
WAYS = [pytest.param(True, id="rsync", marks=needs_rsync), pytest.param(False, id="tar")]


@pytest.fixture
def sources(sshd):
    def make(*addresses: str, use_rsync: bool = True) -> list[SshSource]:
        settings = SshSettings(args=("-F", str(sshd.config)), timeout_s=60, use_rsync=use_rsync)
        return [SshSource(parse_address(text), INCLUDE, settings) for text in addresses]

    return make


@pytest.mark.parametrize("use_rsync", WAYS)
def test_three_hosts_one_refusing_one_with_a_torn_file(sources, tmp_path, use_rsync):
    one, two = tmp_path / "one", tmp_path / "two with space"
    write_node(one, range(4), range(5))
    write_node(two, range(4, 8), range(5))
    torn = write_step_file(two, 3, 6, make_file(3, 6)[:-20])
    (one / "notes.txt").write_text("no load file")
    (one / "step_1/actor_update/rank0/.group_list.json.77.0.tmp").write_text("half a fi")
    home = tmp_path / "home"
    addresses = (f"alpha:{one}", f"beta:{two}", f"refusing:{one}")

    report = gather(sources(*addresses, use_rsync=use_rsync), home)

    expected = tree(one) | tree(two)
    del expected["notes.txt"], expected[torn.relative_to(two).as_posix()]
    assert tree(home) == expected
    alpha, beta, refusing = report.sources
    assert (alpha.status, alpha.num_copied, alpha.broken) == ("ok", 20, {})
    assert (beta.status, beta.num_copied) == ("ok", 19)
    assert list(beta.broken) == ["step_3/actor_update/rank6/group_list.json"]
    assert "cut off" in beta.broken["step_3/actor_update/rank6/group_list.json"]
    assert refusing.status == "failed"
    assert "Permission denied" in refusing.message
    assert "BatchMode=yes" in refusing.fix
    assert not report.is_complete
    # mtimes come along: they say what is newer
    path = "step_0/actor_update/rank0/group_list.json"
    assert (home / path).stat().st_mtime_ns == (one / path).stat().st_mtime_ns

    # the torn file is mended and a step ran again: only these two are copied
    write_step_file(two, 3, 6)
    write_step_file(one, 4, 2, ended=200.0)
    again = gather(sources(*addresses[:2], use_rsync=use_rsync), home)
    assert (again.num_new, again.num_updated, again.num_identical) == (1, 1, 38)
    assert [result.num_copied for result in again.sources] == [1, 1]
    assert again.is_complete
    assert (home / "step_4/actor_update/rank2/group_list.json").read_bytes() == make_file(
        4, 2, ended=200.0
    )
    assert not list(home.glob(".collect-*"))


def test_rsync_is_what_copies_where_both_sides_have_it(sources, tmp_path, monkeypatch):
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    write_node(tmp_path / "one", range(2), range(2))
    monkeypatch.setattr(SshSource, "_copy_by_tar", lambda *_: pytest.fail("tar was used"))
    report = gather(sources(f"alpha:{tmp_path}/one", f"beta:{tmp_path}"), tmp_path / "home")
    assert report.sources[0].num_copied == 4


def test_a_host_that_is_not_there_and_a_folder_that_is_not(sources, tmp_path):
    write_node(tmp_path / "one", [0], [1])
    started = time.monotonic()
    report = gather(
        sources(f"closed:{tmp_path}/one", f"alpha:{tmp_path}/none", f"beta:{tmp_path}/one"),
        tmp_path / "home",
    )
    closed, missing, good = report.sources
    assert "refused" in closed.message
    assert "no folder" in missing.message
    assert f"{tmp_path}/none" in missing.message
    assert (good.status, closed.status, missing.status) == ("ok", "failed", "failed")
    assert not report.is_complete
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("use_rsync", WAYS)
def test_conflicts_are_kept_apart_and_equal_files_come_once(sources, tmp_path, use_rsync):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write_step_file(folder, 1, 0)
    write_collects(one, 3, '{"0": {"0": 1}}')
    write_collects(two, 3, '{"0": {"0": 9}}')
    home = tmp_path / "home"
    names = (f"alpha:{one}", f"beta:{two}")

    for _ in range(2):  # the second time nothing moves, and the conflict is still named
        report = gather(sources(*names, use_rsync=use_rsync), home)
        (conflict,) = report.conflicts
        assert conflict.path == "eplb_token_collects_3.json"
        kept = {source: (home / path).read_text() for source, path in conflict.kept_as.items()}
        assert kept == {names[0]: '{"0": {"0": 1}}', names[1]: '{"0": {"0": 9}}'}
        assert not (home / "eplb_token_collects_3.json").exists()
        assert len(tree(home)) == 3
        assert not report.is_complete
    assert [result.num_copied for result in report.sources] == [0, 0]


def test_a_newer_file_at_home_stays(sources, tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    write_node(tmp_path / "two", [1], [1])
    names = (f"alpha:{one}", f"beta:{tmp_path}/two")
    theirs = write_collects(one, 0, '{"0": {"0": 1}}')
    ours = write_collects(home, 0, '{"0": {"0": 5}}')
    now = time.time()
    os.utime(theirs, (now - 100, now - 100))
    report = gather(sources(*names), home)
    assert report.older == ["eplb_token_collects_0.json"]
    assert ours.read_text() == '{"0": {"0": 5}}'

    # theirs is newer now, but torn: ours stays
    theirs.write_text('{"0": {"0"')
    os.utime(theirs, (now + 100, now + 100))
    report = gather(sources(*names), home)
    assert ours.read_text() == '{"0": {"0": 5}}'
    assert not report.is_complete

    # newer and whole
    theirs.write_text('{"0": {"0": 6}}')
    os.utime(theirs, (now + 200, now + 200))
    report = gather(sources(*names), home)
    assert ours.read_text() == '{"0": {"0": 6}}'
    assert report.num_updated == 1
    assert report.is_complete


def test_the_same_folder_on_this_machine_needs_no_copy(sources, tmp_path):
    one = tmp_path / "one"
    write_node(one, range(2), range(2))
    old = time.time() - 60
    for path in one.rglob("*.json"):
        os.utime(path, (old, old))
    report = gather(sources(f"alpha:{one}", f"beta:{one}"), tmp_path / "home")
    assert report.shared_folder == str(one)
    assert not (tmp_path / "home").exists()


def test_nothing_is_ever_asked(sshd, tmp_path, monkeypatch):
    """A host whose key is not known: ssh would ask; a program that answers for the user is there, and is not run."""
    asked = tmp_path / "asked"
    answer = tmp_path / "askpass"
    answer.write_text(f"#!/bin/sh\ntouch {asked}\necho yes\n")
    answer.chmod(0o755)
    monkeypatch.setenv("SSH_ASKPASS", str(answer))
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
    monkeypatch.setenv("DISPLAY", ":0")
    config = tmp_path / "config"
    text = sshd.config.read_text().replace("accept-new", "ask")
    config.write_text(text.replace(f"{sshd.folder}/known_hosts", f"{tmp_path}/known_hosts"))
    write_node(tmp_path / "one", [0], [1])
    settings = SshSettings(args=("-F", str(config)), timeout_s=60)
    source = SshSource(parse_address(f"alpha:{tmp_path}/one"), INCLUDE, settings)
    (result,) = gather([source], tmp_path / "home").sources
    assert result.status == "failed"
    assert "Host key verification failed" in result.message
    assert "StrictHostKeyChecking=accept-new" in result.fix
    assert not asked.exists()


def test_names_with_spaces_quotes_and_backslashes(sources, tmp_path):
    one = tmp_path / 'it\'s $HOME; "x"'
    path = one / "step_1" / "a role\\with 'quotes' $(x) -rf" / "rank0" / "group_list.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(make_file(1, 0))
    for use_rsync in (True, False):
        home = tmp_path / f"home{use_rsync}"
        # a second source with the same file forces the way that hashes first
        other = tmp_path / "other"
        shutil.copytree(one, other, dirs_exist_ok=True)
        report = gather(sources(f"alpha:{one}", f"beta:{other}", use_rsync=use_rsync), home)
        assert tree(home) == tree(one)
        assert report.num_identical == 1
        assert report.is_complete


def test_the_command_line(sshd, tmp_path):
    one, two, home = tmp_path / "one", tmp_path / "two", tmp_path / "home"
    write_node(one, [0, 1], [1, 2], world_size=4)
    write_node(two, [2, 3], [1, 2], world_size=4)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# two of them\nalpha:{one}\nbeta  # in the default folder\n")
    command = [
        *(sys.executable, "-m", "rl_insight_hooks.report.main", "collect"),
        *("--hosts", str(hosts), "--path", str(two), "--ssh-config", str(sshd.config)),
        *("-o", str(home), "--json"),
    ]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )

    done = run()
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["num_new"], said["problems"]) == (8, [])
    assert tree(home) == tree(one) | tree(two)

    done = run("--ssh", f"refusing:{one}")
    assert done.returncode == 4
    said = json.loads(done.stdout)
    assert [source["status"] for source in said["sources"]].count("failed") == 1
    assert "Permission denied" in done.stdout
    assert "Traceback" not in done.stderr

    done = subprocess.run(
        [*command[:4], f"--ssh=closed:{one}", "--ssh-config", str(sshd.config), "-o", str(home)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no source delivered a file" in done.stderr
