# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all.

Temp file in the same directory -> write -> fsync -> rename over the target -> fsync of the directory. The
temp file is made with mode 0666 less the umask (``tempfile`` would publish 0600 files that nobody else on a
shared file system can read). Its name starts with a dot and ends in ``.tmp``, so no ``*.json`` glob sees it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import platform
import re
from pathlib import Path

_log = logging.getLogger(__name__)

# File systems that cannot fsync answer with one of these; the write is still whole, only not yet durable.
_NO_FSYNC_ERRNOS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_no_fsync_warned = False
_serial = itertools.count()
_node = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:64]  # without dots: they part the name


def temp_name(name: str) -> str:
    """Return the name of the temp file of ``name`` for this process; no two calls give the same."""
    return f".{name}.{_node}.{os.getpid()}.{next(_serial)}.tmp"


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at ``path`` by ``data``: readers see the old bytes or the new ones, never a mix.

    Raises:
        OSError: the file could not be written; the temp file is gone and the target is as it was.
    """
    target = Path(path)
    temp = target.with_name(temp_name(target.name))
    fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            _fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise
    fsync_dir(target.parent)


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make renames in the directory ``path`` durable, where the file system can."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        _fsync(fd)
    finally:
        os.close(fd)


def sweep_temp_files(directory: str | os.PathLike[str]) -> int:
    """Remove temp files that a killed process left in ``directory``; return how many.

    Only files of this machine's processes that no longer live are taken: other nodes write here too.
    """
    num_removed = 0
    for temp in Path(directory).glob(f".*.{_node}.*.*.tmp"):
        pid = temp.name.split(".")[-3]
        if pid.isdecimal() and not _alive(int(pid)):
            with contextlib.suppress(OSError):
                temp.unlink()
                num_removed += 1
    return num_removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # no pid of any process
        return True
    return True


def _fsync(fd: int) -> None:
    global _no_fsync_warned
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRNOS:
            raise
        if not _no_fsync_warned:
            _no_fsync_warned = True
            _log.warning(
                "this file system cannot fsync (%s): files are whole, but not yet durable", error
            )
