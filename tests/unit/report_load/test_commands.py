# SPDX-License-Identifier: Apache-2.0
"""The commands export, check and pack as functions of an app: output, JSON keys, exits, no heavy imports."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types

import pytest
import typer
from typer.testing import CliRunner

from rl_insight_hooks.errors import IncompleteDataError, UsageError
from rl_insight_hooks.report.commands.check import check
from rl_insight_hooks.report.commands.export import export
from rl_insight_hooks.report.commands.pack import pack
from rl_insight_hooks.report.rules import RULES

# click before 8.2 mixes stderr into stdout unless told not to; typer of today has a click of its own
CLICK_SEPARATES = "mix_stderr" not in inspect.signature(CliRunner).parameters


@pytest.fixture
def run():
    app = typer.Typer()
    for command in (export, check, pack):
        app.command()(command)
    separate = {} if CLICK_SEPARATES else {"mix_stderr": False}
    runner = CliRunner(**separate)

    def invoke(*arguments):
        result = runner.invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def _torn(tmp_path, write_step):
    write_step(tmp_path / "run", 1, "actor", 0, {0: [1, 2]})
    write_step(tmp_path / "run", 2, "actor", 0, {0: [1, 2]}).write_text("{")
    return tmp_path / "run"


def test_export_writes_and_says_what(tmp_path, write_step, run):
    write_step(tmp_path / "run", 1, "actor", 0, {0: [1, 2]})
    result = run("export", tmp_path / "run", "-o", tmp_path / "f.csv")
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "f.csv")
    assert (tmp_path / "f.csv").read_text().splitlines()[1:] == [
        "1,actor,0,0,forward,0,1",
        "1,actor,0,0,forward,1,2",
    ]
    result = run(
        "export",
        tmp_path / "run",
        "-o",
        tmp_path / "tree",
        "--json",
        "--step",
        "1",
        "--merge-ranks",
    )
    value = json.loads(result.stdout)
    assert list(value) == [
        "schema",
        "output",
        "format",
        "num_rows",
        "remarks",
        "assumptions",
        "problems",
    ]
    assert value["format"] == "msprobe"
    assert value["remarks"] == ["rows merged over ranks are written as rank0"]


def test_export_of_part_of_the_data_writes_it_and_then_says_incomplete(tmp_path, write_step, run):
    root = _torn(tmp_path, write_step)
    with pytest.raises(IncompleteDataError, match="1 problem loses data"):
        run("export", root, "-o", tmp_path / "f.csv")
    assert len((tmp_path / "f.csv").read_text().splitlines()) == 3


def test_export_checks_the_name_before_it_reads(tmp_path, run):
    with pytest.raises(UsageError, match="no export format"):
        run("export", tmp_path / "nowhere", "-o", tmp_path / "f.docx")


def test_check_lists_findings_and_ends_incomplete(tmp_path, write_step, run, capsys):
    root = _torn(tmp_path, write_step)
    with pytest.raises(IncompleteDataError):
        run("check", root)
    write_step(root, 2, "actor", 0, {0: [1, 2]})
    result = run("check", root)
    assert (
        result.stdout
        == "complete: 2 files (rl-insight-hooks), 2 rows, 0 errors, 0 warnings and notes\n"
    )


def test_thousands_of_torn_files_are_counted_and_twenty_listed(tmp_path, write_step, run):
    root = tmp_path / "run"
    for step in range(57):
        write_step(root, step, "actor", 0, {0: [1, 2]}).write_text("{")
    app = typer.Typer()
    app.command()(check)
    result = CliRunner().invoke(app, [str(root)])
    assert "57 errors" in result.output
    assert result.output.count("group_list.json") == 20
    assert "37 more: 57 problems of this kind in all" in result.output
    assert "57 problems lose data" in str(result.exception)


def test_check_json_has_stable_keys_even_when_incomplete(tmp_path, write_step):
    root = _torn(tmp_path, write_step)
    app = typer.Typer()
    app.command()(check)
    result = CliRunner().invoke(app, [str(root), "--json"])
    assert isinstance(result.exception, IncompleteDataError)
    assert result.exception.exit_code == 4
    value = json.loads(result.stdout)
    assert list(value) == [
        "schema",
        "num_files",
        "num_rows",
        "sources",
        "roles",
        "num_errors",
        "assumptions",
        "problems",
    ]
    assert [p["rule"] for p in value["problems"]] == ["torn-file"]
    assert sorted(value["problems"][0]) == ["fix", "rule", "severity", "what", "where"]


def test_check_rules_lists_them_all(run):
    assert json.loads(run("check", "--rules", "--json").stdout)["rules"] == RULES
    assert [line.split()[0] for line in run("check", "--rules").stdout.splitlines()] == list(RULES)
    with pytest.raises(UsageError, match="needs DATA"):
        run("check")


def test_pack_and_unpack(tmp_path, write_step, run):
    for step in range(4):
        write_step(tmp_path, step, "actor", 0, {0: [step, 2]})
    value = json.loads(run("pack", tmp_path, "--every", "2", "--keep", "0", "--json").stdout)
    assert list(value) == [
        "schema",
        "written",
        "num_files",
        "bytes_before",
        "bytes_after",
        "problems",
    ]
    assert value["num_files"] == 4
    assert len(value["written"]) == 2
    assert "2 files" in run("pack", tmp_path, "--unpack").stdout
    assert len(list(tmp_path.rglob("group_list.json"))) == 4
    assert run("pack", tmp_path, "--every", "0").exit_code == 2


def test_help_imports_neither_numpy_nor_msgspec():
    code = (
        "import sys, typer\n"
        "from rl_insight_hooks.report.commands import check, export, pack\n"
        "heavy = {'numpy', 'msgspec', 'matplotlib', 'torch', 'omegaconf'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    from rl_insight_hooks.report import speak

    with speak.progress_on_terminal("reading") as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    clock = iter([0.0, 0.1, 1.0, 1.05, 2.0])
    monkeypatch.setattr(speak, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with speak.progress_on_terminal("reading") as progress:
        for done in (1, 2, 3, 4):
            progress(done, 4)
    shown = capsys.readouterr().err
    assert "reading [############............] 2/4 files" in shown
    assert "reading [########################] 4/4 files" in shown
    assert "1/4" not in shown
    assert "3/4" not in shown
