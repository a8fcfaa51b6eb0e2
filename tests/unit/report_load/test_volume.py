# SPDX-License-Identifier: Apache-2.0
"""The estimate against files that are really written."""

from __future__ import annotations

import numpy as np
import pytest

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.packfile import pack_steps
from rl_insight_hooks.report.volume import RunShape, estimate, size_text
from rl_insight_hooks.schema import decode_load_file, encode_load_file


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "phases"),
    [(58, 256, ["forward"]), (58, 4, ["forward"]), (48, 128, ["forward", "recompute"])],
)
def test_estimate_is_close_to_what_is_written(
    tmp_path, write_step, num_layers, num_experts, phases
):
    rng = np.random.default_rng(0)
    num_steps, sizes = 20, []
    for step in range(num_steps):
        loads = {
            (layer, phase): rng.multinomial(
                num_experts * 3000, rng.dirichlet(np.full(num_experts, 3.0))
            ).tolist()
            for layer in range(num_layers)
            for phase in phases
        }
        path = write_step(tmp_path, step, "actor_update", 0, loads, world_size=512)
        data = encode_load_file(decode_load_file(path.read_text().encode()))
        path.write_bytes(data)
        sizes.append(len(data))
    shape = {
        "num_layers": num_layers,
        "num_experts": num_experts,
        "num_ranks": 1,
        "num_phases": len(phases),
    }
    volume = estimate(RunShape(num_steps=num_steps, **shape))
    assert volume.num_files == num_steps
    assert volume.num_bytes == pytest.approx(sum(sizes), rel=0.2)
    packed = estimate(RunShape(num_steps=num_steps, pack_every=20, **shape))
    assert packed.num_files == 1
    written = pack_steps(tmp_path, "actor_update", 0, range(num_steps)).stat().st_size
    assert packed.num_bytes == pytest.approx(written, rel=0.35)


def test_files_are_counted_exactly():
    shape = {
        "num_layers": 58,
        "num_experts": 256,
        "num_ranks": 512,
        "num_steps": 1000,
        "num_roles": 3,
    }
    assert estimate(RunShape(**shape)).num_files == 512 * 1000 * 3
    assert estimate(RunShape(**shape, pack_every=100)).num_files == 512 * 3 * 10
    assert estimate(RunShape(**shape, pack_every=300)).num_files == 512 * 3 * (3 + 100)
    assert estimate(RunShape(**shape, num_replicas=8)).num_files == 64 * 1000 * 3


def test_bad_numbers_are_usage_errors():
    with pytest.raises(UsageError, match="num_ranks is 0"):
        estimate(RunShape(num_layers=1, num_experts=1, num_ranks=0, num_steps=1))


@pytest.mark.parametrize(
    ("num", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_size_text(num, text):
    assert size_text(num) == text
