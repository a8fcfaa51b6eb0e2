# SPDX-License-Identifier: Apache-2.0
"""Addresses, host lists, scripts and answers of the ssh way; the --ray argument; path templates."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from collect_data import write_step_file

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.collect import ssh_script
from rl_insight_hooks.report.collect.node import INCLUDE, hash_files, list_files
from rl_insight_hooks.report.collect.ray_argument import with_ray_address
from rl_insight_hooks.report.collect.ray_transport import RayNode, check_template, fill_path
from rl_insight_hooks.report.collect.ssh_address import SshAddress, parse_address, parse_host_list


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:/d", SshAddress("host", "/d")),
        ("me@host:json_file", SshAddress("me@host", "json_file")),
        ("me@host:~/a b", SshAddress("me@host", "~/a b")),
        ("me@[fe80::1]:/d", SshAddress("me@fe80::1", "/d")),
        ("ssh://me@host:2222/d/e", SshAddress("me@host", "/d/e", 2222)),
        ("ssh://host/d", SshAddress("host", "/d")),
        ("host", SshAddress("host", "/default")),
        ("ssh://host:22", SshAddress("host", "/default", 22)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text, "/default") == expected


@pytest.mark.parametrize(
    "text",
    ["-oProxyCommand=x:/d", "", "a b:/d", "me@:/d", "ssh://host:99999/d", "ssh://-x/d", "h:/a\nb"],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UsageError, match="--ssh"):
        parse_address(text, "/default")


def test_an_address_without_a_folder_needs_one():
    with pytest.raises(UsageError, match="--path"):
        parse_address("host")


def test_host_list():
    lines = ["# all nodes", "", "n1:/a  # first", "me@n2", "ssh://n3:2200/b#c"]
    assert parse_host_list(lines, "hosts", "/d") == [
        SshAddress("n1", "/a"),
        SshAddress("me@n2", "/d"),
        SshAddress("n3", "/b#c", 2200),
    ]
    with pytest.raises(UsageError, match=r"hosts, line 2: .*--path"):
        parse_host_list(["n1:/a", "n2"], "hosts")


SHELLS = [
    shell for shell in ("dash", "bash", "busybox", "ksh", "zsh") if shutil.which(shell) is not None
] or ["sh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_say_what_python_says(shell, tmp_path):
    root = tmp_path / 'it\'s "$x" & co'
    for rank in range(3):
        write_step_file(root, 1, rank)
    odd = root / "a\\b c'd" / "group_list.json"
    odd.parent.mkdir()
    odd.write_text("{}")
    (root / ".tmp_hidden").mkdir()
    (root / ".tmp_hidden" / "group_list.json").write_text("{}")
    command, env = [shell], None
    if shell == "busybox":  # with its own find, stat, xargs and sha256sum
        tools = tmp_path / "tools"
        tools.mkdir()
        subprocess.run([shutil.which(shell), "--install", "-s", str(tools)], check=True)
        command, env = [str(tools / "sh")], {"PATH": str(tools)}

    def run(script: str) -> bytes:
        done = subprocess.run(
            command, input=script.encode(), capture_output=True, timeout=30, env=env
        )
        assert done.returncode == 0, done.stderr
        answer = ssh_script.after_marker(b"Welcome!\n" + done.stdout)
        assert answer is not None
        return answer

    listing = ssh_script.read_survey(run(ssh_script.survey_script(str(root), INCLUDE)))
    _, stats = list_files(str(root), INCLUDE)
    assert [(f.path, f.inode, f.size) for f in listing.files] == [stat[:3] for stat in stats]
    if listing.is_clock_fine:
        assert [f.mtime_ns for f in listing.files] == [stat[3] for stat in stats]
    assert listing.odd_lines == ()
    paths = [stat[0] for stat in stats]
    digests = ssh_script.read_digests(run(ssh_script.hash_script(str(root), paths)))
    assert digests == hash_files(str(root), paths)
    assert len(digests) == 4


def test_a_missing_folder_and_a_missing_tool_have_codes(tmp_path):
    def code(script: str, env=None) -> int:
        return subprocess.run(["/bin/sh"], input=script.encode(), env=env).returncode

    gone = ssh_script.survey_script(str(tmp_path / "none"), INCLUDE)
    assert code(gone) == ssh_script.NO_FOLDER
    here = ssh_script.survey_script(str(tmp_path), INCLUDE)
    assert code(here, env={"PATH": str(tmp_path)}) == ssh_script.NO_TOOL


def test_no_marker_no_answer():
    assert ssh_script.after_marker(b"This account is not available.\n") is None
    with pytest.raises(ValueError, match="odd answer"):
        ssh_script.read_survey(b"/d\nwhat\n")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--ray", "/d"], ["--ray", "auto", "/d"]),
        (["/d", "--ray"], ["/d", "--ray", "auto"]),
        (["--ray", "--json", "/d"], ["--ray", "auto", "--json", "/d"]),
        (["--ray", "10.0.0.1:6379", "/d"], ["--ray", "10.0.0.1:6379", "/d"]),
        (["--ray", "auto", "/d"], ["--ray", "auto", "/d"]),
        (["--ray", "ray://h:1", "/d"], ["--ray", "ray://h:1", "/d"]),
        (["--ray=auto", "/d"], ["--ray=auto", "/d"]),
        (["--ssh", "h:/d"], ["--ssh", "h:/d"]),
    ],
)
def test_the_address_of_ray_may_be_left_out(args, expected):
    assert with_ray_address(args) == expected


NODE = RayNode("abc123", "node7", "10.0.0.7", (("zone", "b"),), "node7", True)


def test_path_templates():
    assert fill_path("/data/{hostname}/{ip}/{node_id}/{label:zone}", NODE) == (
        "/data/node7/10.0.0.7/abc123/b"
    )
    assert fill_path("/data/plain", NODE) == "/data/plain"
    with pytest.raises(UsageError, match=r"node7 has no \{rank\}; it has .*\{hostname\}"):
        fill_path("/data/{rank}", NODE)
    with pytest.raises(UsageError, match="from the root"):
        check_template("json_file")
