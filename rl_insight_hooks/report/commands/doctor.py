# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report doctor``: what is hooked here, and why not; what a run will cost."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Say what a run will cost in files and bytes, and stop."),
    ] = False,
    layers: Annotated[int, typer.Option("--layers", help="Of --estimate: MoE layers.", min=1)] = 58,
    experts: Annotated[
        int, typer.Option("--experts", help="Of --estimate: experts that a rank sees.", min=1)
    ] = 256,
    ranks: Annotated[
        int, typer.Option("--ranks", help="Of --estimate: ranks that write.", min=1)
    ] = 8,
    steps: Annotated[
        int, typer.Option("--steps", help="Of --estimate: steps recorded.", min=1)
    ] = 1000,
    roles: Annotated[int, typer.Option("--roles", help="Of --estimate: roles.", min=1)] = 3,
    phases: Annotated[
        int, typer.Option("--phases", help="Of --estimate: phases written.", min=1)
    ] = 1,
    pack_every: Annotated[
        int,
        typer.Option(
            "--pack-every", help="Of --estimate: pack every so many steps; 0: never.", min=0
        ),
    ] = 0,
    do_import: Annotated[
        bool,
        typer.Option(
            "--import/--no-import", help="Import what is installed, to see what would be hooked."
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON on stdout.")] = False,
) -> None:
    """Show versions, what would be hooked in this environment and why not, and who stands on the attributes."""
    from rl_insight_hooks.report.speak import write_json_line

    if estimate:
        import dataclasses

        from rl_insight_hooks.report.volume import RunShape, size_text
        from rl_insight_hooks.report.volume import estimate as estimate_volume

        volume = estimate_volume(
            RunShape(
                num_layers=layers,
                num_experts=experts,
                num_ranks=ranks,
                num_steps=steps,
                num_roles=roles,
                num_phases=phases,
                pack_every=pack_every,
            )
        )
        if json:
            write_json_line(dataclasses.asdict(volume))
        else:
            print(f"files  {volume.num_files:,}")
            print(f"bytes  {size_text(volume.num_bytes)}")
            print(f"a step, role and rank: {size_text(volume.json_bytes_per_step)} as JSON")
            print(f"                       {size_text(volume.packed_bytes_per_step)} packed")
        return
    from rl_insight_hooks.diagnose import diagnose, lines

    found = diagnose(import_targets=do_import)
    if json:
        write_json_line(found)
    else:
        print("\n".join(lines(found)))
