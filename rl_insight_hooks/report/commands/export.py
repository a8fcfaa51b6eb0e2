# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report export``: the loads as csv, json, parquet or an msprobe tree."""

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
    Rank,
    Role,
    Step,
    Strict,
)


def export(
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="f.csv, f.json, f.parquet, or a folder (a name without ending) for msprobe.",
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", help="csv, json, parquet or msprobe; else from the name."),
    ] = None,
    step: Step = None,
    role: Role = None,
    rank: Rank = None,
    layer: Layer = None,
    phase: Annotated[str | None, typer.Option("--phase", help="Phases: forward,...")] = None,
    merge: Annotated[
        bool, typer.Option("--merge-ranks", help="Add up over ranks to global expert ids.")
    ] = False,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="Of --merge-ranks: auto, sum, max or one-rank.")
    ] = "auto",
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    ep_size: EpSize = None,
    strict: Strict = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace what is there.")] = False,
    jobs: Jobs = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Say on stdout, as JSON, what was written.")
    ] = False,
) -> None:
    """Write the loads as a flat table (csv, json, parquet), or as a tree that msprobe's readers read."""
    from rl_insight_hooks.report.export import export as write
    from rl_insight_hooks.report.export import format_of
    from rl_insight_hooks.report.export_flat import problem_dict
    from rl_insight_hooks.report.load import load
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        fail_if_none_left,
        progress_on_terminal,
        say_findings,
        write_json_line,
    )

    kind = format if format is not None else format_of(output)
    with progress_on_terminal("reading") as progress:
        table = load(
            data,
            steps=step,
            roles=role,
            ranks=rank,
            layers=layer,
            phases=phase,
            merge_ranks=merge,
            aggregate=aggregate,
            strict=strict,
            jobs=jobs,
            gmm_per_layer=gmm_per_layer,
            num_moe_layers=num_moe_layers,
            ep_size=ep_size,
            progress=progress,
        )
    fail_if_none_left(table, step=step, role=role, rank=rank, layer=layer, phase=phase)
    remarks = write(table, output, kind, overwrite=force)
    say_findings(table.problems, (*table.assumptions, *remarks))
    if json:
        write_json_line(
            {
                "schema": "rl-insight-hooks/export/1",
                "output": str(output),
                "format": kind,
                "num_rows": table.num_rows,
                "remarks": remarks,
                "assumptions": table.assumptions,
                "problems": [problem_dict(problem) for problem in table.problems],
            }
        )
    else:
        typer.echo(str(output))
    fail_if_incomplete(table.problems)
