# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from rl_insight_hooks.report.main import run


def test_bare_machine(rih, capsys):
    assert run(["doctor", "--no-import"]) == 0
    out = capsys.readouterr().out
    assert "vllm_ascend   absent  vllm_ascend is not installed here" in out
    assert "numpy" in out


def test_hooks_and_another_tool_on_one_attribute(rih, npu, capsys):
    original = npu.npu_grouped_matmul
    rih.install()
    ours = npu.npu_grouped_matmul

    def other_tool(*args, **kwargs):
        return ours(*args, **kwargs)

    other_tool.__wrapped__ = ours
    npu.npu_grouped_matmul = other_tool
    try:
        assert run(["doctor", "--no-import", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        (integration,) = [i for i in found["integrations"] if i["name"] == "torch_npu"]
        assert integration["state"] == "hooked"
        chain = next(
            h["chain"] for h in integration["hooks"] if h["where"] == "torch_npu.npu_grouped_matmul"
        )
        assert "other_tool" in chain[0]
        assert chain[1] == "rl_insight_hooks (live)"
        assert any("other_tool" in tool for tool in found["tools_on_attributes"])
        assert run(["doctor", "--no-import"]) == 0
        text = capsys.readouterr().out
        head = text.index("also on torch_npu.npu_grouped_matmul, outermost first:")
        links = [line.strip() for line in text[head:].splitlines()[1:3]]
        assert links == [chain[0], "rl_insight_hooks (live)"]
        # a look changes nothing
        assert npu.npu_grouped_matmul is other_tool
    finally:
        npu.npu_grouped_matmul = ours
        rih.uninstall()
    assert npu.npu_grouped_matmul is original


def test_decorators_of_the_library_itself_are_no_other_tool(session):
    from rl_insight_hooks.diagnose import diagnose

    library = ModuleType("lib_c")
    exec(_LIBRARY, vars(library))
    session.installer.patcher.replace(
        library.Worker, "work", lambda original, gate: lambda self: original(self)
    )
    session.installer.wanted["verl"] = True  # installed: doctor looks, and takes nothing out
    found = diagnose(import_targets=False)
    (hook,) = [h for i in found.integrations for h in i.hooks]
    assert hook.where == "lib_c.Worker.work"
    assert len(hook.chain) == 3
    assert hook.others == found.tools_on_attributes == []


_LIBRARY = """
import functools

def traced(function):
    @functools.wraps(function)
    def wrapper(self):
        return function(self)
    return wrapper

class Worker:
    @traced
    def work(self):
        return 1
"""


@pytest.fixture
def broken_framework(tmp_path, monkeypatch):
    """A package named mindspeed whose modules print, fail, exit, or are not there."""
    for name, text in {
        "__init__.py": "print('a greeting of the library')",
        "ops/__init__.py": "",
        "ops/gmm.py": "raise OSError('libascendcl.so: cannot open shared object file')",
    }.items():
        path = tmp_path / "mindspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "mindspeed":
            del sys.modules[name]


def test_what_does_not_import_is_named_with_its_error(rih, broken_framework, capsys):
    assert run(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)  # what a library prints is not data
    (mindspeed,) = [i for i in found["integrations"] if i["name"] == "mindspeed"]
    assert mindspeed["state"] == "failed"
    assert mindspeed["not_imported"] == {
        "mindspeed.ops.gmm": "OSError: libascendcl.so: cannot open shared object file"
    }  # mindspeed.op_builder is not part of this version: no error
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "mindspeed     failed  what it hooks does not import here" in text
    assert "libascendcl.so" in text
    assert max(map(len, text.splitlines())) <= 120


def test_switched_off(rih, npu, monkeypatch, capsys):
    monkeypatch.setenv("RL_INSIGHT_HOOKS", "0")
    original = npu.npu_grouped_matmul
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["switched"] == "off"
    assert npu.npu_grouped_matmul is original


def test_estimate(capsys):
    line = "doctor --estimate --layers 58 --experts 256 --steps 1000 --roles 3 --ranks 1 --pack-every 100 --json"
    assert run(line.split()) == 0
    volume = json.loads(capsys.readouterr().out)
    assert volume["packed_bytes_per_step"] < 40_000
    assert volume["num_files"] < 1000
