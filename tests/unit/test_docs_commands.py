# SPDX-License-Identifier: Apache-2.0
"""Command lines of the pages are ones that the program understands; those of the READMEs run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from placement_cases import write_steps, zipf_load

from rl_insight_hooks.report import cli, grammar
from rl_insight_hooks.report.collect.ray_argument import with_ray_address
from rl_insight_hooks.report.main import run

REPO = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README_zh.md")
# a synopsis names what it stands for: [--option], a|b, DATA..., <name>
SYNOPSIS = re.compile(r"[\[\]|<>{]|\.\.\.|\bCOMMAND\b")


def command_lines(page):
    """Return the words after rl-insight-report of every line of a code block, continued lines joined."""
    found = re.compile(r"(?:\$ )?rl-insight-report (.*)")
    fenced, lines = False, []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            match = found.match(line.strip())
            lines += [match.group(1)] if match else []
    return lines


def cases():
    pages = [REPO / name for name in READMES] + sorted((REPO / "docs").rglob("*.md"))
    return [
        pytest.param(line, id=f"{page.relative_to(REPO)}: {line}")
        for page in pages
        for line in dict.fromkeys(command_lines(page))
        if not SYNOPSIS.search(line)
    ]


def test_the_pages_have_command_lines():
    assert len(cases()) >= 20


@pytest.mark.parametrize("line", cases())
def test_the_program_understands(line):
    words = shlex.split(re.split(r"\s{3,}(?=[a-z])", line)[0], comments=True)
    if len(words) == 1:  # columns: the name, then what it is given
        words = shlex.split(line, comments=True)
    argv = grammar.translate(with_ray_address(words), cli.COMMANDS, cli._command)
    assert argv[0] in cli.COMMANDS, argv
    app = typer.Typer(add_completion=False)
    app.command(argv[0])(cli._command(argv[0]))
    typer.main.get_command(app).make_context(argv[0], argv[1:])  # raises at what it does not know


def all_options():
    for name in cli.COMMANDS:
        app = typer.Typer(add_completion=False)
        app.command(name)(cli._command(name))
        for option in typer.main.get_command(app).params:
            yield from (*option.opts, *option.secondary_opts)


def test_no_page_of_a_command_names_an_option_that_is_none():
    known = {*all_options(), "--debug", "--version", "--help"}
    pages = [REPO / "docs/cli.md", *(REPO / "docs/commands").glob("*.md")]
    named = {
        (page.name, option)
        for page in pages
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())
    }
    assert len(named) > 50
    assert {pair for pair in named if pair[1] not in known} == set()


@pytest.mark.parametrize("name", READMES)
def test_the_commands_of_the_readme_run(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("plotly", reason="the html page needs plotly")
    monkeypatch.chdir(tmp_path)
    load = zipf_load(0, 2, 256)
    write_steps(tmp_path / "expert_load", load[None].repeat(2, 0))
    lines = [line for line in command_lines(REPO / name) if "expert_load" in line]
    assert len(lines) >= 4
    for line in lines:
        assert run(shlex.split(line, comments=True)) == 0, (line, capsys.readouterr().err)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "load.html").stat().st_size > 0
    assert (tmp_path / "map.json").stat().st_size > 0
