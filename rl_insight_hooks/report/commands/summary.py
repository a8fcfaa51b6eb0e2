# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report summary``: the verdict as a table."""

from __future__ import annotations

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
    Rank,
    Role,
    Step,
    Strict,
)


def summary(
    data: Data,
    step: Step = None,
    role: Role = None,
    rank: Rank = None,
    layer: Layer = None,
    phase: Annotated[str | None, typer.Option("--phase", help="Phases: forward,...")] = None,
    ep_size: EpSizeJudged = None,
    num_devices: NumDevices = None,
    placement: ExpertMap = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above", help="metric=limit, e.g. max_over_mean=1.5: exit 3 beyond it."
        ),
    ] = None,
    layers_shown: Annotated[
        int, typer.Option("--layers-shown", help="Layers printed a role; 0: all.", min=0)
    ] = 10,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="Over ranks: auto, sum, max or one-rank.")
    ] = "auto",
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    strict: Strict = False,
    jobs: Jobs = 1,
    json: Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")] = False,
) -> None:
    """Judge the load: worst layers first, dead and hottest experts, trend, what an even load would save."""
    import sys

    from rl_insight_hooks.errors import IncompleteDataError, ThresholdExceededError
    from rl_insight_hooks.report.load import load
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        fail_if_none_left,
        progress_on_terminal,
        say_findings,
        write_json_line,
    )
    from rl_insight_hooks.report.summary import (
        devices_of,
        exceeded,
        parse_thresholds,
        summarize,
    )
    from rl_insight_hooks.report.summary_text import summary_lines

    limits = parse_thresholds(fail_above or [])
    with progress_on_terminal("reading") as progress:
        table = load(
            data,
            steps=step,
            roles=role,
            ranks=rank,
            layers=layer,
            phases=phase,
            merge_ranks=True,
            aggregate=aggregate,
            strict=strict,
            jobs=jobs,
            gmm_per_layer=gmm_per_layer,
            num_moe_layers=num_moe_layers,
            ep_size=ep_size,
            progress=progress,
        )
    fail_if_none_left(table, step=step, role=role, rank=rank, layer=layer, phase=phase)
    devices = devices_of(num_devices, placement, table.num_experts, ep_size=ep_size)
    found = summarize(table, devices)
    if json:
        write_json_line(found)
    else:
        sys.stdout.write("\n".join(summary_lines(found, num_layers=layers_shown)) + "\n")
    say_findings(table.problems, table.assumptions)
    beyond = exceeded(found, limits)
    if beyond:
        raise ThresholdExceededError("; ".join(beyond))
    fail_if_incomplete(table.problems)
    if not found.roles or (limits and all(r.max_over_mean is None for r in found.roles)):
        raise IncompleteDataError("there are no forward, eval or compiled counts to judge")
