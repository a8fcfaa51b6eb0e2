# SPDX-License-Identifier: Apache-2.0
"""pack_every while a run goes on: few files, the same numbers, and a kill loses and doubles nothing."""

from __future__ import annotations

import numpy as np
from tiny_run import every_load_file, layer_pass

from rl_insight_hooks.report.load import load


def counts_of(step):
    return [step, 2 * step, 1, 0]


def record_steps(rih, root, steps, role="r"):
    for step in steps:
        with rih.record(root, step=step, role=role):
            layer_pass(counts_of(step))


def read_all(root):
    table = load(root)
    return {int(s): row.tolist() for s, row in zip(table.step_N, table.counts_NE, strict=True)}


def test_finished_steps_become_one_file(rih, npu, tmp_path):
    rih.configure(pack_every=10)
    record_steps(rih, tmp_path, range(1, 36))
    assert rih.flush()
    assert read_all(tmp_path) == {step: counts_of(step) for step in range(1, 36)}
    assert len(list(tmp_path.rglob("pack_*.npz"))) == 3
    assert sorted(f.step for f in every_load_file(tmp_path)) == [31, 32, 33, 34, 35]


def test_rerun_of_a_packed_step_wins(rih, npu, tmp_path):
    rih.configure(pack_every=3)
    record_steps(rih, tmp_path, range(1, 6))
    with rih.record(tmp_path, step=2, role="r"):
        layer_pass([9, 9, 9, 9])
    rih.flush()
    assert read_all(tmp_path)[2] == [9, 9, 9, 9]
    assert read_all(tmp_path)[3] == counts_of(3)


def test_packed_run_of_a_thousand_steps_and_three_roles_is_under_sixty_files(rih, npu, tmp_path):
    import torch

    rih.configure(pack_every=100, collects=False)
    x, w = torch.ones(3, 4), torch.ones(4, 4, 6)
    for step in range(1, 1001):
        for role in ("a", "b", "c"):
            with rih.record(tmp_path, step=step, role=role):
                npu.npu_grouped_matmul(
                    [x], [w], group_list=torch.tensor([1, 2, 0, 0]), group_list_type=1
                )
        if step % 100 == 0:
            rih.flush()
    rih.flush()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    # the last hundred of each role wait for a later step: the offline pack takes them
    assert len(list(tmp_path.rglob("pack_*.npz"))) == 27
    from rl_insight_hooks.report.pack import pack_folder

    pack_folder(tmp_path)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) < 60
    table = load(tmp_path)
    assert table.num_rows == 3000
    assert np.array_equal(table.counts_NE, np.tile([1, 2, 0, 0], (3000, 1)))
