# SPDX-License-Identifier: Apache-2.0
"""Export as the msprobe tree that verl writes and that rl-insight's own heatmap reads.

``step_{N}/{role}/step0/rank{R}/dump_tensor_data/NPU.npu_grouped_matmul.{i}.forward.kwargs.group_list.pt``,
one call per layer, with a dump.json and a stack.json that say what it is, so that our own reader
gives the same counts back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.paths import role_dir
from rl_insight_hooks.report.table import ALL_RANKS, NO_STEP, IntArray, LoadTable
from rl_insight_hooks.report.torch_write import int_tensor_file
from rl_insight_hooks.schema import PHASE_FORWARD

_MARK = "exported counts, one call per layer"
_FRAME = f"File rl_insight_hooks, line 1, in forward, \n {_MARK}"


def write_tree(table: LoadTable, target: Path) -> list[str]:
    """Write the tree ``target`` in place of what is there; return what it cannot say, in sentences.

    The tree appears whole: it is written beside ``target`` and renamed.

    Raises:
        UsageError: what is there is no tree of an earlier export; dumps of a run are never replaced.
        OSError: a file cannot be written; what was there still is.
    """
    if not _is_export(target):
        raise UsageError(f"{target} holds other files than an export; give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        said = _write_below(table, new)
        if target.exists():
            target.replace(old)
        try:
            new.replace(target)
        except OSError:
            if old.exists():
                old.replace(target)
            raise
    return said


def _is_export(folder: Path) -> bool:
    """Return True if every file below ``folder`` is of a dump that this module wrote."""
    if folder.exists() and not folder.is_dir():
        return False
    ours: dict[Path, bool] = {}
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        dump = path.parent.parent if path.suffix == ".pt" else path.parent
        if dump not in ours:
            stack = dump / "stack.json"
            ours[dump] = stack.is_file() and _MARK.encode() in stack.read_bytes()
        if not ours[dump]:
            return False
    return True


def _write_below(table: LoadTable, target: Path) -> list[str]:
    said: dict[str, None] = {}
    phase = _phase_of(table, said)
    rows = np.flatnonzero(table.phase_N == phase) if phase is not None else np.zeros(0, np.int64)
    keys = np.stack([table.step_N[rows], table.role_N[rows], table.rank_N[rows]], axis=1)
    for step, role, rank in np.unique(keys, axis=0).tolist():
        mine = rows[(keys == (step, role, rank)).all(axis=1)]
        mine = mine[np.argsort(table.layer_N[mine], kind="stable")]
        if step == NO_STEP:
            said.setdefault("rows without a step are written as step_0")
        if rank == ALL_RANKS:
            said.setdefault("rows merged over ranks are written as rank0")
        name = role_dir(table.roles[role])
        folder = (
            target / f"step_{max(step, 0)}" / _stage(name, said) / "step0" / f"rank{max(rank, 0)}"
        )
        _write_dump(table, mine, folder)
    if (np.diff(table.layer_N[rows]) > 1).any():
        said.setdefault("the tree has no layer numbers: layers are counted from 0 in their order")
    return list(said)


def _phase_of(table: LoadTable, said: dict[str, None]) -> int | None:
    if not table.num_rows:
        said.setdefault("there is no row to write")
        return None
    present = sorted({int(phase) for phase in table.phase_N})
    names = [table.phases[phase] for phase in present]
    chosen = names.index(PHASE_FORWARD) if PHASE_FORWARD in names else 0
    if len(present) > 1:
        others = ", ".join(name for number, name in enumerate(names) if number != chosen)
        said.setdefault(f"only the phase {names[chosen]} is written, not {others}")
    return present[chosen]


def _stage(name: str, said: dict[str, None]) -> str:
    """rl-insight drops a stage whose name starts with "step"."""
    if name.startswith("step"):
        said.setdefault(f"role {name} is written as role_{name}")
        return f"role_{name}"
    return name


def _write_dump(table: LoadTable, rows: IntArray, folder: Path) -> None:
    tensors = folder / "dump_tensor_data"
    tensors.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {}
    for index, row in enumerate(rows.tolist()):
        first, held = int(table.first_N[row]), int(table.held_N[row])
        counts = table.counts_NE[row, first : first + held]
        api = f"NPU.npu_grouped_matmul.{index}.forward"
        name = f"{api}.kwargs.group_list.pt"
        (tensors / name).write_bytes(int_tensor_file(counts))
        data[api] = _call(name, counts)
    dump = {
        "task": "tensor",
        "level": "L1",
        "framework": "pytorch",
        "dump_data_dir": "dump_tensor_data",
        "data": data,
    }
    stack = {"0": [list(data), [_FRAME]]}
    (folder / "dump.json").write_bytes(msgspec.json.encode(dump))
    (folder / "stack.json").write_bytes(msgspec.json.encode(stack))
    (folder / "construct.json").write_bytes(b"{}")


def _call(name: str, counts: IntArray) -> dict[str, Any]:
    largest = int(counts.max()) if counts.size else 0
    smallest = int(counts.min()) if counts.size else 0
    return {
        "input_args": [],
        "input_kwargs": {
            "group_list": {
                "type": "torch.Tensor",
                "dtype": "torch.int64",
                "shape": [int(counts.size)],
                "Max": largest,
                "Min": smallest,
                "Mean": None,
                "Norm": None,
                "requires_grad": False,
                "data_name": name,
            },
            "group_type": {"type": "int", "value": 0},
            "group_list_type": {"type": "int", "value": 1},
        },
    }
