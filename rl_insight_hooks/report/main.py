# SPDX-License-Identifier: Apache-2.0
"""Entry of ``rl-insight-report``: one message for an error, the right exit code, no traceback.

Exit codes: 0 ok, 1 failed, 2 usage, 3 a threshold was exceeded, 4 part of the data is missing or broken,
130 interrupted. With ``--json`` an error that leaves no result is an object on stdout as well.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from rl_insight_hooks.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, RlInsightError
from rl_insight_hooks.report import speak

_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    os.environ["MPLBACKEND"] = "agg"  # pictures go to files, whatever the shell asks for
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run the command line ``argv``; return its exit code.

    ``--debug`` anywhere lets the traceback of an error through.
    """
    _make_streams_safe()
    speak.forget_json()
    debug = "--debug" in argv
    argv = [arg for arg in argv if arg != "--debug"]
    try:
        return _run(argv)
    except RlInsightError as error:
        if debug:
            raise
        return _fail(argv, str(error), error.exit_code)
    except KeyboardInterrupt:
        _say("interrupted")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return _fail(argv, f"{where}{error.strerror or error}", EXIT_FAILED)
    except MemoryError:
        return _fail(
            argv,
            "out of memory; choose less with --step, --role or --layer, or use --merge-ranks",
            EXIT_FAILED,
        )
    except Exception as error:
        if debug:
            raise
        return _fail(
            argv,
            f"{type(error).__name__}: {error} (a bug of rl-insight-report; --debug shows where, "
            "please report it)",
            EXIT_FAILED,
        )


def _make_streams_safe() -> None:
    """Let a closed stdout or stderr, or one that cannot write a role's name, cost no error."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _reader_left() -> int:
    """End quietly after head or less went away, with no second error when stdout is closed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK


def _fail(argv: Sequence[str], message: str, exit_code: int) -> int:
    """Say why there is no result: on stderr, and for machines on stdout."""
    _say(f"error: {message}")
    if "--json" in argv and not speak.wrote_json():
        with contextlib.suppress(OSError):
            speak.write_json_line({"error": message, "exit_code": exit_code})
    return exit_code


def _run(argv: list[str]) -> int:
    import typer

    from rl_insight_hooks.report import cli

    # ClickException, of click or of typer's own copy of it
    click_error: Any = typer.BadParameter.__mro__[2]
    try:
        result = cli.invoke(argv)
    except SystemExit:
        return _reader_left()  # click turns a broken pipe, and nothing else, into this
    except typer.Exit as left:
        return left.exit_code
    except typer.Abort:
        _say("interrupted")
        return _EXIT_INTERRUPTED
    except click_error as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        context = getattr(error, "ctx", None)
        if not argv:
            _say(message)  # the help: nothing was asked for
            return EXIT_USAGE
        code = _fail(argv, message, EXIT_USAGE)
        if context is not None:
            _say(f"try: {context.command_path} --help")
        return code
    return result if isinstance(result, int) else EXIT_OK


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
