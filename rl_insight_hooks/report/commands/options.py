# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share: what a dump does not say of itself."""

from __future__ import annotations

from typing import Annotated

import typer

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
