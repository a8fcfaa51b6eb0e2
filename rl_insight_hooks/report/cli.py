# SPDX-License-Identifier: Apache-2.0
"""The commands of ``rl-insight-report``, by name; only the one that is asked for is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rl_insight_hooks._version import __version__
from rl_insight_hooks.report import grammar
from rl_insight_hooks.report.collect.ray_argument import with_ray_address

COMMANDS = {
    "summary": "The verdict as a table: worst layers, dead and hottest experts, trend.",
    "heatmap": "A picture: experts by layers, one block per step, role and rank.",
    "html": "One page for a browser: verdict, heatmap, devices, trend, table.",
    "compare": "Two runs, roles or steps: how far apart the routing is.",
    "export": "A flat table (csv, json, parquet) or an msprobe tree.",
    "check": "What is missing, broken or inconsistent, by rule.",
    "rebalance": "A placement of experts on devices, and what it will bring.",
    "pack": "Fold finished steps into one compressed file per role and rank.",
    "collect": "Bring node-local files together, over Ray or ssh.",
    "summarize": "Fold on the nodes of a Ray cluster, bring the table home.",
    "watch": "Follow a running job in the terminal.",
    "doctor": "What is hooked here and why not; what a run will cost.",
}

_EPILOG = "Keys as in rl-insight are understood too, e.g. input.path=D output.path=O heatmap.parser.step=1."


def invoke(argv: list[str]) -> Any:
    """Run ``argv``; returns what the command returned. Raises click's and our own errors."""
    argv = grammar.translate(with_ray_address(argv), COMMANDS, _command)
    name = next((arg for arg in argv if not arg.startswith("-")), None)
    app = _app(name if name in COMMANDS else None)
    return app(args=argv, prog_name="rl-insight-report", standalone_mode=False)


def _app(wanted: str | None) -> typer.Typer:
    app = typer.Typer(
        name="rl-insight-report",
        help="Expert load of MoE training: see it, judge it, place the experts anew.",
        epilog=_EPILOG,
        no_args_is_help=True,
        add_completion=wanted is None,
        rich_markup_mode=None,  # plain help: rich alone costs a third of the start
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    for name, help_text in COMMANDS.items():
        function = _command(name) if name == wanted else _placeholder
        app.command(name, short_help=help_text)(function)
    return app


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rl-insight-hooks {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Stand for the options before the command."""


def _command(name: str) -> Callable[..., Any]:
    """Return the function of the command ``name``."""
    module = importlib.import_module(f"rl_insight_hooks.report.commands.{name}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _placeholder() -> None:
    """Stand for a command in the list of ``--help``; never called."""
