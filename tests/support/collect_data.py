# SPDX-License-Identifier: Apache-2.0
"""Data folders as the recorder leaves them on a node, with counts that a test can compute on its own."""

from __future__ import annotations

import pathlib

import numpy as np

from rl_insight_hooks.paths import collects_path, load_file_path
from rl_insight_hooks.schema import LoadFile, Parallel, Producer, Record, encode_load_file

NUM_LAYERS = 3
NUM_EXPERTS = 16


def counts_of(step: int, rank: int, layer: int, width: int = NUM_EXPERTS) -> list[int]:
    rng = np.random.default_rng([step, rank, layer])
    return rng.integers(0, 1000, width).tolist()


def make_file(
    step: int | None,
    rank: int,
    *,
    role: str = "actor_update",
    world_size: int = 64,
    ended: float = 100.0,
    writer: str = "node-1-1",
    first_expert: int = 0,
    width: int = NUM_EXPERTS,
    seed_rank: int | None = None,
    replica_group: str | None = None,
) -> bytes:
    seed = rank if seed_rank is None else seed_rank
    records = []
    for layer in range(NUM_LAYERS):
        counts = counts_of(step or 0, seed, layer, width)
        records.append(
            Record(
                layer=layer,
                layer_source="module",
                phase="forward",
                seam="test",
                num_calls=3,
                num_passes=1,
                num_assignments=sum(counts),
                counts=counts,
            )
        )
    return encode_load_file(
        LoadFile(
            schema_version=1,
            producer=Producer("rl-insight-hooks", "0"),
            run_id="run",
            writer=writer,
            step=step,
            step_source="given",
            role=role,
            rank=rank,
            world_size=world_size,
            parallel=Parallel(replica_group=replica_group),
            num_experts=NUM_EXPERTS,
            top_k=2,
            first_expert=first_expert,
            id_space="logical",
            tokens_layout="disjoint" if replica_group is None else "replicated",
            num_regions=1,
            started_unix_s=ended - 1,
            ended_unix_s=ended,
            records=records,
        )
    )


def write_step_file(root: pathlib.Path, step: int, rank: int, data: bytes | None = None, **kw):
    role = kw.get("role", "actor_update")
    path = load_file_path(str(root), step, role, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(make_file(step, rank, **kw) if data is None else data)
    return path


def write_node(root: pathlib.Path, ranks, steps, **kw) -> None:
    for step in steps:
        for rank in ranks:
            write_step_file(root, step, rank, **kw)


def write_collects(root: pathlib.Path, rank: int, text: str) -> pathlib.Path:
    path = collects_path(str(root), rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def tree(root: pathlib.Path) -> dict[str, bytes]:
    """Every file below ``root`` that is no hidden one, by its path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
