# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    list[Path],
    typer.Argument(help="Files or folders; formats are recognised.", metavar="DATA..."),
]
Step = Annotated[str | None, typer.Option("--step", help="Steps: 1,3-7.")]
Role = Annotated[str | None, typer.Option("--role", help="Roles: a,b.")]
Rank = Annotated[str | None, typer.Option("--rank", help="Ranks: 0,1 or all.")]
Layer = Annotated[str | None, typer.Option("--layer", help="Layers: 0,3-7.")]
ExpertMap = Annotated[
    Path | None, typer.Option("--map", help="An expert map: judge the devices under it.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Processes that read.")]

# what a dump does not say of itself
GmmPerLayer = Annotated[
    int | None, typer.Option("--gmm-per-layer", help="msprobe: calls of one layer pass.", min=1)
]
NumMoeLayers = Annotated[
    int | None, typer.Option("--num-moe-layers", help="msprobe: MoE layers of one rank.", min=1)
]
EpSize = Annotated[
    int | None,
    typer.Option(
        "--ep-size", help="msprobe, Megatron: ranks that share the experts between them.", min=1
    ),
]
EpSizeJudged = Annotated[
    int | None,
    typer.Option(
        "--ep-size",
        help="Ranks that share the experts: dumps are read so, and devices are judged.",
        min=1,
    ),
]
NumDevices = Annotated[
    int | None,
    typer.Option(
        "--num-devices", "--num-npus", help="Judge so many devices, experts in a row.", min=1
    ),
]
