# SPDX-License-Identifier: Apache-2.0
"""Where live lines go: repainted on a terminal, appended elsewhere."""

from __future__ import annotations

import shutil
from typing import TextIO

_ENTER = "\x1b[?1049h\x1b[?25l"  # the second screen, without a cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_REPAINT = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


class Terminal:
    """Paints over the whole terminal and leaves it as it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: list[str] = []

    def __enter__(self) -> Terminal:
        self._stream.write(_ENTER)
        self._stream.flush()
        return self

    def show(self, lines: list[str]) -> None:
        """Paint ``lines``, as many as fit."""
        size = shutil.get_terminal_size()
        self._last = lines
        cut = [line[: size.columns - 1] + _CLEAR_LINE for line in lines[: size.lines - 1]]
        self._stream.write(_REPAINT + "\n".join(cut) + "\n" + _CLEAR_BELOW)
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        self._stream.write(_LEAVE + "".join(f"{line}\n" for line in self._last))
        self._stream.flush()


class Log:
    """Appends each new state; what did not change is not said again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: list[str] = []

    def __enter__(self) -> Log:
        return self

    def show(self, lines: list[str]) -> None:
        """Print ``lines`` if they are new."""
        if lines == self._last:
            return
        if self._last:
            self._stream.write("\n")
        self._last = lines
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def __exit__(self, *_: object) -> None:
        self._stream.flush()
