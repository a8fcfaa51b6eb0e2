# SPDX-License-Identifier: Apache-2.0
"""``--ray [ADDRESS]``: an option whose value may be left out, which typer cannot say. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"

_ADDRESS = re.compile(r"auto|local|ray://\S+|[A-Za-z0-9_.-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")


def with_ray_address(args: Sequence[str]) -> list[str]:
    """Return ``args`` with ``auto`` put in after each ``--ray`` that no address follows.

    >>> with_ray_address(["collect", "--ray", "/data", "-o", "home"])
    ['collect', '--ray', 'auto', '/data', '-o', 'home']
    """
    out: list[str] = []
    for number, arg in enumerate(args):
        out.append(arg)
        following = args[number + 1] if number + 1 < len(args) else ""
        if arg == "--ray" and not _ADDRESS.fullmatch(following):
            out.append(AUTO)
    return out
