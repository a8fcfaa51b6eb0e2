# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report pack``: fold finished step files into few small ones, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pack(
    data: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="DATA")],
    every: Annotated[int, typer.Option("--every", min=1, help="Steps in one pack.")] = 100,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="Newest steps of each role that stay JSON.")
    ] = 1,
    unpack: Annotated[bool, typer.Option("--unpack", help="Write the step files again.")] = False,
    json: Annotated[bool, typer.Option("--json", help="What was done, as JSON on stdout.")] = False,
) -> None:
    """Fold finished steps of each role and rank into one compressed file; readers see no difference."""
    from rl_insight_hooks.report.export_flat import problem_dict
    from rl_insight_hooks.report.pack import pack_folder, unpack_folder
    from rl_insight_hooks.report.speak import (
        fail_if_incomplete,
        progress_on_terminal,
        say_findings,
        write_json_line,
    )
    from rl_insight_hooks.report.volume import size_text

    with progress_on_terminal("unpacking" if unpack else "packing") as progress:
        if unpack:
            done = unpack_folder(data, progress=progress)
        else:
            done = pack_folder(data, every=every, keep=keep, progress=progress)
    say_findings(done.problems, ())
    if json:
        write_json_line(
            {
                "schema": "rl-insight-hooks/pack/1",
                "written": done.paths,
                "num_files": done.num_files,
                "bytes_before": done.bytes_before,
                "bytes_after": done.bytes_after,
                "problems": [problem_dict(problem) for problem in done.problems],
            }
        )
    else:
        typer.echo(
            f"{done.num_files} files, {size_text(done.bytes_before)} -> "
            f"{len(done.paths)} files, {size_text(done.bytes_after)}"
        )
    fail_if_incomplete(done.problems)
