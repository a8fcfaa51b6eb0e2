# SPDX-License-Identifier: Apache-2.0
"""gather over sources in this process: what fails in the middle, what changes meanwhile, what a user sees."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import threading
import time

import pytest
import typer
from collect_data import make_file, tree, write_collects, write_node, write_step_file
from typer.testing import CliRunner

from rl_insight_hooks.errors import (
    DataError,
    IncompleteDataError,
    MissingDependencyError,
    UsageError,
)
from rl_insight_hooks.packfile import pack_steps
from rl_insight_hooks.report.collect import node
from rl_insight_hooks.report.collect.coverage import coverage
from rl_insight_hooks.report.collect.gather import gather
from rl_insight_hooks.report.collect.home import MANIFEST_NAME, list_home
from rl_insight_hooks.report.collect.model import FileStat, Received, SourceError, Survey
from rl_insight_hooks.report.collect.render import outcome_lines, trouble_lines
from rl_insight_hooks.report.commands.collect import collect
from rl_insight_hooks.schema import decode_load_file, encode_load_file


class LocalSource:
    """A folder of this machine that claims to be another's (its inodes are shifted)."""

    def __init__(self, name: str, folder: pathlib.Path, *, dies_after: int | None = None) -> None:
        self.name = name
        self.folder = str(folder)
        self.asked: list[str] = []
        self.hashed: list[str] = []
        self.is_stopped = threading.Event()
        self.inode_shift = 1
        self.before_fetch = lambda: None
        self._dies_after = dies_after

    def survey(self) -> Survey:
        started = time.time()
        folder, stats = node.list_files(self.folder, node.INCLUDE)
        files = tuple(
            FileStat(path, inode + self.inode_shift, size, mtime)
            for path, inode, size, mtime in stats
        )
        return Survey(folder=folder, files=files, listed_unix_s=started)

    def digests(self, paths):
        self.hashed += paths
        return node.hash_files(self.folder, paths)

    def fetch(self, paths, staging, on_file) -> None:
        self.before_fetch()
        self.asked += paths
        for number, path in enumerate(paths):
            if number == self._dies_after:
                raise SourceError("the node died", "Run it again.")
            for batch in node.send_files(self.folder, [path], 1):
                for name, mtime_ns, digest, broken, data in batch:
                    if broken is None:
                        (staging / name).parent.mkdir(parents=True, exist_ok=True)
                        (staging / name).write_bytes(data)
                    on_file(Received(name, digest, mtime_ns, broken))

    def stop(self) -> None:
        self.is_stopped.set()


def test_what_a_dying_source_did_not_give_comes_from_another_that_has_it(tmp_path):
    one, two, home = tmp_path / "one", tmp_path / "two", tmp_path / "home"
    write_node(one, range(4), [1])
    write_node(two, range(4), [1])
    write_step_file(two, 1, 9)
    write_step_file(one, 1, 8)  # one alone has this, and dies before
    dying, other = LocalSource("a", one, dies_after=2), LocalSource("b", two)
    report = gather([dying, other], home)
    expected = tree(two)
    assert tree(home) == expected
    assert report.sources[0].status == "partial"
    assert report.sources[0].message == "the node died; 2 of 5 files had come"
    assert report.sources[1].status == "ok"
    assert not report.is_complete
    assert len(dying.asked) == 5
    assert len(other.asked) == 3  # rank9, and the two equal ones that were lost


def test_only_paths_that_another_has_too_are_hashed(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_node(one, [0, 1], [1])
    write_node(two, [1, 2], [1])
    sources = [LocalSource("a", one), LocalSource("b", two)]
    report = gather(sources, tmp_path / "home")
    shared = ["step_1/actor_update/rank1/group_list.json"]
    assert [source.hashed for source in sources] == [shared, shared]
    assert report.num_identical == 1


def test_a_file_that_goes_while_we_collect_is_named(tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    gone = write_step_file(one, 1, 0)
    write_step_file(one, 2, 0)
    source = LocalSource("a", one)
    source.before_fetch = gone.unlink
    report = gather([source], home)
    assert list(tree(home)) == ["step_2/actor_update/rank0/group_list.json"]
    assert list(report.sources[0].broken) == ["step_1/actor_update/rank0/group_list.json"]
    assert not report.is_complete


def test_a_file_that_changes_between_listing_and_copy_comes_whole(tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    path = write_collects(one, 0, '{"0": {"0": 1}}')
    source = LocalSource("a", one)
    source.before_fetch = lambda: path.write_text('{"0": {"0": 1000}}')
    assert gather([source], home).is_complete
    assert (home / path.name).read_text() == '{"0": {"0": 1000}}'
    source.before_fetch = lambda: None
    again = gather([source], home)
    assert (again.num_new, again.num_updated, again.num_identical) == (0, 0, 1)


def test_same_size_and_time_is_trusted_unless_checksum_is_given(tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    path = write_collects(one, 0, '{"0": {"0": 1}}')
    source = LocalSource("a", one)
    gather([source], home)
    info = path.stat()
    path.write_text('{"0": {"0": 2}}')
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))
    assert gather([source], home).num_updated == 0
    assert gather([source], home, checksum=True).num_updated == 1
    assert (home / path.name).read_text() == '{"0": {"0": 2}}'


def test_shared_storage_that_home_does_not_see_is_copied_once(tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    write_node(one, [0, 1], [1])
    old = time.time() - 60
    for file in one.rglob("*.json"):
        os.utime(file, (old, old))
    sources = [LocalSource(name, one) for name in "abc"]
    report = gather(sources, home)
    assert [len(source.asked) for source in sources] == [2, 0, 0]
    assert [result.status for result in report.sources] == ["ok", "shared", "shared"]
    assert report.is_complete
    # its first reader is down: the next one serves
    later = tmp_path / "later"
    broken = LocalSource("a", one, dies_after=0)
    report = gather([broken, *sources[1:]], later)
    assert tree(later) == tree(one)
    assert report.sources[0].status == "failed"


def test_paths_that_lead_out_are_refused(tmp_path):
    class Evil(LocalSource):
        def survey(self):
            found = super().survey()
            evil = FileStat("../../evil/group_list.json", 1, 1, 1)
            return dataclasses.replace(found, files=(*found.files, evil))

    write_step_file(tmp_path / "one", 1, 0)
    source = Evil("a", tmp_path / "one")
    report = gather([source], tmp_path / "home")
    assert len(source.asked) == 1
    assert not report.is_complete


def test_an_interrupt_stops_the_sources_and_leaves_nothing_half_done(tmp_path):
    one, home = tmp_path / "one", tmp_path / "home"
    write_node(one, [0], [1])
    source = LocalSource("a", one)

    def interrupt():
        raise KeyboardInterrupt

    source.before_fetch = interrupt
    with pytest.raises(KeyboardInterrupt):
        gather([source], home)
    assert source.is_stopped.is_set()
    assert list(home.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path):
    write_node(tmp_path / "one", [0], [1])
    source = LocalSource("a", tmp_path / "one")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--output"):
        gather([source], tmp_path / "file")
    with pytest.raises(UsageError, match="a is given twice"):
        gather([source, source], tmp_path / "home")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / MANIFEST_NAME).write_text("{broken")
    with pytest.raises(DataError, match=MANIFEST_NAME):
        gather([source], tmp_path / "home")


def test_no_file_of_ours_ends_in_json_beside_collects(tmp_path):
    write_collects(tmp_path / "one", 0, '{"0": {"0": 1}}')
    gather([LocalSource("a", tmp_path / "one")], tmp_path / "home")
    names = sorted(path.name for path in (tmp_path / "home").iterdir())
    assert names == [MANIFEST_NAME, "eplb_token_collects_0.json"]
    assert not MANIFEST_NAME.endswith(".json")


def test_words(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_collects(one, 0, '{"0": {"0": 1}}')
    write_collects(two, 0, '{"0": {"0": 2}}')
    write_step_file(one, 1, 0, make_file(1, 0)[:50])
    report = gather([LocalSource("a", one), LocalSource("b", two)], tmp_path / "home")
    assert outcome_lines(report)[-1].endswith(
        "2 new, 0 updated, 0 identical, 1 in conflict and kept apart"
    )
    trouble = trouble_lines(report)
    assert any("rank0/group_list.json: cut off" in line for line in trouble)
    assert any("eplb_token_collects_0.json differs between sources" in line for line in trouble)


def test_ranks_that_are_not_there_are_named(tmp_path):
    write_node(tmp_path, [0, 1, 3], [1, 2], world_size=6)
    (problem,) = coverage(tmp_path, list_home(tmp_path)).problems
    assert problem.rule == "missing-rank"
    assert "ranks 2, 4-5 of a world of 6" in problem.what
    (tmp_path / "packed/actor_update/rank2").mkdir(parents=True)
    (tmp_path / "packed/actor_update/rank2/pack_0-99.npz").write_text("x")
    (problem,) = coverage(tmp_path, list_home(tmp_path)).problems
    assert "ranks 4-5 of a world of 6" in problem.what


def test_packs_alone_tell_how_many_ranks_there_are(tmp_path):
    write_node(tmp_path, [0, 1], [1, 2], world_size=3)
    for rank in (0, 1):
        assert pack_steps(tmp_path, "actor_update", rank, [1, 2])
    assert not list(tmp_path.rglob("group_list.json"))
    covered = coverage(tmp_path, list_home(tmp_path))
    assert "rank 2 of a world of 3" in covered.problems[0].what
    assert not covered.is_proven


@pytest.mark.parametrize(
    ("world", "collects", "other", "proven"),
    [
        (2, [], None, True),
        (2, [0, 1], None, True),  # the recorder's own, beside its step files
        (3, [], None, False),
        (2, [2], None, False),  # a rank of which there is no step file
        (2, [], "step_1/rank0/dump_tensor_data/x.group_list.pt", False),
        (None, [0, 1], None, False),  # MindSpeed-RL's own: nobody says how many
        (None, [], None, False),
    ],
)
def test_what_proves_that_no_rank_is_missing(tmp_path, world, collects, other, proven):
    if world is not None:
        write_node(tmp_path, [0, 1], [1], world_size=world)
    for rank in collects:
        write_collects(tmp_path, rank, "{}")
    if other is not None:
        (tmp_path / other).parent.mkdir(parents=True)
        (tmp_path / other).write_bytes(b"PK")
    assert coverage(tmp_path, list_home(tmp_path)).is_proven is proven


def test_ranks_that_were_not_asked_for_are_not_missing(tmp_path):
    path = write_step_file(tmp_path, 1, 0, world_size=8)
    file = decode_load_file(path.read_bytes())
    file.stamps["ranks"] = "0"
    path.write_bytes(encode_load_file(file))
    assert coverage(tmp_path, list_home(tmp_path)).is_proven


app = typer.Typer()
app.command()(collect)


def invoke(*args: str):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.parametrize(
    ("args", "needle"),
    [
        (["/d"], "--ray"),
        (["--ray", "auto", "--ssh", "h:/d"], "one way"),
        (["--ray", "auto"], "one DATA"),
        (["--ray", "auto", "rel/path"], "from the root"),
        (["--ssh", "h:/d", "--ssh-option", "nonsense"], "KEY=VALUE"),
        (["--ssh", "h:/d", "--identity", "/no/such/key"], "/no/such/key"),
        (["--hosts", "/no/such/list"], "/no/such/list"),
        (["--ssh", "h:/d", "--parallel", "0"], "--parallel 0"),
        (["--ssh", "h:/d", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_bad_command_lines(args, needle):
    result = invoke(*args)
    assert isinstance(result.exception, UsageError)
    assert needle in str(result.exception)


def test_ray_that_is_not_installed(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    result = invoke("--ray", "auto", "/d")
    assert isinstance(result.exception, MissingDependencyError)
    assert "rl-insight-hooks[ray]" in str(result.exception)


@pytest.fixture
def as_ssh(monkeypatch):
    """Hosts of --ssh are folders here."""

    def source(address, include, settings):
        return LocalSource(address.name, pathlib.Path(address.path))

    monkeypatch.setattr("rl_insight_hooks.report.collect.ssh_transport.SshSource", source)


def test_the_command_in_json_and_text(as_ssh, tmp_path):
    write_node(tmp_path / "one", [0, 1], [1], world_size=2)
    (tmp_path / "hosts").write_text(f"n2:{tmp_path}/two\n")
    write_collects(tmp_path / "two", 0, '{"0": {"0": 1}}')
    args = ["--ssh", f"n1:{tmp_path}/one", "--hosts", tmp_path / "hosts", "-o", tmp_path / "home"]
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["schema"] == "rl-insight-hooks/collect/1"
    assert (said["num_new"], said["is_complete"]) == (3, True)
    assert [one["num_copied"] for one in said["sources"]] == [2, 1]
    result = invoke(*args)
    assert "0 new, 0 updated, 3 identical" in result.stdout
    assert result.exit_code == 0


def test_exit_codes_of_the_command(as_ssh, tmp_path):
    (tmp_path / "empty").mkdir()
    result = invoke("--ssh", f"n1:{tmp_path}/empty", "-o", tmp_path / "home")
    assert type(result.exception) is DataError
    write_step_file(tmp_path / "one", 1, 0, make_file(1, 0)[:50])
    write_step_file(tmp_path / "one", 1, 1)
    result = invoke("--ssh", f"n1:{tmp_path}/one", "-o", tmp_path / "home")
    assert isinstance(result.exception, IncompleteDataError)
    assert result.exception.exit_code == 4


def test_ranks_missing_at_home_are_exit_code_4(as_ssh, tmp_path):
    """A host that was not named: nobody failed, and a part of the run is not there."""
    write_node(tmp_path / "one", [0, 1], [1], world_size=4)
    result = invoke("--ssh", f"n1:{tmp_path}/one", "-o", tmp_path / "home", "--json")
    assert isinstance(result.exception, IncompleteDataError)
    assert "ranks are missing" in str(result.exception)
    said = json.loads(result.stdout)
    assert said["is_complete"] is False
    assert "ranks 2-3 of a world of 4" in said["problems"][0]["what"]
    write_node(tmp_path / "two", [2, 3], [1], world_size=4)
    result = invoke("--ssh", f"n2:{tmp_path}/two", "-o", tmp_path / "home", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["is_complete"] is True


@pytest.mark.parametrize(("own", "complete"), [("step files", True), ("collects", False)])
def test_a_node_that_was_dead_before(monkeypatch, tmp_path, own, complete):
    """Where the files say that every rank is here it had none; collects of other tools cannot say."""
    if own == "step files":
        write_node(tmp_path / "one", [0, 1], [1], world_size=2)
    else:
        write_collects(tmp_path / "one", 0, "{}")
    monkeypatch.setattr(
        "rl_insight_hooks.report.commands.collect._ray_sources",
        lambda *_: contextlib.nullcontext(([LocalSource("n1", tmp_path / "one")], ["n2"])),
    )
    result = invoke("--ray", "auto", "/d", "-o", tmp_path / "home", "--json")
    said = json.loads(result.stdout)
    assert said["dead_nodes"] == ["n2"]
    assert said["is_complete"] is complete
    assert "node n2 was dead before we began" in result.stderr
    if complete:
        assert result.exit_code == 0
    else:
        assert isinstance(result.exception, IncompleteDataError)
        assert "do not say whether ranks are missing" in str(result.exception)
