# SPDX-License-Identifier: Apache-2.0
"""Mutated inputs of every format: no traceback, no hang, right exit, nothing dropped in silence.

``RL_INSIGHT_FUZZ=10000`` runs that many (nox session fuzz); the default is a quick subset. Each
case has a seed of its own, which a failure prints.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from rl_insight_hooks.errors import RlInsightError
from rl_insight_hooks.report.check import check
from rl_insight_hooks.report.load import load

NUM_CASES = int(os.environ.get("RL_INSIGHT_FUZZ", "600"))
FIRST_SEED = int(os.environ.get("RL_INSIGHT_FUZZ_SEED", "0"))
LIMIT_S = 5.0

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "load"
FORMATS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
# formats whose files carry a checksum or the sum of their counts: wrong numbers cannot pass for right ones
SELF_CHECKING = {"packed_v1", "sglang"}


def _flip(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _cut(rng, data):
    return data[: rng.randrange(len(data))]


def _cut_out(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 40) :]


def _insert(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 12)) + data[at:]


def _repeat(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + rng.randint(1, 60)] * rng.randint(2, 4) + data[at + 60 :]


def _zero(rng, data):
    at = rng.randrange(len(data))
    size = min(rng.randint(1, 64), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def _number(rng, data):
    """Replace a digit by something that a number should not be."""
    digits = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return _flip(rng, data)
    at = rng.choice(digits)
    new = rng.choice(
        [
            b"-1",
            b"0",
            b"1e999",
            b"NaN",
            b"null",
            b"9223372036854775808",
            b"9" * 30,
            b'"x"',
            b"1.5",
            b"-9223372036854775808",
            b"16777217",
            b"[1]",
            b"{}",
            b"true",
        ]
    )
    return data[:at] + new + data[at + 1 :]


def _garbage(rng, data):
    return rng.randbytes(rng.randint(0, 400))


def _nest(rng, data):
    at = rng.randrange(len(data))
    return data[:at] + rng.choice([b"[", b'{"a":']) * 50_000 + data[at:]


def _same(rng, data):
    return data + rng.choice([b"", b"\n", b" ", b"\0", data])


MUTATIONS = (
    _flip,
    _cut,
    _cut_out,
    _insert,
    _repeat,
    _zero,
    _number,
    _number,
    _garbage,
    _nest,
    _same,
)


def _rearrange(rng, root):
    """Move things about: swap two files, rename one, turn one into a folder or a link to itself."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path, other = rng.choice(files), rng.choice(files)
    what = rng.randrange(5)
    if what == 0 and path != other:
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif what == 1:
        path.rename(
            path.with_name(
                rng.choice(
                    [
                        "group_list.json",
                        "rank1.jsonl",
                        "pack_0-1.npz",
                        "dump.json",
                        "eplb_token_collects_x.json",
                        "rank0.safetensors",
                        "x.group_list.pt",
                    ]
                )
            )
        )
    elif what == 2:
        path.unlink()
        path.mkdir()
    elif what == 3:
        path.unlink()
        path.symlink_to(path.name)
    else:
        shutil.copy(path, path.with_name(f"copy-{path.name}"))


def _case(seed, root):
    rng = random.Random(seed)
    names = rng.sample(FORMATS, rng.choice([1, 1, 1, 2]))
    for name in names:
        shutil.copytree(GOLDEN / name, root / name)
    if rng.random() < 0.15:
        _rearrange(rng, root)
        return names, True
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    for path in rng.sample(files, min(len(files), rng.choice([1, 1, 1, 2, 3]))):
        path.write_bytes(rng.choice(MUTATIONS)(rng, path.read_bytes()))
    return names, False


def _keys(table):
    return {
        (
            int(table.step_N[row]),
            table.role_of(row),
            int(table.rank_N[row]),
            int(table.layer_N[row]),
            table.phase_of(row),
        )
        for row in range(table.num_rows)
    }


_PRISTINE: dict[tuple[str, ...], int] = {}


def _num_pristine(names):
    """Rows of the formats together, unspoiled (a step that is both JSON and packed counts once)."""
    key = tuple(sorted(names))
    if key not in _PRISTINE:
        _PRISTINE[key] = load([GOLDEN / name for name in names]).num_rows
    return _PRISTINE[key]


def _is_shorter_log(root):
    """Return True if a .jsonl was cut between two lines: then it is a shorter log, and nothing can tell."""
    pristine = GOLDEN / "megatron" / "tokens_per_expert" / "rank0.jsonl"
    path = root / pristine.relative_to(GOLDEN)
    if not path.is_file():
        return False
    data = path.read_bytes()
    return data.endswith(b"\n") and pristine.read_bytes().startswith(data)


def _try(run, seed):
    """Return (result, None), or (None, our error); any other exception, or a warning, is a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return run(), None
    except RlInsightError as error:
        return None, error
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}") from error


@pytest.mark.parametrize("batch", range(10))
def test_mutated_inputs(tmp_path, batch):
    for seed in range(FIRST_SEED + batch, FIRST_SEED + NUM_CASES, 10):
        root = tmp_path / str(seed)
        root.mkdir()
        names, rearranged = _case(seed, root)
        started = time.monotonic()
        table, refused = _try(partial(load, root), seed)
        assert refused is None or str(root) in str(refused), seed
        for run in (partial(load, root, merge_ranks=True), partial(check, root)):
            assert (_try(run, seed)[1] is None) == (refused is None), seed
        assert time.monotonic() - started < LIMIT_S, seed
        if table is not None:
            assert len(_keys(table)) == table.num_rows, seed
            assert (table.counts_NE >= 0).all(), seed
            assert all(p.where and p.what and p.fix and p.rule for p in table.problems), seed
            if (
                table.num_rows < _num_pristine(names)
                and not rearranged
                and not _is_shorter_log(root)
            ):
                said = [p for p in table.problems if p.severity != "note"] or table.assumptions
                assert said, f"seed {seed}: rows were dropped in silence"
        shutil.rmtree(root)
