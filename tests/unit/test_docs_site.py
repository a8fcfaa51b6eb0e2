# SPDX-License-Identifier: Apache-2.0
"""The pages say what the code does: the example of add-a-seam runs, every rule, key and option is written down."""

from __future__ import annotations

import ast
import re
import sys
import types
from pathlib import Path

import pytest
import typer
from tiny_run import counts_by_layer, read

from rl_insight_hooks import installer, schema
from rl_insight_hooks.report import cli
from rl_insight_hooks.report.rules import RULES

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
FIRST, SECOND = [1, 2, 3, 4], [4, 0, 0, 1]


def block(page, name):
    found = re.search(rf":name: {name}\n\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert found, f"{page} has no block {name}"
    return found.group(1)


def module_of(name, source):
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def test_the_example_of_add_a_seam_counts(rih, tmp_path, monkeypatch):
    import torch

    library = module_of("acme_moe", block("add-a-seam.md", "acme_moe"))
    integration = module_of("acme_integration", block("add-a-seam.md", "integration"))
    monkeypatch.setitem(sys.modules, "acme_moe", library)
    monkeypatch.setitem(sys.modules, "acme_integration", integration)
    monkeypatch.setitem(installer.INTEGRATIONS, "acme_moe", "acme_integration")
    monkeypatch.setitem(installer.TARGETS, "acme_moe", ("acme_moe",))
    original = library.grouped_ffn
    rih.install(["acme_moe"])
    assert library.grouped_ffn is not original
    with rih.record(tmp_path, step=1, role="r"):
        for counts in (FIRST, SECOND):
            x, weight = torch.ones(sum(counts), 4), torch.ones(4, 4, 6)
            out = library.grouped_ffn(x, weight, torch.tensor(counts))
            assert torch.equal(out, original(x, weight, torch.tensor(counts)))
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert counts_by_layer(load) == [FIRST, SECOND]
    assert {record.seam for record in load.records} == {"acme_moe.grouped_ffn"}
    rih.uninstall()
    assert library.grouped_ffn is original


def test_every_integration_says_what_it_supports():
    source = (DOCS / "_ext/supported_versions.py").read_text()
    function = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "supported")
    space = {"INTEGRATIONS": REPO / "integrations", "ast": ast}  # without Sphinx, which it imports
    exec(compile(ast.Module([function], []), "supported", "exec"), space)
    assert set(space["supported"]()) == set(installer.INTEGRATIONS)


@pytest.mark.parametrize("struct", ["LoadFile", "Record", "Parallel", "CallRecord"])
def test_every_key_of_the_file_is_documented(struct):
    page = (DOCS / "files.md").read_text()
    fields = getattr(schema, struct).__struct_fields__
    if struct == "Parallel":  # `ep` stands for ep_rank and ep_size
        fields = sorted({name.removesuffix("_rank").removesuffix("_size") for name in fields})
    assert [name for name in fields if f"`{name}`" not in page] == []


def options_of(name):
    app = typer.Typer()
    app.command()(cli._command(name))
    command = typer.main.get_command(app)
    return [
        # any spelling will do: MindSpeed-RL's have underscores
        tuple(o for o in option.opts if o.startswith("--"))
        for option in command.params
        if option.param_type_name == "option" and not option.hidden
    ]


# explained once for all commands, in docs/cli.md
SHARED = {
    "--help", "--json", "--strict", "--jobs", "--step", "--role", "--rank", "--layer", "--phase", "--aggregate",
    "--output", "--ep-size", "--num-moe-layers", "--gmm-per-layer", "--force", "--install-completion",
    "--show-completion",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_and_option_is_documented(name):
    page = DOCS / ("rebalance.md" if name == "rebalance" else f"commands/{name}.md")
    text = page.read_text()
    missing = [o for o in options_of(name) if not SHARED & set(o) and not any(n in text for n in o)]
    assert missing == []


def test_shared_options_are_explained():
    text = (DOCS / "cli.md").read_text()
    completion = {"--help", "--install-completion", "--show-completion"}
    assert [o for o in sorted(SHARED - completion) if f"`{o}`" not in text] == []


def test_rules_that_the_troubleshooting_page_names_exist():
    text = (DOCS / "troubleshooting.md").read_text()
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text)) - {
        "fonts-noto-cjk",
        "rl-insight-report",
    }
    assert named
    assert named <= set(RULES)


def test_every_rule_of_check_has_its_row():
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.*) \|$", (DOCS / "commands/check.md").read_text(), re.M
    )
    assert dict(rows) == RULES
