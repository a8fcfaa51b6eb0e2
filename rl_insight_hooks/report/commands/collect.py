# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report collect``: bring node-local files home, over Ray or ssh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rl_insight_hooks.report.collect.coverage import Coverage
    from rl_insight_hooks.report.collect.model import Report, Source


def collect(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --ray: the data folder on the nodes. With --ssh: more user@host:path.",
            metavar="DATA",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder at home that the files go to.")
    ] = Path("collected"),
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="[ADDRESS]", help="From the nodes of the running Ray cluster."
        ),
    ] = None,
    ssh: Annotated[
        list[str] | None,
        typer.Option("--ssh", metavar="USER@HOST:PATH", help="From a host, by ssh; repeatable."),
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option("--hosts", metavar="FILE", help="From the hosts in a file, one a line."),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option("--path", help="Data folder on hosts that are given without one."),
    ] = None,
    ssh_option: Annotated[
        list[str] | None,
        typer.Option("--ssh-option", metavar="KEY=VALUE", help="As ssh -o; repeatable."),
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option("--ssh-config", metavar="FILE", help="As ssh -F.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option("--identity", "-i", metavar="FILE", help="As ssh -i.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Only files of such names; repeatable."),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", help="Nodes or hosts that are spoken to at a time.")
    ] = 16,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Compare contents even where size and time agree.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds without an answer to give up.")
    ] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="The outcome as JSON on stdout.")] = False,
) -> None:
    """Bring the load files of all nodes into one folder; exit code 4 if something could not come."""
    from rl_insight_hooks.errors import UsageError
    from rl_insight_hooks.report.collect.coverage import Coverage, coverage
    from rl_insight_hooks.report.collect.gather import gather
    from rl_insight_hooks.report.collect.home import list_home
    from rl_insight_hooks.report.collect.node import INCLUDE
    from rl_insight_hooks.report.speak import progress_on_terminal, say_findings

    patterns = tuple(include or INCLUDE)
    _check_numbers(parallel, timeout)
    dead: list[str] = []
    found: list[Source]
    if (ray is None) == (not ssh and hosts is None):
        raise UsageError(
            "collect needs one way to the nodes: --ray [ADDRESS] DATA, or --ssh USER@HOST:PATH, or "
            "--hosts FILE. Is the folder on storage that all nodes share? Then there is nothing to do"
        )
    with contextlib.ExitStack() as stack:
        if ray is not None:
            found, dead = stack.enter_context(_ray_sources(ray, sources or [], patterns, timeout))
        else:
            args = _ssh_args(ssh_option or [], ssh_config, identity)
            addresses = [*(ssh or []), *(sources or [])]
            found = _ssh_sources(addresses, hosts, path, patterns, args, timeout)
        progress = stack.enter_context(progress_on_terminal("collecting"))
        report = gather(
            found,
            output,
            include=patterns,
            parallel=parallel,
            checksum=checksum,
            progress=progress,
        )
    if report.shared_folder:
        covered = Coverage((), is_proven=True)
    else:
        covered = coverage(output, list_home(output))
    say_findings(covered.problems, [])
    for name in dead:
        typer.echo(f"note: node {name} was dead before we began", err=True)
    if json:
        _print_json(report, dead, covered)
    else:
        _print_text(report)
    _raise_if_incomplete(report, dead, covered)


def _check_numbers(parallel: int, timeout: float) -> None:
    from rl_insight_hooks.errors import UsageError

    if parallel < 1:
        raise UsageError(f"--parallel {parallel}: at least 1")
    if timeout <= 0:
        raise UsageError(f"--timeout {timeout:g}: more than 0 seconds")


@contextlib.contextmanager
def _ray_sources(
    address: str, paths: list[str], include: tuple[str, ...], timeout: float
) -> Iterator[tuple[list[Source], list[str]]]:
    """Give a source for each living node, and the names of the dead ones, while the cluster is connected."""
    from rl_insight_hooks.report.collect.ray_transport import check_template, connected, ray_sources

    template = _one_path(paths)
    check_template(template)
    with connected(address) as ray:
        found, dead = ray_sources(ray, template, include, timeout)
        yield list(found), dead


def _one_path(paths: list[str]) -> str:
    """Return the one data folder of ``--ray``."""
    from rl_insight_hooks.errors import UsageError

    if len(paths) != 1:
        raise UsageError(
            f"--ray takes one DATA, the folder on the nodes (it got {len(paths)}); nodes may differ by "
            "{hostname}, {ip}, {node_id} or {label:KEY} in it"
        )
    return paths[0]


def _ssh_args(options: list[str], config: Path | None, identity: Path | None) -> tuple[str, ...]:
    from rl_insight_hooks.errors import UsageError

    args: list[str] = []
    for name, file in (("-F", config), ("-i", identity)):
        if file is not None:
            if not file.is_file():
                raise UsageError(f"{file}: no such file (for ssh {name})")
            args += [name, str(file)]
    for option in options:
        key, equals, _ = option.partition("=")
        if not equals or not key.isalnum():
            raise UsageError(f"--ssh-option {option!r}: write KEY=VALUE, e.g. ProxyJump=gate")
        args += ["-o", option]
    return tuple(args)


def _ssh_sources(
    addresses: list[str],
    hosts: Path | None,
    path: str | None,
    include: tuple[str, ...],
    args: tuple[str, ...],
    timeout: float,
) -> list[Source]:
    import shutil

    from rl_insight_hooks.errors import MissingDependencyError, UsageError
    from rl_insight_hooks.report.collect.ssh_address import parse_address, parse_host_list
    from rl_insight_hooks.report.collect.ssh_transport import SshSettings, SshSource

    found = [parse_address(address, path) for address in addresses]
    if hosts is not None:
        try:
            lines = hosts.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--hosts {hosts}: cannot be read ({error})") from None
        found += parse_host_list(lines, str(hosts), path)
    if not found:
        raise UsageError(f"--hosts {hosts}: names no host")
    if shutil.which("ssh") is None:
        raise MissingDependencyError("--ssh needs the program ssh (openssh-client); install it")
    settings = SshSettings(args=args, timeout_s=timeout)
    return [SshSource(address, include, settings) for address in dict.fromkeys(found)]


def _print_json(report: Report, dead: list[str], covered: Coverage) -> None:
    import dataclasses

    from rl_insight_hooks.report.export_flat import problem_dict
    from rl_insight_hooks.report.speak import write_json_line

    said: dict[str, Any] = {"schema": "rl-insight-hooks/collect/1", **dataclasses.asdict(report)}
    said["is_complete"] = report.is_complete and not _what_is_missing(dead, covered)
    said["dead_nodes"] = dead
    said["problems"] = [problem_dict(problem) for problem in covered.problems]
    write_json_line(said)


def _what_is_missing(dead: list[str], covered: Coverage) -> list[str]:
    """Return what the files that came, and the cluster, say is not there although no source failed."""
    found = []
    if covered.problems:
        found.append("ranks are missing (see above)")
    elif dead and not covered.is_proven:
        found.append(
            f"{len(dead)} dead nodes, and the files do not say whether ranks are missing; if none of theirs is, "
            "all is here"
        )
    return found


def _print_text(report: Report) -> None:
    from rl_insight_hooks.report.collect.render import outcome_lines, trouble_lines

    for line in trouble_lines(report):
        typer.echo(line, err=True)
    for line in outcome_lines(report):
        typer.echo(line)


def _raise_if_incomplete(report: Report, dead: list[str], covered: Coverage) -> None:
    from rl_insight_hooks.errors import DataError, IncompleteDataError

    if report.shared_folder is not None:
        if not report.is_complete:
            raise IncompleteDataError("some sources did not answer; see above")
        return
    num_bad = sum(not result.is_good for result in report.sources)
    num_here = report.num_new + report.num_updated + report.num_identical
    if num_bad == len(report.sources) and num_here == 0:
        raise DataError("no source delivered a file; see above")
    if all(result.num_files == 0 for result in report.sources) and not num_bad:
        raise DataError(
            "no source has load files there; is it the folder of `token_save_path` or `path`?"
        )
    lost = [f"{num_bad} of {len(report.sources)} sources incomplete"] if num_bad else []
    if report.conflicts:
        lost.append(f"{len(report.conflicts)} conflicts")
    lost += _what_is_missing(dead, covered)
    if lost:
        raise IncompleteDataError(f"{', '.join(lost)}; what could come is here")
