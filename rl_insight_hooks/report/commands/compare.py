# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report compare``: two runs, roles or steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    EpSize,
    GmmPerLayer,
    Layer,
    NumMoeLayers,
    Rank,
    Strict,
)


def compare(
    data: Annotated[Path, typer.Argument(help="The first side: file or folder.", metavar="A")],
    other: Annotated[
        Path | None,
        typer.Argument(help="The second side; without it --roles or --steps.", metavar="[B]"),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option("--roles", "--role", help="Two roles a,b of A; or the one role of A and B."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="Two steps a,b of A (one role).")
    ] = None,
    step: Annotated[str | None, typer.Option("--step", help="Steps of both sides: 1,3-7.")] = None,
    rank: Rank = None,
    layer: Layer = None,
    layers_shown: Annotated[
        int, typer.Option("--layers-shown", help="Layers printed; 0: all.", min=0)
    ] = 10,
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    ep_size: EpSize = None,
    strict: Strict = False,
    json: Annotated[bool, typer.Option("--json", help="The comparison as JSON on stdout.")] = False,
) -> None:
    """Say how far apart the routing of two runs, roles or steps is: rollout against training above all."""
    import sys

    from rl_insight_hooks.errors import UsageError
    from rl_insight_hooks.report.compare import compare as compare_loads
    from rl_insight_hooks.report.compare import comparison_lines, role_load
    from rl_insight_hooks.report.load import load
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        need_rows,
        say_findings,
        write_json_line,
    )

    def read(path: Path, role: str | None, only: str | None) -> tuple[object, ...]:
        table = load(
            path,
            steps=only,
            roles=role,
            ranks=rank,
            layers=layer,
            merge_ranks=True,
            strict=strict,
            gmm_per_layer=gmm_per_layer,
            num_moe_layers=num_moe_layers,
            ep_size=ep_size,
        )
        need_rows(table, step=only, role=role, rank=rank, layer=layer)
        return (table, *role_load(table, role))

    names = roles.split(",") if roles else []
    numbers = steps.split(",") if steps else []
    if other is not None:
        if numbers or len(names) > 1:
            raise UsageError(
                "A and B are compared in one role: give --roles one name, and --step for steps"
            )
        role = names[0] if names else None
        sides = [(data, role, step, str(data)), (other, role, step, str(other))]
    elif len(names) == 2 and not numbers:
        sides = [(data, name, step, name) for name in names]
    elif len(numbers) == 2 and len(names) <= 1:
        role = names[0] if names else None
        sides = [(data, role, n.strip(), f"step {n.strip()}") for n in numbers]
    else:
        raise UsageError("say what to compare: A B, or A with --roles a,b, or A with --steps a,b")
    tables, loads = [], []
    for path, role, only, label in sides:
        table, _, layers_L, load_LE = read(path, role, only)
        tables.append(table)
        loads.append((label, layers_L, load_LE))
    found = compare_loads(loads[0], loads[1], tables[0].layer_names)  # type: ignore[arg-type, attr-defined]
    if json:
        write_json_line(found)
    else:
        sys.stdout.write("\n".join(comparison_lines(found, num_layers=layers_shown)) + "\n")
    problems = [p for table in tables for p in table.problems]  # type: ignore[attr-defined]
    assumptions = list(dict.fromkeys(a for table in tables for a in table.assumptions))  # type: ignore[attr-defined]
    say_findings(problems, assumptions)
    fail_if_incomplete(problems)
