# SPDX-License-Identifier: Apache-2.0
"""collect over a real local Ray cluster of four raylets with separate data folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from collect_data import make_file, tree, write_collects, write_node, write_step_file

import ray
from rl_insight_hooks.report.collect.gather import gather
from rl_insight_hooks.report.collect.node import INCLUDE
from rl_insight_hooks.report.collect.ray_transport import (
    NodeTasks,
    RaySource,
    fill_path,
    list_nodes,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STEPS = 20
RANKS_PER_NODE = 16


def sources_of(template: str, batch_bytes: int = 8 << 20) -> list[RaySource]:
    found = []
    for where in list_nodes(ray):
        tasks = NodeTasks(ray, where, timeout_s=60)
        found.append(RaySource(tasks, where, fill_path(template, where), INCLUDE, batch_bytes))
    return found


def slots() -> dict[str, str]:
    """Name of each node by its label "slot"."""
    return {
        dict(where.labels)["slot"]: where.name
        for where in list_nodes(ray)
        if "slot" in dict(where.labels)
    }


def node_folders(tmp_path, steps=range(NUM_STEPS)):
    """One folder per raylet, by node id: what is node-local on a real cluster."""
    folders = {}
    for where in list_nodes(ray):
        slot = dict(where.labels).get("slot")
        if slot is not None:
            folder = tmp_path / where.node_id / "load"
            first = int(slot) * RANKS_PER_NODE
            write_node(folder, range(first, first + RANKS_PER_NODE), steps)
            folders[slot] = folder
    return folders


def test_everything_comes_home_though_no_cpu_is_free(cluster, tmp_path):
    folders = node_folders(tmp_path)
    assert len(folders) == 4
    home = tmp_path / "home"
    seen = []

    started = time.monotonic()
    report = gather(
        sources_of(f"{tmp_path}/{{node_id}}/load"),
        home,
        progress=lambda done, total: seen.append((done, total)),
    )
    print(f"collected {report.num_new} files in {time.monotonic() - started:.2f} s")

    expected = {}
    for folder in folders.values():
        expected |= tree(folder)
    assert len(expected) == 4 * RANKS_PER_NODE * NUM_STEPS
    assert tree(home) == expected
    assert report.is_complete
    assert report.num_new == len(expected)
    assert seen[-1] == (len(expected), len(expected))
    statuses = sorted(result.status for result in report.sources)
    assert statuses == ["empty", "ok", "ok", "ok", "ok"]  # the head node has no data

    # again: nothing is copied, nothing changes
    again = gather(sources_of(f"{tmp_path}/{{node_id}}/load"), home)
    assert (again.num_new, again.num_updated, again.num_identical) == (0, 0, len(expected))
    assert all(result.num_copied == 0 for result in again.sources)
    assert again.is_complete


def test_conflicts_torn_and_identical_files(cluster, tmp_path):
    folders = node_folders(tmp_path, steps=())
    names = slots()
    for slot in "0123":
        folders[slot] = tmp_path / _node_id(names[slot]) / "load"
    same = make_file(1, 0)
    write_step_file(folders["0"], 1, 0, same)
    write_step_file(folders["1"], 1, 0, same)
    write_collects(folders["0"], 5, '{"0": {"0": 1, "1": 2}}')
    write_collects(folders["1"], 5, '{"0": {"0": 7, "1": 8}}')
    write_step_file(folders["2"], 1, 9, make_file(1, 9)[:100])
    write_step_file(folders["3"], 1, 10)
    home = tmp_path / "home"

    report = gather(sources_of(f"{tmp_path}/{{node_id}}/load"), home)

    at_home = tree(home)
    assert at_home.pop("step_1/actor_update/rank0/group_list.json") == same
    assert at_home.pop("step_1/actor_update/rank10/group_list.json") == make_file(1, 10)
    (conflict,) = report.conflicts
    assert conflict.path == "eplb_token_collects_5.json"
    assert set(conflict.kept_as) == {names["0"], names["1"]}
    assert at_home.pop(conflict.kept_as[names["0"]]) == b'{"0": {"0": 1, "1": 2}}'
    assert at_home.pop(conflict.kept_as[names["1"]]) == b'{"0": {"0": 7, "1": 8}}'
    assert at_home == {}
    torn = next(result for result in report.sources if result.name == names["2"])
    assert list(torn.broken) == ["step_1/actor_update/rank9/group_list.json"]
    assert report.num_identical == 1
    assert not report.is_complete


def _node_id(name: str) -> str:
    return next(where.node_id for where in list_nodes(ray) if where.name == name)


def test_one_folder_that_all_nodes_see_needs_no_copy(cluster, tmp_path):
    shared = tmp_path / "shared"
    write_node(shared, range(4), range(3))
    old = time.time() - 60
    for path in shared.rglob("*.json"):
        os.utime(path, (old, old))
    report = gather(sources_of(str(shared)), tmp_path / "home")
    assert report.shared_folder == str(shared)
    assert not (tmp_path / "home").exists()
    assert report.is_complete


def test_an_address_where_nobody_listens_is_refused_at_once():
    from rl_insight_hooks.errors import RlInsightError, UsageError
    from rl_insight_hooks.report.collect.ray_transport import connect

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys; from rl_insight_hooks.report.collect.ray_transport import connect; "
            "connect(sys.argv[1])",
            f"127.0.0.1:{port}",
        ],
        capture_output=True,
        text=True,
        timeout=30,  # ray.init alone tries for more than ten minutes
    )
    assert f"nobody answers at 127.0.0.1:{port}" in done.stderr
    assert RlInsightError.__name__ in done.stderr
    with pytest.raises(UsageError, match="Ray Client"):
        connect("ray://127.0.0.1:10001")


def test_a_node_killed_in_the_middle_is_named_and_the_rest_is_complete(cluster, tmp_path):
    folders = node_folders(tmp_path)
    victim = slots()["2"]
    home = tmp_path / "home"
    sources = sources_of(f"{tmp_path}/{{node_id}}/load", batch_bytes=1)  # one file a batch
    killed = []

    dying = next(source for source in sources if source.name == victim)
    fetch = dying.fetch

    def fetch_and_kill(paths, staging, on_file):
        def take(got):
            on_file(got)
            if not killed:
                killed.append(got.path)
                cluster.kill(2)

        fetch(paths, staging, take)

    dying.fetch = fetch_and_kill
    report = gather(sources, home)

    assert killed
    assert not report.is_complete
    results = {result.name: result for result in report.sources}
    bad = results.pop(victim)
    assert bad.status == "partial"
    assert "died" in bad.message
    assert 1 <= bad.num_copied < RANKS_PER_NODE * NUM_STEPS
    assert {result.status for result in results.values()} == {"ok", "empty"}

    at_home = tree(home)
    for slot, folder in folders.items():
        if slot != "2":
            for path, data in tree(folder).items():
                assert at_home.pop(path) == data
    # what came from the node before it died is whole
    there = tree(folders["2"])
    assert len(at_home) == bad.num_copied
    assert all(there[path] == data for path, data in at_home.items())


def collect(cluster, *args):
    """The command itself, in a process of its own."""
    command = [sys.executable, "-m", "rl_insight_hooks.report.main", "collect", *map(str, args)]
    return subprocess.Popen(
        [*command, "--ray", cluster.cluster.address, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0"},
    )


def living_slots() -> dict[str, str]:
    return {
        dict(where.labels)["slot"]: where.name
        for where in list_nodes(ray)
        if where.is_alive and "slot" in dict(where.labels)
    }


def test_the_command_with_a_task_that_fails(cluster, tmp_path):
    """Where one node's folder cannot be read the others' files come, and the exit code says 4."""
    good, bad = sorted(living_slots())[:2]
    write_node(tmp_path / good, [0, 1], [1], world_size=4)
    for slot in living_slots():
        if slot not in (good, bad):
            (tmp_path / slot).mkdir()
    (tmp_path / bad).write_text("a file in place of the folder")
    home = tmp_path / "home"
    process = collect(cluster, f"{tmp_path}/{{label:slot}}", "-o", home)
    _, stderr = process.communicate(timeout=120)
    # the head has no such label: that is said before anything is copied
    assert process.returncode == 2
    assert "{label:slot}" in stderr
    names = living_slots()
    (tmp_path / _node_id(names[good])).symlink_to(tmp_path / good)
    (tmp_path / _node_id(names[bad])).symlink_to(tmp_path / bad)
    process = collect(cluster, f"{tmp_path}/{{node_id}}", "-o", home)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 4, stderr
    assert "Traceback" not in stderr
    said = json.loads(stdout)
    sources = {source["name"]: source for source in said["sources"]}
    assert sources[names[bad]]["status"] == "failed"
    assert "Not a directory" in sources[names[bad]]["message"]
    assert sources[names[good]]["num_copied"] == 2
    assert tree(home) == tree(tmp_path / good)


def test_the_command_while_a_node_dies(cluster, tmp_path):
    """End to end: a node killed in the middle, another dead before; each named, the rest whole, exit code 4."""
    if "2" in living_slots():
        cluster.kill(2)
    dead_before = [where.name for where in list_nodes(ray) if not where.is_alive]
    folders = node_folders(tmp_path)
    victim = living_slots()["1"]
    ranks = range(RANKS_PER_NODE, 2 * RANKS_PER_NODE)
    for path in folders["1"].rglob("*.json"):  # 150 MB: it takes a while
        path.write_bytes(path.read_bytes() + b" " * 480_000)
    home = tmp_path / "home"
    process = collect(cluster, f"{tmp_path}/{{node_id}}/load", "-o", home)
    deadline = time.monotonic() + 120
    while not any(
        int(path.parent.name.removeprefix("rank")) in ranks
        for path in home.glob(".collect-*.tmp/*/step_*/*/rank*/group_list.json")
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    cluster.kill(1)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 4, stderr
    assert "Traceback" not in stderr
    said = json.loads(stdout)  # Ray's own words about the death are not in it
    assert said["is_complete"] is False
    assert said["dead_nodes"] == dead_before
    sources = {source["name"]: source for source in said["sources"]}
    bad = sources.pop(victim)
    assert bad["status"] == "partial"
    assert "died" in bad["message"]
    assert 1 <= bad["num_copied"] < RANKS_PER_NODE * NUM_STEPS
    assert {source["status"] for source in sources.values()} == {"ok", "empty"}
    at_home = tree(home)
    for slot in "03":
        for path, data in tree(folders[slot]).items():
            assert at_home.pop(path) == data
    there = tree(folders["1"])
    assert len(at_home) == bad["num_copied"]
    assert all(there[path] == data for path, data in at_home.items())
    assert f"ranks {2 * RANKS_PER_NODE}-" in said["problems"][0]["what"]  # those of the dead node
