# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report html``: the load as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    Data,
    EpSizeJudged,
    ExpertMap,
    GmmPerLayer,
    Jobs,
    Layer,
    NumDevices,
    NumMoeLayers,
    Role,
    Step,
    Strict,
)


def html(
    data: Data,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="page.html, or a folder for moe_load.html."),
    ] = Path("moe_load.html"),
    step: Step = None,
    role: Role = None,
    rank: Annotated[
        str | None,
        typer.Option("--rank", help="Ranks: 0,1 or all; default: all while they are few."),
    ] = None,
    layer: Layer = None,
    phase: Annotated[
        str | None,
        typer.Option("--phase", help="Phases; default: forward (what speaks for a role)."),
    ] = None,
    ep_size: EpSizeJudged = None,
    num_devices: NumDevices = None,
    placement: ExpertMap = None,
    title: Annotated[str | None, typer.Option("--title", help="Heading of the page.")] = None,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="Over merged ranks: auto, sum, max or one-rank.")
    ] = "auto",
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    strict: Strict = False,
    jobs: Jobs = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Say on stdout, as JSON, what was written.")
    ] = False,
) -> None:
    """Write one self-contained page: verdict, heatmap, devices, trend, table; opens without a network."""
    from rl_insight_hooks.errors import UsageError
    from rl_insight_hooks.report.heatmap_data import headline_only
    from rl_insight_hooks.report.load import load
    from rl_insight_hooks.report.page import data as page_data
    from rl_insight_hooks.report.page.write import write
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        need_rows,
        progress_on_terminal,
        say_findings,
        write_json_line,
    )
    from rl_insight_hooks.report.summary import devices_of

    with progress_on_terminal("reading") as progress:
        table = load(
            data,
            steps=step,
            roles=role,
            ranks=rank,
            layers=layer,
            phases=phase,
            merge_ranks=False,
            strict=strict,
            jobs=jobs,
            gmm_per_layer=gmm_per_layer,
            num_moe_layers=num_moe_layers,
            ep_size=ep_size,
            progress=progress,
        )
    need_rows(table, step=step, role=role, rank=rank, layer=layer, phase=phase)
    if phase is None:
        table = headline_only(table)
    if table.num_rows == 0:
        raise UsageError(
            "nothing to show: there are no forward, eval or compiled counts; give --phase"
        )
    devices = devices_of(num_devices, placement, table.num_experts, ep_size=ep_size)
    page = page_data.build(
        table, title=title or "MoE expert load", devices=devices, aggregate=aggregate
    )
    file = write(page, output)
    say_findings(table.problems, table.assumptions)
    if json:
        write_json_line(
            {"file": str(file), "num_bytes": file.stat().st_size, "notes": page.head["notes"]}
        )
    else:
        print(file)
    fail_if_incomplete(table.problems)
