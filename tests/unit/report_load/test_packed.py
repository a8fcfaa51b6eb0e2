# SPDX-License-Identifier: Apache-2.0
"""Packed steps: nothing lost, nothing counted twice, whatever moment a kill comes at."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_insight_hooks import packfile
from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import Packer, pack_path, pack_steps, read_pack
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.pack import pack_folder, unpack_folder


def _run(root, write_step, steps=6, ranks=2, roles=("actor", "critic")):
    rng = random.Random(1)
    for step in range(steps):
        for role in roles:
            for rank in range(ranks):
                loads = {
                    (layer, phase): [rng.randrange(3000) for _ in range(5)]
                    for layer in range(3)
                    for phase in ("forward", "recompute")
                }
                write_step(root, step, role, rank, loads, world_size=ranks)


def _texts(root):
    return {
        str(p.relative_to(root)): json.loads(p.read_text()) for p in root.rglob("group_list.json")
    }


def test_readers_see_no_difference(tmp_path, write_step, rows_of):
    _run(tmp_path, write_step)
    before = rows_of(load(tmp_path))
    merged = load(tmp_path, merge_ranks=True).counts_NE.tolist()
    done = pack_folder(tmp_path, every=4, keep=1)
    assert done.num_files == 5 * 4
    assert len(done.paths) == 2 * 4  # steps 0-3 and 4, two roles, two ranks
    assert rows_of(load(tmp_path)) == before
    assert load(tmp_path, merge_ranks=True).counts_NE.tolist() == merged
    assert sorted(p.parts[-4] for p in tmp_path.rglob("group_list.json")) == ["step_5"] * 4


def test_filters_reach_into_packs(tmp_path, write_step, rows_of):
    _run(tmp_path, write_step)
    before = rows_of(
        load(tmp_path, steps="1,3-4", roles="critic", ranks=1, layers="2", phases="forward")
    )
    pack_folder(tmp_path, keep=0)
    after = rows_of(
        load(tmp_path, steps="1,3-4", roles="critic", ranks=1, layers="2", phases="forward")
    )
    assert after == before
    assert [row[:4] for row in after] == [
        [1, "critic", 1, 2],
        [3, "critic", 1, 2],
        [4, "critic", 1, 2],
    ]


def test_every_field_comes_back(tmp_path, write_step):
    calls = [{"layer": 0, "phase": "forward", "index": 0, "counts": [1, 2, 2**40]}]
    fields = {
        "calls": calls,
        "notes": ["odd"],
        "dropped": {"x": 3},
        "stamps": {"a": "b"},
        "failed": {"w": 1},
    }
    for step in (1, 2, 30):
        write_step(tmp_path, step, "actor", 0, {0: [1, 2, 3], 1: [0, 0, 2**50]}, **fields)
    before = _texts(tmp_path)
    pack_folder(tmp_path, keep=0)
    assert _texts(tmp_path) == {}
    unpack_folder(tmp_path)
    after = _texts(tmp_path)
    assert after.keys() == before.keys()
    for name, value in before.items():
        for key, item in value.items():
            if key == "records":
                for old, new in zip(item, after[name]["records"], strict=True):
                    assert {k: new[k] for k in old} == old
            else:
                assert after[name][key] == item
    assert list(tmp_path.rglob("*.npz")) == []


def test_a_step_that_is_both_counts_once_and_the_json_wins(tmp_path, write_step, rows_of, by_rule):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 1]})
    write_step(tmp_path, 2, "actor", 0, {0: [2, 2]})
    pack_steps(tmp_path, "actor", 0, [1, 2])
    write_step(tmp_path, 2, "actor", 0, {0: [7, 7]})  # a rerun after a restart
    table = load(tmp_path)
    assert [row[-1] for row in rows_of(table)] == [[1, 1], [7, 7]]
    assert by_rule(table) == {}


def test_of_two_packs_the_later_wins(tmp_path, write_step, rows_of):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 1]}, ended_unix_s=10.0)
    write_step(tmp_path, 2, "actor", 0, {0: [2, 2]}, ended_unix_s=20.0)
    pack_steps(tmp_path, "actor", 0, [1, 2])
    write_step(tmp_path, 2, "actor", 0, {0: [7, 7]}, ended_unix_s=30.0)
    write_step(tmp_path, 3, "actor", 0, {0: [3, 3]}, ended_unix_s=40.0)
    pack_steps(tmp_path, "actor", 0, [2, 3])
    assert [row[-1] for row in rows_of(load(tmp_path))] == [[1, 1], [7, 7], [3, 3]]


def test_a_rerun_packed_under_the_same_name_replaces_its_step_only(tmp_path, write_step, rows_of):
    for step in (1, 2, 3):
        write_step(tmp_path, step, "actor", 0, {0: [step, step]})
    pack_steps(tmp_path, "actor", 0, [1, 2, 3])
    write_step(tmp_path, 1, "actor", 0, {0: [9, 9]})
    write_step(tmp_path, 3, "actor", 0, {0: [8, 8]})
    path = pack_steps(tmp_path, "actor", 0, [1, 2, 3])
    assert path == pack_path(tmp_path, "actor", 0, 1, 3)
    assert [row[-1] for row in rows_of(load(tmp_path))] == [[9, 9], [2, 2], [8, 8]]


def test_packer_folds_while_the_run_goes_on(tmp_path, write_step, rows_of):
    packer = Packer(every=3)
    made = []
    for step in range(1, 9):
        for role in ("actor", "critic"):
            write_step(tmp_path, step, role, 0, {0: [step, 1]})
            path = packer.wrote(tmp_path, role, 0, step)
            if path is not None:
                made.append((step, role, path.name))
    assert made == [
        (4, "actor", "pack_1-3.npz"),
        (4, "critic", "pack_1-3.npz"),
        (7, "actor", "pack_4-6.npz"),
        (7, "critic", "pack_4-6.npz"),
    ]
    loose = sorted(path.parts[-4] for path in tmp_path.rglob("group_list.json"))
    assert loose == ["step_7", "step_7", "step_8", "step_8"]
    assert [row[0] for row in rows_of(load(tmp_path, roles="critic"))] == list(range(1, 9))


def test_packer_tries_again_and_can_be_off(tmp_path, write_step, monkeypatch):
    packer = Packer(every=1)
    write_step(tmp_path, 1, "actor", 0, {0: [1]})
    write_step(tmp_path, 2, "actor", 0, {0: [1]})
    assert packer.wrote(tmp_path, "actor", 0, 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(
            packfile, "write_atomic", lambda path, data: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(OSError, match="full"):
            packer.wrote(tmp_path, "actor", 0, 2)
    write_step(tmp_path, 3, "actor", 0, {0: [1]})
    assert packer.wrote(tmp_path, "actor", 0, 3).name == "pack_1-2.npz"
    assert Packer(every=0).wrote(tmp_path, "actor", 0, 3) is None
    assert packer.wrote(tmp_path, "actor", 0, None) is None


def test_nothing_to_pack_is_none(tmp_path):
    assert pack_steps(tmp_path, "actor", 0, [1, 2]) is None


def test_a_torn_step_file_stays_and_is_named(tmp_path, write_step, caplog):
    write_step(tmp_path, 1, "actor", 0, {0: [1, 1]})
    torn = write_step(tmp_path, 2, "actor", 0, {0: [2, 2]})
    torn.write_text(torn.read_text()[:50])
    pack_steps(tmp_path, "actor", 0, [1, 2])
    assert torn.exists()
    assert str(torn) in caplog.text
    assert [rule.rule for rule in load(tmp_path).problems if rule.severity == "error"] == [
        "torn-file"
    ]


def test_a_pack_that_does_not_read_back_keeps_the_step_files(tmp_path, write_step, monkeypatch):
    paths = [write_step(tmp_path, step, "actor", 0, {0: [1, 1]}) for step in (1, 2)]
    real = packfile.write_atomic

    def spoil(path, data):
        real(path, data[:-30])

    monkeypatch.setattr(packfile, "write_atomic", spoil)
    with pytest.raises(DataError):
        pack_steps(tmp_path, "actor", 0, [1, 2])
    assert all(path.exists() for path in paths)


def test_a_full_disk_keeps_the_step_files(tmp_path, write_step, monkeypatch):
    paths = [write_step(tmp_path, step, "actor", 0, {0: [1, 1]}) for step in (1, 2)]

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packfile, "write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        pack_steps(tmp_path, "actor", 0, [1, 2])
    assert all(path.exists() for path in paths)


_PACKER = """
import sys
from rl_insight_hooks.packfile import pack_steps
print("ready", flush=True)
for first in range(0, 40, 10):
    pack_steps(sys.argv[1], "actor", 0, range(first, first + 10))
"""


def test_a_kill_at_any_moment_loses_nothing_and_counts_nothing_twice(tmp_path, write_step, rows_of):
    rng = random.Random(3)
    pristine = tmp_path / "pristine"
    for step in range(40):
        write_step(
            pristine,
            step,
            "actor",
            0,
            {0: [rng.randrange(9999) for _ in range(64)], 1: [step] * 64},
        )
    truth = rows_of(load(pristine))
    killed = 0
    for number in range(12):
        root = tmp_path / f"run{number}"
        shutil.copytree(pristine, root)
        packer = subprocess.Popen(
            [sys.executable, "-c", _PACKER, str(root)], stdout=subprocess.PIPE
        )
        packer.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        packer.send_signal(signal.SIGKILL)
        killed += packer.wait() == -signal.SIGKILL
        packer.stdout.close()
        table = load(root)
        assert rows_of(table) == truth
        assert not table.is_incomplete
        for first in range(0, 40, 10):  # the next run goes on where it was
            pack_steps(root, "actor", 0, range(first, first + 10))
        assert rows_of(load(root)) == truth
        assert list(root.rglob("group_list.json")) == []
    assert killed > 0


def test_deepseek_v3_shape_packs_under_40_kb_a_step(tmp_path, write_step):
    import numpy as np

    rng = np.random.default_rng(0)
    num_steps = 4
    for step in range(num_steps):
        loads = {}
        for layer in range(58):
            share = rng.dirichlet(np.full(256, 1.0))  # far more uneven than real routing
            loads[layer] = rng.multinomial(8192 * 8 * 8, share).tolist()
        write_step(tmp_path, step, "actor", 0, loads)
    path = pack_steps(tmp_path, "actor", 0, range(num_steps))
    assert path.stat().st_size / num_steps < 40_000


def test_packing_is_deterministic(tmp_path, write_step):
    data = []
    for name in ("a", "b"):
        for step in (1, 2):
            write_step(tmp_path / name, step, "actor", 0, {0: [1, 300, 70_000]})
        data.append(pack_steps(tmp_path / name, "actor", 0, [1, 2]).read_bytes())
    assert data[0] == data[1]


@pytest.mark.parametrize("at", [0, 10, 60, 200, -40, -10])
def test_a_damaged_pack_is_named_and_the_rest_still_shown(tmp_path, write_step, by_rule, at):
    for step in (1, 2):
        write_step(tmp_path, step, "actor", 0, {0: [step, step]})
    path = pack_steps(tmp_path, "actor", 0, [1, 2])
    write_step(tmp_path, 3, "actor", 0, {0: [3, 3]})
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)
    table = load(tmp_path)
    assert 3 in table.step_N.tolist()
    if table.num_rows == 1:
        assert by_rule(table)["torn-pack"][0].where == str(path)
    else:  # a byte that says nothing (a time stamp): all is there
        assert table.counts_NE.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_a_pack_is_never_unpickled(tmp_path):
    import io
    import zipfile

    import numpy as np

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("meta", "lengths", "planes"):
            buffer = io.BytesIO()
            np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
            archive.writestr(f"{name}.npy", buffer.getvalue())
    with pytest.raises(DataError, match="Object arrays"):
        read_pack(out.getvalue(), "x")


def test_numpy_is_not_imported_before_it_is_needed():
    code = (
        "import sys; import rl_insight_hooks.packfile; "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'rl_insight_hooks.report')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_misplaced_and_stepless_files_stay(tmp_path, write_step):
    write_step(tmp_path, None, "rollout", 0, {0: [1, 1]})
    path = write_step(tmp_path, 1, "actor", 0, {0: [1, 1]})
    other = tmp_path / "step_9" / "actor" / "rank0" / "group_list.json"
    other.parent.mkdir(parents=True)
    path.rename(other)
    done = pack_folder(tmp_path, keep=0)
    assert done.num_files == 0
    assert [p.rule for p in done.problems] == ["misplaced-file"]
    assert other.exists()
    assert len(list(Path(tmp_path).rglob("group_list.json"))) == 2


def test_relative_folder_is_packed_too(tmp_path, write_step, monkeypatch):
    write_step(tmp_path / "run", 1, "actor", 0, {0: [1, 1]})
    monkeypatch.chdir(tmp_path)
    assert pack_folder("run", keep=0).num_files == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["packed"]
