# SPDX-License-Identifier: Apache-2.0
"""Where ``rebalance`` writes: never over the map that was loaded, nor over what is no map, unless forced."""

from __future__ import annotations

from pathlib import Path

from rl_insight_hooks.atomic import write_atomic
from rl_insight_hooks.errors import DataError, UsageError
from rl_insight_hooks.rebalance.formats import sniff
from rl_insight_hooks.report.rebalance_text import MOVES_SCHEMA


def check_target(output: Path, from_map: Path | None, force: bool) -> None:
    """Raise if a map may not be written to ``output``. A map of an earlier call may be replaced.

    Raises:
        UsageError: it is a folder; or it is the map that was loaded or holds something else, and not ``force``.
    """
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file for the map")
    if force or not output.exists():
        return
    if from_map is not None and from_map.exists() and output.samefile(from_map):
        raise UsageError(
            f"{output} is the map that was loaded; give another name, or --force to replace it"
        )
    try:
        sniff(output.read_bytes())
    except DataError:
        raise UsageError(
            f"{output} exists and is no expert map; give another name, or --force to replace it"
        ) from None


def check_new(path: Path, force: bool) -> None:
    """Raise if ``path`` exists and ``force`` is not set.

    Raises:
        UsageError: it exists.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists; give another name, or --force to replace it")


def check_plot(path: Path, force: bool) -> None:
    """Raise if a picture may not be written to ``path``.

    Raises:
        UsageError: the name does not end in .png, or the file exists and ``force`` is not set.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: the picture is a PNG; give a name that ends in .png")
    check_new(path, force)


def check_moves(path: Path, force: bool) -> None:
    """Raise if ``path`` holds something that is no transfer plan, and ``force`` is not set.

    Raises:
        UsageError: it does, or is a folder.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file for the transfers")
    if path.exists() and not force and MOVES_SCHEMA.encode() not in path.read_bytes():
        raise UsageError(
            f"{path} exists and is no transfer plan; give another name, or --force to replace it"
        )


def write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; its folder is made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def beside_collects(output: Path) -> bool:
    """Return True if ``output`` lies beside token-collects files, whose tools read every ``.json`` there."""
    return output.suffix == ".json" and any(output.parent.glob("eplb_token_collects_*.json"))
