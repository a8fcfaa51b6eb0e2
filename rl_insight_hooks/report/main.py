# SPDX-License-Identifier: Apache-2.0
"""Entry of ``rl-insight-report``: one message for an error, the right exit code, no traceback.

Exit codes: 0 ok, 1 failed, 2 usage, 3 a threshold was exceeded, 4 part of the data is missing or broken,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from rl_insight_hooks.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, RlInsightError

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run the command line ``argv``; return its exit code.

    ``--debug`` anywhere lets the traceback of an error through.
    """
    debug = "--debug" in argv
    argv = [arg for arg in argv if arg != "--debug"]
    try:
        return _run(argv)
    except RlInsightError as error:
        if debug:
            raise
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) went away: quiet, and no second error when stdout is closed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _say(f"error: {where}{error.strerror or error}")
        return EXIT_FAILED
    except MemoryError:
        _say(
            "error: out of memory; choose less with --step, --role or --layer, or use --merge-ranks"
        )
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        _say(
            f"error: {type(error).__name__}: {error} (a bug of rl-insight-report; --debug shows where, "
            "please report it)"
        )
        return EXIT_FAILED


def _run(argv: list[str]) -> int:
    import typer

    from rl_insight_hooks.report import cli

    # ClickException, of click or of typer's own copy of it
    click_error: Any = typer.BadParameter.__mro__[2]
    try:
        result = cli.invoke(argv)
    except typer.Exit as left:
        return left.exit_code
    except typer.Abort:
        return _EXIT_INTERRUPTED
    except click_error as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        _say(f"error: {message}")
        if context is not None:
            _say(f"try: {context.command_path} --help")
        return EXIT_USAGE
    return result if isinstance(result, int) else EXIT_OK


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
