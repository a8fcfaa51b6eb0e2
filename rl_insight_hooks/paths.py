# SPDX-License-Identifier: Apache-2.0
"""Where files lie below the output folder."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path

from rl_insight_hooks.schema import COLLECTS_PREFIX, LOAD_FILE_NAME, NO_STEP_DIR

_UNSAFE = re.compile(r"[/\\\0]|^\.+$")
_MAX_NAME_BYTES = 255  # of one path part, on every common file system


def load_file_path(root: str, step: int | None, role: str, rank: int) -> Path:
    """Return ``<root>/step_<n>/<role>/rank<r>/group_list.json``; ``step_none`` for a role without steps."""
    step_dir = NO_STEP_DIR if step is None else f"step_{step}"
    return Path(root) / step_dir / role_dir(role) / f"rank{rank}" / LOAD_FILE_NAME


def role_dir(role: str) -> str:
    """Return ``role`` as one path part: separators become "_".

    A name that had to change, or is too long, ends in a hash of the role, so that no two roles share a folder.
    """
    safe = _UNSAFE.sub("_", role).encode()
    if safe == role.encode() and 0 < len(safe) <= _MAX_NAME_BYTES:
        return role
    digest = hashlib.sha256(role.encode()).hexdigest()[:8]
    return f"{safe[: _MAX_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"


def collects_path(root: str, rank: int) -> Path:
    """Return ``<root>/eplb_token_collects_<rank>.json``."""
    return Path(root) / f"{COLLECTS_PREFIX}{rank}.json"


def kept_collects_path(target: Path) -> Path:
    """Return a free name for an earlier run's collects that no ``*.json`` reader takes for new."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(target.stat().st_mtime))
    kept = target.with_name(f"{target.name}.{stamp}.old")
    number = 1
    while kept.exists():
        kept = target.with_name(f"{target.name}.{stamp}.{number}.old")
        number += 1
    return kept
