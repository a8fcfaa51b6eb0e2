# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report heatmap``: a picture of the load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    Data,
    EpSize,
    GmmPerLayer,
    Jobs,
    Layer,
    NumMoeLayers,
    Role,
    Step,
    Strict,
)


def heatmap(
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="f.png, f.svg, f.pdf, or a folder for gmm_heatmap.png."
        ),
    ] = Path("gmm_heatmap.png"),
    step: Step = None,
    role: Role = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank", help="0,1 or all: a block for each rank; without it ranks are merged."
        ),
    ] = None,
    layer: Layer = None,
    phase: Annotated[
        str | None,
        typer.Option("--phase", help="Phases; default: forward (what speaks for a role)."),
    ] = None,
    view: Annotated[
        str, typer.Option("--view", help="layers, ranks, steps or experts.")
    ] = "layers",
    normalize: Annotated[str, typer.Option("--normalize", help="none, row or layer.")] = "none",
    sort: Annotated[str, typer.Option("--sort", help="Columns by expert, or by load.")] = "expert",
    log: Annotated[bool, typer.Option("--log", help="Logarithmic colours.")] = False,
    cmap: Annotated[str, typer.Option("--cmap", help="A colour map of matplotlib.")] = "viridis",
    dpi: Annotated[int, typer.Option("--dpi", help="Dots per inch of a PNG.")] = 200,
    title: Annotated[
        str | None, typer.Option("--title", help="Title; default: what is shown.")
    ] = None,
    hottest: Annotated[int, typer.Option("--hottest", help="Cells to name.", min=0, max=20)] = 5,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="Over merged ranks: auto, sum, max or one-rank.")
    ] = "auto",
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    ep_size: EpSize = None,
    strict: Strict = False,
    jobs: Jobs = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Say on stdout, as JSON, what was drawn.")
    ] = False,
) -> None:
    """Draw experts by layers, one block per step, role and rank, with the imbalance of each row beside."""
    import sys

    from rl_insight_hooks.report import heatmap_data
    from rl_insight_hooks.report.load import load
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        need_rows,
        progress_on_terminal,
        say_findings,
        write_json_line,
    )

    merged = rank is None and view != "ranks"
    with progress_on_terminal("reading") as progress:
        table = load(
            data,
            steps=step,
            roles=role,
            ranks=rank,
            layers=layer,
            phases=phase,
            merge_ranks=merged,
            aggregate=aggregate,
            strict=strict,
            jobs=jobs,
            gmm_per_layer=gmm_per_layer,
            num_moe_layers=num_moe_layers,
            ep_size=ep_size,
            progress=progress,
        )
    need_rows(table, step=step, role=role, rank=rank, layer=layer, phase=phase)
    if phase is None:
        table = heatmap_data.headline_only(table)
    picture = heatmap_data.build(
        table, view=view, normalize=normalize, sort=sort, num_hottest=hottest
    )

    from rl_insight_hooks.report.heatmap import Style, draw

    shown = title or f"Expert load by {picture.row_name} and {picture.column_name}" + (
        ", ranks merged" if merged and view != "ranks" else ""
    )
    files, notes = draw(picture, output, Style(dpi=dpi, cmap=cmap, log=log, title=shown))
    say_findings(table.problems, table.assumptions)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if json:
        hot = [
            {"label": h.label, "tokens": h.tokens, "over_mean": h.over_mean}
            for h in picture.hottest
        ]
        write_json_line({"files": [str(f) for f in files], "hottest": hot, "notes": notes})
    else:
        for file in files:
            print(file)
    fail_if_incomplete(table.problems)
