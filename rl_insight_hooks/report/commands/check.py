# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report check``: what is missing, broken or inconsistent, by rules with ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    EpSize,
    GmmPerLayer,
    Jobs,
    NumMoeLayers,
)


def check(
    data: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders; formats are recognised.", metavar="DATA..."),
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules, and stop.")] = False,
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    ep_size: EpSize = None,
    jobs: Jobs = 1,
    json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False,
) -> None:
    """Check recorded data against the rules of its format; exit code 4 if something is lost."""
    from rl_insight_hooks.errors import UsageError
    from rl_insight_hooks.report.rules import RULES
    from rl_insight_hooks.report.speak import write_json_line

    if rules:
        if json:
            write_json_line({"schema": "rl-insight-hooks/check-rules/1", "rules": RULES})
        else:
            width = max(map(len, RULES))
            for rule, meaning in RULES.items():
                typer.echo(f"{rule:<{width}}  {meaning}")
        return
    if not data:
        raise UsageError("check needs DATA: a file or folder (or --rules to list the rules)")

    from rl_insight_hooks.report.check import check as run
    from rl_insight_hooks.report.export_flat import problem_dict
    from rl_insight_hooks.report.speak import fail_if_incomplete, finding_lines

    result = run(
        data,
        jobs=jobs,
        gmm_per_layer=gmm_per_layer,
        num_moe_layers=num_moe_layers,
        ep_size=ep_size,
    )
    table = result.table
    if json:
        write_json_line(
            {
                "schema": "rl-insight-hooks/check/1",
                "num_files": result.num_files,
                "num_rows": table.num_rows,
                "sources": table.sources,
                "roles": table.roles,
                "num_errors": result.num_errors,
                "assumptions": table.assumptions,
                "problems": [problem_dict(problem) for problem in result.problems],
            }
        )
    else:
        for line in finding_lines(result.problems, table.assumptions):
            typer.echo(line)
        num_others = sum(problem.num for problem in result.problems) - result.num_errors
        verdict = "complete" if not result.num_errors else "INCOMPLETE"
        typer.echo(
            f"{verdict}: {result.num_files} files ({', '.join(table.sources) or 'none readable'}), "
            f"{table.num_rows} rows, {result.num_errors} errors, {num_others} warnings and notes"
        )
    fail_if_incomplete(result.problems)
