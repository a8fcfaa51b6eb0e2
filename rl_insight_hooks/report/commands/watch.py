# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report watch``: follow a running job in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_insight_hooks.report.live import Snapshot


def watch(
    data: Annotated[
        Path, typer.Argument(help="The folder that the job writes to.", metavar="DATA")
    ],
    role: Annotated[str | None, typer.Option("--role", help="Only these roles: a,b.")] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-n", metavar="S", help="Seconds between two looks.")
    ] = 5.0,
    top: Annotated[int, typer.Option("--top", help="Worst layers of each role to show.")] = 8,
    once: Annotated[bool, typer.Option("--once", help="Look once, and stop.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Append lines, as without a terminal.")
    ] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus", metavar="FILE", help="Keep a Prometheus text file up to date."
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            "--tensorboard", metavar="DIR", help="Add finished steps to a TensorBoard log."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line on stdout, when it changes.")
    ] = False,
) -> None:
    """Follow a running job: worst layers, trend, missing ranks. Ctrl-C ends it."""
    import contextlib
    import sys
    import time

    from rl_insight_hooks.errors import DataError, IncompleteDataError, UsageError
    from rl_insight_hooks.report.exporters import PrometheusFile, TensorBoardLog
    from rl_insight_hooks.report.live import Follower
    from rl_insight_hooks.report.live_render import snapshot_lines
    from rl_insight_hooks.report.screen import Log, Terminal

    if interval <= 0:
        raise UsageError(f"--interval {interval:g}: more than 0 seconds")
    if top < 1:
        raise UsageError(f"--top {top}: at least 1")
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data}: is a file; watch follows the folder that a job writes to")
    exporters: list[Any] = []
    if prometheus is not None:
        exporters.append(PrometheusFile(prometheus))
    follower = Follower(data, role=role)
    on_terminal = sys.stdout.isatty() and not (plain or once or json)
    last: Snapshot | None = None
    with contextlib.ExitStack() as stack:
        if tensorboard is not None:
            log = TensorBoardLog(tensorboard)
            stack.callback(log.close)
            exporters.append(log)
        screen: Terminal | Log = Terminal(sys.stdout) if on_terminal else Log(sys.stdout)
        stack.enter_context(screen)
        while True:
            snapshot = follower.poll()
            if snapshot != last:
                for exporter in exporters:
                    exporter.write(snapshot)
            if json:
                if snapshot != last and (snapshot.roles or once):
                    _print_json(snapshot)
            else:
                screen.show(snapshot_lines(snapshot, num_layers=top))
            last = snapshot
            if once:
                break
            time.sleep(interval)
    if not snapshot.roles:
        raise DataError(f"{data}: no finished step there; is it the folder of the setting `path`?")
    if not snapshot.is_complete:
        raise IncompleteDataError("ranks are missing or files cannot be read; see above")


def _print_json(snapshot: Snapshot) -> None:
    import dataclasses

    from rl_insight_hooks.report.speak import write_json_line

    roles = []
    for view in snapshot.roles:
        said = dataclasses.asdict(view)
        said["shown"]["ranks"] = sorted(view.shown.ranks)
        roles.append({"role": view.shown.role, **said})
    write_json_line(
        {
            "schema": "rl-insight-hooks/watch/1",
            "folder": snapshot.folder,
            "roles": roles,
            "problems": snapshot.problems,
            "is_complete": snapshot.is_complete,
        }
    )
