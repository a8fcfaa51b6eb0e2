# SPDX-License-Identifier: Apache-2.0
"""The shell scripts that run on ssh hosts, and how their answers are read. Pure.

They need ``sh``, ``find``, ``stat``, ``xargs``, ``sha256sum`` and ``tar`` (GNU or busybox), nothing of ours. A
script goes in by stdin of ``sh``, so no login shell and no quoting on the way can change it. An answer begins
after a marker: what a chatty ``.bashrc`` prints before is skipped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl_insight_hooks.report.collect.model import FileStat

MARKER = b"rl-insight-collect-begin\n"
NO_FOLDER = 44  # exit code: the folder is not there
NO_TOOL = 45  # exit code: a program is missing; its name is on stderr

_END_OF_PATHS = "rl-insight-collect-end-of-paths"


@dataclass(frozen=True, slots=True)
class Listing:
    """What a host answers to ``survey_script``."""

    folder: str
    files: tuple[FileStat, ...]
    is_clock_fine: bool
    has_rsync: bool
    odd_lines: tuple[str, ...]  # names that cannot be copied, e.g. with a line break in them


def survey_script(path: str, include: Sequence[str]) -> str:
    """Return the script that lists the load files below ``path``."""
    names = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in include)
    return f"""{_begin(path, ("find", "stat", "xargs", "sha256sum", "tar"))}
pwd -P
command -v rsync >/dev/null 2>&1 && echo rsync || echo no-rsync
case "$(stat -c %.9Y . 2>/dev/null)" in
  *[!0-9.]*|'') clock=%Y ;;
  *.*) clock=%.9Y ;;
  *) clock=%Y ;;
esac
find . -name '.?*' -prune -o -type f \\( {names} \\) -exec stat -c "%i %s $clock %n" {{}} + 2>/dev/null
exit 0
"""


def hash_script(path: str, paths: Iterable[str]) -> str:
    """Return the script that prints sha256 and path of each of ``paths``."""
    return f"""{_begin(path, ("xargs", "sha256sum"))}
tr '\\n' '\\0' <<'{_END_OF_PATHS}' | xargs -0 sha256sum -- 2>/dev/null
{_lines(paths)}{_END_OF_PATHS}
exit 0
"""


def tar_script(path: str, paths: Iterable[str]) -> str:
    """Return the script that writes ``paths`` as a tar to stdout."""
    return f"""{_begin(path, ("tar",))}
list=$(mktemp) || exit 1
trap 'rm -f "$list"' EXIT HUP INT TERM
while IFS= read -r name; do
  [ -f "$name" ] && printf '%s\\n' "$name"
done >"$list" <<'{_END_OF_PATHS}'
{_lines(paths)}{_END_OF_PATHS}
tar -cf - -T "$list" 2>/dev/null
exit 0
"""


def _begin(path: str, tools: Sequence[str]) -> str:
    """Return the lines that go to the folder; ``~`` is the host's home, all else is taken literally."""
    if path == "~" or path.startswith("~/"):
        folder = '"$HOME"/' + shlex.quote(path[2:])
    else:
        folder = shlex.quote(path)
    return f"""LC_ALL=C; export LC_ALL
for tool in {" ".join(tools)}; do
  command -v $tool >/dev/null 2>&1 || {{ echo "$tool" >&2; exit {NO_TOOL}; }}
done
CDPATH= cd -- {folder} 2>/dev/null || exit {NO_FOLDER}
printf '%s' '{MARKER.decode()}'"""


def _lines(paths: Iterable[str]) -> str:
    return "".join(f"./{path}\n" for path in paths)


def after_marker(answer: bytes) -> bytes | None:
    """Return what follows the marker; None if it never came."""
    _, found, rest = answer.partition(MARKER)
    return rest if found else None


_STAT_LINE = re.compile(r"(\d+) (\d+) (\d+)(?:\.(\d{9}))? \./(.+)")


def read_survey(answer: bytes) -> Listing:
    """Return the listing in what ``survey_script`` printed after the marker.

    Raises:
        ValueError: it is cut off or of another shape.
    """
    lines = answer.decode("utf-8", "surrogateescape").split("\n")
    if len(lines) < 3 or lines[1] not in ("rsync", "no-rsync"):
        raise ValueError(f"odd answer: {answer[:80]!r}")
    files, odd = [], []
    is_clock_fine = True
    for line in lines[2:]:
        if not line:
            continue
        match = _STAT_LINE.fullmatch(line)
        if match is None:
            odd.append(line)
            continue
        inode, size, seconds, nanos, path = match.groups()
        is_clock_fine &= nanos is not None
        mtime_ns = int(seconds) * 10**9 + int(nanos or 0)
        files.append(FileStat(path, int(inode), int(size), mtime_ns))
    files.sort(key=lambda file: file.path)
    return Listing(lines[0], tuple(files), is_clock_fine, lines[1] == "rsync", tuple(odd))


_HASH_LINE = re.compile(r"(\\?)([0-9a-f]{64})  ?\*?\./(.+)")


def read_digests(answer: bytes) -> dict[str, str]:
    """Return sha256 by path in what ``hash_script`` printed after the marker."""
    found = {}
    for line in answer.decode("utf-8", "surrogateescape").split("\n"):
        match = _HASH_LINE.fullmatch(line)
        if match is not None:
            is_escaped, digest, path = match.groups()
            if is_escaped:  # GNU: "\\" in a name is doubled and the line begins with one
                path = path.replace("\\\\", "\\")
            found[path] = digest
    return found
