# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report summarize``: fold the loads on the nodes, bring only the merged table home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    Layer,
    Rank,
    Role,
    Step,
)

if TYPE_CHECKING:
    from rl_insight_hooks.report.collect.fold import Folded
    from rl_insight_hooks.report.summary import Summary


def summarize(
    data: Annotated[str, typer.Argument(help="The data folder on the nodes.", metavar="DATA")],
    ray: Annotated[
        str,
        typer.Option("--ray", metavar="[ADDRESS]", help="The running Ray cluster."),
    ] = "auto",
    step: Step = None,
    role: Role = None,
    rank: Rank = None,
    layer: Layer = None,
    phase: Annotated[str | None, typer.Option("--phase", help="Phases: forward,...")] = None,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="auto (replicas once), sum or max.")
    ] = "auto",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the merged table: f.csv, f.json or f.parquet."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace what is there.")] = False,
    ep_size: Annotated[
        int | None, typer.Option("--ep-size", help="Devices: judge them too, experts in a row.")
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above", help="metric=limit, e.g. max_over_mean=1.5: exit 3 beyond it."
        ),
    ] = None,
    layers_shown: Annotated[
        int, typer.Option("--layers-shown", help="Layers printed a role; 0: all.", min=0)
    ] = 10,
    parallel: Annotated[int, typer.Option("--parallel", help="Nodes at a time.")] = 8,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds without an answer to give up.")
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")] = False,
) -> None:
    """Fold the loads of all nodes of a Ray cluster where they lie; exit code 4 if a node or rank is missing."""
    from rl_insight_hooks.errors import DataError, ThresholdExceededError, UsageError
    from rl_insight_hooks.report.collect.fold import AGGREGATES, fold_sources
    from rl_insight_hooks.report.collect.node import INCLUDE
    from rl_insight_hooks.report.collect.ray_transport import (
        check_template,
        connected,
        ray_sources,
    )
    from rl_insight_hooks.report.select import make_selection
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        progress_on_terminal,
        say_findings,
    )
    from rl_insight_hooks.report.summary import Devices, exceeded, parse_thresholds
    from rl_insight_hooks.report.summary import summarize as judge

    limits = parse_thresholds(fail_above or [])
    check_template(data)
    if aggregate not in AGGREGATES:
        raise UsageError(
            f"--aggregate {aggregate!r}: choose one of {', '.join(AGGREGATES)} (others need all ranks at "
            "one place: use collect)"
        )
    if parallel < 1 or timeout <= 0:
        raise UsageError("--parallel is at least 1, --timeout more than 0 seconds")
    kind = _kind_of(output, force)
    selection = make_selection(steps=step, roles=role, ranks=rank, layers=layer, phases=phase)
    with (
        connected(ray, ship_package=True) as cluster,
        progress_on_terminal("folding", "nodes") as progress,
    ):
        sources, dead = ray_sources(cluster, data, INCLUDE, timeout)
        folded = fold_sources(
            sources, selection=selection, aggregate=aggregate, parallel=parallel, progress=progress
        )
    table = folded.table
    say_findings(table.problems, table.assumptions)
    for name in dead:
        typer.echo(f"note: node {name} was dead before we began", err=True)
    if not table.num_rows:
        raise DataError(f"{data}: no node has loads there that the filters let through")
    if output is not None and kind is not None:
        from rl_insight_hooks.report.export import export

        export(table, output, kind, overwrite=force)
    found = judge(table, Devices(num_devices=ep_size))
    if json:
        _print_json(folded, found, len(sources), dead)
    else:
        _print_text(folded, found, len(sources), layers_shown)
    beyond = exceeded(found, limits)
    if beyond:
        raise ThresholdExceededError("; ".join(beyond))
    fail_if_incomplete(table.problems)


def _kind_of(output: Path | None, force: bool) -> str | None:
    """Return the format of ``output``; a bad one is refused before any node is asked."""
    if output is None:
        return None
    from rl_insight_hooks.errors import UsageError
    from rl_insight_hooks.report.export import format_of

    kind = format_of(output)
    if kind == "msprobe":
        raise UsageError(
            f"--output {output}: a merged table has no ranks; choose csv, json or parquet"
        )
    if output.exists() and not force:
        raise UsageError(f"--output {output}: is there already; give --force to replace it")
    return kind


def _print_text(folded: Folded, found: Summary, num_nodes: int, num_layers: int) -> None:
    from rl_insight_hooks.report.collect.render import size_text
    from rl_insight_hooks.report.summary_text import summary_lines

    for line in summary_lines(found, num_layers=num_layers):
        typer.echo(line)
    typer.echo(
        f"\n{num_nodes} nodes, {folded.num_files} files, {folded.table.num_rows} merged rows, "
        f"{size_text(folded.num_bytes)} of counts came home"
    )


def _print_json(folded: Folded, found: Summary, num_nodes: int, dead: list[str]) -> None:
    from rl_insight_hooks.report.speak import write_json_line

    write_json_line(
        {
            "schema": "rl-insight-hooks/summarize/1",
            "num_nodes": num_nodes,
            "failed_nodes": folded.failed,
            "dead_nodes": dead,
            "num_files": folded.num_files,
            "num_bytes": folded.num_bytes,
            "summary": found,
        }
    )
