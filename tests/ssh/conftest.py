# SPDX-License-Identifier: Apache-2.0
"""A real sshd on loopback with its own keys, port and folder; three host names that lead to it or nowhere.

Needs Debian's openssh-server (sshd), openssh-client and, for the rsync tests, rsync.
"""

from __future__ import annotations

import getpass
import pathlib
import shutil
import socket
import subprocess
import time

import pytest

SSHD = shutil.which("sshd") or next(
    (path for path in ("/usr/sbin/sshd",) if pathlib.Path(path).exists()), None
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Sshd:
    """alpha and beta lead to the server, refusing to a key that it does not accept, closed to no server."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.port = free_port()
        folder.chmod(0o700)
        for name in ("host_key", "client_key", "other_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
                check=True,
            )
        authorized = folder / "authorized_keys"
        authorized.write_text((folder / "client_key.pub").read_text())
        authorized.chmod(0o600)
        (folder / "sshd_config").write_text(
            f"""Port {self.port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {authorized}
StrictModes no
UsePAM no
PasswordAuthentication yes
KbdInteractiveAuthentication no
PermitRootLogin yes
"""
        )
        user = getpass.getuser()
        hosts = [
            ("alpha", self.port, "client_key"),
            ("beta", self.port, "client_key"),
            ("refusing", self.port, "other_key"),
            ("closed", free_port(), "client_key"),
        ]
        self.config = folder / "ssh_config"
        self.config.write_text(
            "".join(
                f"""Host {name}
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/{key}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
"""
                for name, port, key in hosts
            )
        )
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation folder
        self.process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "sshd.log").open("wb"),
        )
        deadline = time.monotonic() + 15
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd does not start: {(folder / 'sshd.log').read_text()[-300:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here (Debian: apt-get install openssh-server openssh-client rsync)")
    try:
        server = Sshd(tmp_path_factory.mktemp("sshd"))
    except PermissionError as error:
        pytest.skip(f"sshd cannot be run here: {error}")
    yield server
    server.stop()
