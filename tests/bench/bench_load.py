# SPDX-License-Identifier: Apache-2.0
"""How fast loads are read, against the ways in use today. Ratios are medians of alternating runs.

    python tests/bench/bench_load.py [--repeat 3] [--scale 1.0]

1. 4,096 step files (48 layers x 128 experts) to merged numpy, against json.load and adding up key by key, as
   MindSpeed-RL's map maker does, on its own files with the same numbers.
2. 9,216 ``group_list.pt`` of an msprobe tree to a PNG, against rl-insight 0.2.1, where
   ``RL_INSIGHT_021_PYTHON`` names a Python that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rl_insight_hooks.paths import load_file_path
from rl_insight_hooks.report.torch_write import int_tensor_file
from rl_insight_hooks.schema import LoadFile, Parallel, Producer, Record, encode_load_file

LAYERS, EXPERTS = 48, 128


def make_step_files(root: Path, num_files: int) -> tuple[Path, Path]:
    """Write the same counts as our step files and as token collects; return both folders."""
    rng = np.random.default_rng(0)
    ours, theirs = root / "ours", root / "theirs"
    theirs.mkdir(parents=True)
    num_ranks = min(512, num_files)
    for number in range(num_files):
        step, rank = divmod(number, num_ranks)
        counts_LE = rng.multinomial(4096 * 8, rng.dirichlet(np.full(EXPERTS, 2.0)), size=LAYERS)
        path = load_file_path(os.fspath(ours), step, "actor_update", rank)
        path.parent.mkdir(parents=True)
        path.write_bytes(encode_load_file(_load_file(step, rank, num_ranks, counts_LE)))
        loads = {
            str(layer): {str(expert): int(n) for expert, n in enumerate(row)}
            for layer, row in enumerate(counts_LE)
        }
        (theirs / f"eplb_token_collects_{number}.json").write_text(json.dumps(loads, indent=2))
    return ours, theirs


def _load_file(step: int, rank: int, world_size: int, counts_LE: np.ndarray) -> LoadFile:
    records = [
        Record(
            layer=layer,
            layer_name=f"model.layers.{layer}.mlp",
            layer_source="module",
            phase="forward",
            seam="npu_grouped_matmul",
            num_calls=3,
            num_passes=1,
            num_assignments=int(row.sum()),
            counts=row.tolist(),
        )
        for layer, row in enumerate(counts_LE)
    ]
    return LoadFile(
        schema_version=1,
        producer=Producer("rl_insight_hooks", "bench"),
        run_id="bench",
        writer="bench",
        step=step,
        step_source="given",
        role="actor_update",
        rank=rank,
        world_size=world_size,
        parallel=Parallel(),
        num_experts=EXPERTS,
        top_k=8,
        first_expert=0,
        id_space="logical",
        tokens_layout="disjoint",
        num_regions=1,
        started_unix_s=1.0,
        ended_unix_s=2.0,
        records=records,
    )


def make_msprobe_tree(root: Path, num_steps: int) -> int:
    """Write a tree as verl does: 2 roles, 8 ranks, 24 layers, 3 or 9 calls a layer. Return the files."""
    rng = np.random.default_rng(0)
    num_files = 0
    for step in range(1, num_steps + 1):
        for role in ("actor_compute_log_prob", "actor_update"):
            for rank in range(8):
                folder = root / f"step_{step}" / role / "step0" / f"rank{rank}" / "dump_tensor_data"
                folder.mkdir(parents=True)
                layers = rng.multinomial(4096 * 8, rng.dirichlet(np.full(EXPERTS, 2.0)), size=24)
                calls = [row for row in layers for _ in range(3)]
                if role == "actor_update":
                    calls += [row for row in layers[::-1] for _ in range(6)]
                for index, row in enumerate(calls):
                    name = f"NPU.npu_grouped_matmul.{index}.forward.kwargs.group_list.pt"
                    (folder / name).write_bytes(int_tensor_file(row))
                num_files += len(calls)
    return num_files


def read_ours(folder: Path) -> np.ndarray:
    """Return the merged counts [rows, E]."""
    from rl_insight_hooks.report.load import load

    return load(folder, merge_ranks=True).counts_NE


def read_key_by_key(folder: Path) -> np.ndarray:
    """json.load and per-key addition over every file."""
    total: dict[int, dict[int, int]] = {}
    for path in folder.glob("*.json"):
        with path.open() as stream:
            loads = json.load(stream)
        for layer, experts in loads.items():
            mine = total.setdefault(int(layer), {})
            for expert, tokens in experts.items():
                mine[int(expert)] = mine.get(int(expert), 0) + tokens
    return np.array([[row[expert] for expert in sorted(row)] for _, row in sorted(total.items())])


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return (wall, CPU) seconds of one call, children included."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, cpu + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime


def compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], repeat: int
) -> float:
    """Run both in turn, print medians, return the median of the pairwise ratios of CPU time."""
    pairs = [(timed(ours), timed(theirs)) for _ in range(repeat)]
    mine = [pair[0] for pair in pairs]
    other = [pair[1] for pair in pairs]
    # CPU time: both are bound by it, and it does not depend on what else the machine does
    ratio = statistics.median(b[1] / a[1] for a, b in pairs)
    print(
        f"{name}: ours {statistics.median(a[0] for a in mine):.2f} s wall, "
        f"{statistics.median(a[1] for a in mine):.2f} s CPU; "
        f"other {statistics.median(b[0] for b in other):.2f} s wall, "
        f"{statistics.median(b[1] for b in other):.2f} s CPU; "
        f"ratio {ratio:.1f}"
    )
    return ratio


def bench_step_files(root: Path, scale: float, repeat: int) -> None:
    """Print the first comparison, and the peak memory of a process that does it."""
    num_files = max(8, round(4096 * scale))
    ours, theirs = make_step_files(root, num_files)
    num_bytes = sum(path.stat().st_size for path in ours.rglob("*.json"))
    assert (
        read_ours(ours).reshape(-1, LAYERS, EXPERTS).sum(axis=0) == read_key_by_key(theirs)
    ).all()
    print(f"{num_files} step files, {num_bytes / 1e6:.0f} MB")
    compare("to merged numpy", lambda: read_ours(ours), lambda: read_key_by_key(theirs), repeat)
    code = (
        "import resource, sys; from rl_insight_hooks.report.load import load;"
        "load(sys.argv[1], merge_ranks=True);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peak = subprocess.run(
        [sys.executable, "-c", code, ours], capture_output=True, text=True, check=True
    )
    print(f"peak memory of the process {int(peak.stdout) / 1e3:.0f} MB")


def bench_msprobe(root: Path, scale: float, repeat: int) -> None:
    """Print the second comparison, or our part alone."""
    num_files = make_msprobe_tree(root / "tree", max(1, round(4 * scale)))
    print(f"{num_files} group_list.pt")

    def draw() -> None:
        command = [
            sys.executable,
            "-m",
            "rl_insight_hooks.report.main",
            "heatmap",
            os.fspath(root / "tree"),
        ]
        subprocess.run(
            [*command, "-o", os.fspath(root / "ours.png")], check=True, capture_output=True
        )

    python = os.environ.get("RL_INSIGHT_021_PYTHON")
    if python is None:
        print(
            f"to PNG: ours {timed(draw)[0]:.2f} s wall (RL_INSIGHT_021_PYTHON is not set: no comparison)"
        )
        return

    def draw_theirs() -> None:
        command = [
            os.fspath(Path(python).with_name("rl-insight-recipe")),
            "preset=heatmap",
            f"input.path={root / 'tree'}",
            "input.rank_list=all",
            "heatmap.parser.type=gmm",
            "heatmap.visualizer.type=gmm_heatmap",
            f"output.path={root / 'theirs.png'}",
        ]
        subprocess.run(command, check=True, capture_output=True)

    compare("to PNG", draw, draw_theirs, repeat)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench_step_files(Path(folder) / "steps", options.scale, options.repeat)
    with tempfile.TemporaryDirectory() as folder:
        bench_msprobe(Path(folder), options.scale, options.repeat)


if __name__ == "__main__":
    main()
