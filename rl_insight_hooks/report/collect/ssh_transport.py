# SPDX-License-Identifier: Apache-2.0
"""One ssh host as a source: scripts over ``ssh`` in batch mode; files by rsync, or tar where that is missing.

Nothing ever asks for a password: what would ask fails, and the host is named.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl_insight_hooks.report.collect import ssh_script
from rl_insight_hooks.report.collect.model import (
    FileStat,
    OnFile,
    Received,
    SourceError,
    Survey,
)
from rl_insight_hooks.report.collect.node import what_is_broken
from rl_insight_hooks.report.collect.ssh_address import SshAddress

_log = logging.getLogger(__name__)

# Files of one round trip: progress is shown, and a broken connection costs, no more than this.
CHUNK_FILES = 4096
CHUNK_BYTES = 64 << 20
MAX_TRIES = 3  # of a file that changes while it is copied

_SSH_FAILED = 255
_MAX_NOISE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSettings:
    """How to call ssh."""

    args: tuple[str, ...] = ()  # more arguments for ssh, e.g. ("-F", "my_config")
    timeout_s: float = 600.0  # of one round trip
    use_rsync: bool = True


class SshSource:
    """One folder on one host; see :class:`~rl_insight_hooks.report.collect.model.Source`."""

    def __init__(self, address: SshAddress, include: Sequence[str], settings: SshSettings) -> None:
        self.name = address.name
        self._address = address
        self._include = tuple(include)
        self._settings = settings
        self._folder = address.path
        self._stats: dict[str, FileStat] = {}
        self._has_rsync = False
        self._is_stopped = False
        self._children: set[subprocess.Popen[bytes]] = set()

    def survey(self) -> Survey:
        """Return the load files of the folder."""
        started = time.time()
        answer = self._run(ssh_script.survey_script(self._address.path, self._include))
        try:
            listing = ssh_script.read_survey(answer)
        except ValueError as error:
            raise SourceError(str(error), "Is its login shell silent and its sh a shell?") from None
        if listing.odd_lines:
            _log.warning(
                "%s: %d names cannot be copied, the first: %r",
                self.name,
                len(listing.odd_lines),
                listing.odd_lines[0],
            )
        self._folder = listing.folder
        self._stats = {file.path: file for file in listing.files}
        self._has_rsync = listing.has_rsync and shutil.which("rsync") is not None
        return Survey(
            folder=listing.folder,
            files=listing.files,
            is_clock_fine=listing.is_clock_fine,
            listed_unix_s=started,
        )

    def digests(self, paths: Sequence[str]) -> dict[str, str]:
        """Return sha256 by path."""
        return ssh_script.read_digests(self._run(ssh_script.hash_script(self._folder, paths)))

    def fetch(self, paths: Sequence[str], staging: Path, on_file: OnFile) -> None:
        """Copy ``paths`` below ``staging``, chunk by chunk, each file checked against the host's sha256."""
        for chunk in self._chunks(paths):
            self._fetch_chunk(chunk, staging, on_file)

    def stop(self) -> None:
        """End the ssh and rsync processes that run."""
        self._is_stopped = True
        for child in list(self._children):
            with contextlib.suppress(OSError):
                child.terminate()

    def _chunks(self, paths: Sequence[str]) -> Iterator[list[str]]:
        chunk: list[str] = []
        num_bytes = 0
        for path in paths:
            chunk.append(path)
            num_bytes += self._stats[path].size if path in self._stats else 0
            if len(chunk) >= CHUNK_FILES or num_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            yield chunk

    def _fetch_chunk(self, paths: list[str], staging: Path, on_file: OnFile) -> None:
        remaining = paths
        for _ in range(MAX_TRIES):
            self._copy(remaining, staging)
            digests = self.digests(remaining)
            again = []
            for path in remaining:
                file = staging / path
                data = file.read_bytes() if file.is_file() else None
                digest = digests.get(path)
                if digest is None:
                    broken = "went away while we collected (packed, or the step ran again)"
                    on_file(Received(path, "", 0, broken))
                elif data is None or hashlib.sha256(data).hexdigest() != digest:
                    again.append(path)
                else:
                    mtime_ns = self._mtime_ns(path, file)
                    on_file(Received(path, digest, mtime_ns, what_is_broken(path, data)))
            remaining = again
            if not remaining:
                return
        for path in remaining:
            broken = f"changed every time it was copied ({MAX_TRIES} tries)"
            on_file(Received(path, "", 0, broken))

    def _mtime_ns(self, path: str, file: Path) -> int:
        """Return the host's mtime: tar carries seconds only, so the listing's is taken where they agree."""
        came = file.stat().st_mtime_ns
        stat = self._stats.get(path)
        if stat is not None and stat.mtime_ns // 10**9 == came // 10**9:
            return stat.mtime_ns
        return came

    # -- copying -----------------------------------------------------------------------------------------

    def _copy(self, paths: list[str], staging: Path) -> None:
        if self._has_rsync and self._settings.use_rsync:
            problem = self._copy_by_rsync(paths, staging)
            if problem is None:
                return
            _log.info("%s: rsync failed (%s); going on with tar", self.name, problem)
            self._has_rsync = False
        self._copy_by_tar(paths, staging)

    def _copy_by_rsync(self, paths: list[str], staging: Path) -> str | None:
        """Return None, or why rsync cannot be used with this host."""
        host = self._address.host
        user, at, bare = host.rpartition("@")
        if ":" in bare:
            host = f"{user}{at}[{bare}]"
        command = ["rsync", "-tzs", "--from0", "--files-from=-", f"--timeout={self._io_timeout_s}"]
        command += ["-e", shlex.join(self._ssh()), f"{host}:{self._folder}/", f"{staging}/"]
        names = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
        with self._child(command, names) as (child, errors):
            _, _ = child.communicate()
            # 23 and 24: some files could not be read or went; the checksums tell which.
            if child.returncode in (0, 23, 24):
                return None
            return _last_line(errors) or f"exit code {child.returncode}"

    def _copy_by_tar(self, paths: list[str], staging: Path) -> None:
        wanted = set(paths)
        script = ssh_script.tar_script(self._folder, paths).encode("utf-8", "surrogateescape")
        with self._child([*self._ssh(), "--", self._address.host, "sh"], script) as (child, errors):
            assert child.stdout is not None
            if not _skip_noise(child.stdout):
                self._raise_for(child, errors)
            try:
                with tarfile.open(fileobj=child.stdout, mode="r|") as archive:
                    for member in archive:
                        path = member.name.removeprefix("./")
                        if member.isreg() and path in wanted:
                            _unpack(archive, member, staging / path)
            except (tarfile.TarError, EOFError) as error:
                child.stdout.read()
                child.wait()
                why = _last_line(errors) or str(error)
                raise SourceError(
                    f"the connection broke while files came ({why})", _TRY_AGAIN
                ) from None
            child.stdout.read()
            child.wait()
            if child.returncode != 0:
                self._raise_for(child, errors)

    # -- ssh ---------------------------------------------------------------------------------------------

    def _ssh(self) -> list[str]:
        """Return the ssh command up to the host; the first value of an option wins in ssh."""
        port = ["-p", str(self._address.port)] if self._address.port else []
        return [
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", "NumberOfPasswordPrompts=0"),
            *self._settings.args,
            *port,
            *("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"),
            *("-o", "ServerAliveCountMax=4"),
        ]

    @property
    def _io_timeout_s(self) -> int:
        return max(1, int(self._settings.timeout_s))

    def _run(self, script: str) -> bytes:
        """Return what ``script`` prints on the host after the marker."""
        command = [*self._ssh(), "--", self._address.host, "sh"]
        data = script.encode("utf-8", "surrogateescape")
        with self._child(command, data) as (child, errors):
            output, _ = child.communicate()
            answer = ssh_script.after_marker(output)
            if child.returncode != 0 or answer is None:
                self._raise_for(child, errors)
            assert answer is not None
            return answer

    @contextlib.contextmanager
    def _child(
        self, command: list[str], stdin: bytes
    ) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
        """Run ``command``; stdin and stderr are files, so no pipe can fill up and block."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            if self._is_stopped:
                raise SourceError("stopped")
            try:
                child = subprocess.Popen(
                    command, stdin=given, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError as error:
                raise SourceError(f"{command[0]} cannot be started ({error})") from None
            self._children.add(child)
            is_late = threading.Event()
            timer = threading.Timer(self._settings.timeout_s, _end_late, (child, is_late))
            timer.daemon = True
            timer.start()
            try:
                yield child, errors
            except SourceError:
                if is_late.is_set():
                    what = f"no end after {self._settings.timeout_s:g} s"
                    raise SourceError(
                        what, "Is its disk hung? Or give a longer --timeout."
                    ) from None
                raise
            finally:
                timer.cancel()
                if child.poll() is None:
                    child.kill()
                child.wait()
                if child.stdout is not None:
                    child.stdout.close()
                self._children.discard(child)

    def _raise_for(self, child: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        child.wait()
        said = _last_line(errors)
        code = child.returncode
        if self._is_stopped:
            raise SourceError("stopped")
        if code == ssh_script.NO_FOLDER:
            raise SourceError(f"no folder {self._address.path} there", "Check the path.")
        if code == ssh_script.NO_TOOL:
            raise SourceError(
                f"the program {said} is missing there", f"Install {said} on the host."
            )
        if code == _SSH_FAILED:
            raise SourceError(said or "ssh failed", self._fix_for(said))
        raise SourceError(f"exit code {code}: {said or 'no message'}", f"Try: {self._test_line()}")

    def _fix_for(self, said: str) -> str:
        if "Permission denied" in said:
            return f"No key of yours is accepted; this must work unasked: {self._test_line()}"
        if "Host key verification failed" in said:
            option = "--ssh-option StrictHostKeyChecking=accept-new"
            return f"Connect once by hand to accept its key, or give {option}"
        return f"Check host name, port and network: {self._test_line()}"

    def _test_line(self) -> str:
        port = f"-p {self._address.port} " if self._address.port else ""
        return f"ssh -o BatchMode=yes {port}{self._address.host} true"


_TRY_AGAIN = "Run the same command again: what came is not copied twice."


def _end_late(child: subprocess.Popen[bytes], is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):
        child.kill()


def _skip_noise(stream: IO[bytes]) -> bool:
    """Read up to the end of the marker; False if it does not come."""
    num_bytes = 0
    while num_bytes < _MAX_NOISE_BYTES:
        line = stream.readline(_MAX_NOISE_BYTES)
        if not line:
            return False
        if line.endswith(ssh_script.MARKER):
            return True
        num_bytes += len(line)
    return False


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
    os.utime(target, ns=(int(member.mtime * 10**9), int(member.mtime * 10**9)))


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line on stderr that says something."""
    errors.seek(0)
    lines = [
        line.strip()
        for line in errors.read()[-8192:].decode("utf-8", "replace").splitlines()
        if line.strip() and not line.startswith(("Warning: Permanently added", "rsync error:"))
    ]
    return lines[-1] if lines else ""
