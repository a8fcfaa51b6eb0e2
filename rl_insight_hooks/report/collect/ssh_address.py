# SPDX-License-Identifier: Apache-2.0
"""Where ssh hosts are: ``user@host:path``, ``ssh://user@host:port/path``, and files that list them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rl_insight_hooks.errors import UsageError

_URL = re.compile(
    r"ssh://(?P<host>(?:[^@/\s]+@)?(?:\[[^\]]+\]|[^:/\s]+))(?::(?P<port>\d+))?(?P<path>/.*)?"
)
_SCP = re.compile(r"(?P<host>(?:[^@:/\s]+@)?(?:\[[^\]]+\]|[^:/@\s]+))(?::(?P<path>.*))?")


@dataclass(frozen=True, slots=True)
class SshAddress:
    """One folder on one host."""

    host: str  # as ssh takes it: [user@]name
    path: str
    port: int | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        port = f":{self.port}" if self.port else ""
        return f"{self.host}{port}:{self.path}"


def parse_address(text: str, default_path: str | None = None) -> SshAddress:
    """Return the address in ``user@host:path`` or ``ssh://user@host:port/path``.

    Raises:
        UsageError: it is neither, or has no path and there is no ``default_path``.
    """
    match = _URL.fullmatch(text) if text.startswith("ssh://") else _SCP.fullmatch(text)
    if match is None or text.startswith("-"):
        raise UsageError(
            f"--ssh {text!r}: no address; write user@host:path or ssh://user@host:port/path"
        )
    path = match["path"] or default_path
    if not path:
        raise UsageError(
            f"--ssh {text!r}: no folder; write {text}:/path/of/the/data, or give --path"
        )
    port = match.groupdict().get("port")
    host = re.sub(r"\[([^\]]+)\]", r"\1", match["host"])
    if host.startswith("-") or (port and not 1 <= int(port) <= 65535):
        raise UsageError(f"--ssh {text!r}: bad host or port")
    if any(character in path for character in "\0\n\r"):
        raise UsageError(f"--ssh {text!r}: a path of one line, please")
    return SshAddress(host, path, int(port) if port else None)


def parse_host_list(
    lines: Iterable[str], where: str, default_path: str | None = None
) -> list[SshAddress]:
    """Return the addresses in a host file: one a line, ``#`` begins a comment, empty lines are skipped.

    Raises:
        UsageError: a line is no address; names the file and the line.
    """
    found = []
    for number, line in enumerate(lines, start=1):
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        if not text:
            continue
        try:
            found.append(parse_address(text, default_path))
        except UsageError as error:
            raise UsageError(f"{where}, line {number}: {error}") from None
    return found
