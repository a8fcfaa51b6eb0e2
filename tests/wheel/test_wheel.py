# SPDX-License-Identifier: Apache-2.0
"""The installed wheel, away from the checkout: everything is in it and works (nox session ``wheel``)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

if "rl_insight_hooks" not in sys.modules:
    spec = importlib.util.find_spec("rl_insight_hooks")
    assert spec is not None, "the wheel is not installed here: run the nox session wheel"
    if Path(sys.prefix).resolve() not in Path(spec.origin).resolve().parents:
        pytest.skip(
            "the checkout is on the path, not the wheel: run the nox session wheel",
            allow_module_level=True,
        )


def python(code, cwd):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def folders_of_the_tree():
    """Packages that the checkout has, by the one mapping of pyproject.toml."""
    found = set()
    for top, name in (
        (REPO / "rl_insight_hooks", "rl_insight_hooks"),
        (REPO / "integrations", "rl_insight_hooks.integrations"),
    ):
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(top).parts
            found.add(".".join((name, *parts)))
    return found


def test_every_package_of_the_tree_is_installed():
    for name in sorted(folders_of_the_tree()):
        assert importlib.util.find_spec(name) is not None, (
            f"{name} is missing: add it to tool.setuptools.packages"
        )


def test_integrations_are_where_the_core_looks_for_them(tmp_path):
    out = python(
        "import importlib.util as u, rl_insight_hooks.installer as i\n"
        "print([n for n, m in i.INTEGRATIONS.items() if u.find_spec(m) is None])",
        tmp_path,
    )
    assert out == "[]"


def test_entry_points_load():
    groups = {"verl.plugins": "rl_insight_hooks", "vllm.general_plugins": "rl_insight_hooks"}
    for group, name in groups.items():
        (point,) = [p for p in importlib.metadata.entry_points(group=group) if p.name == name]
        assert point.load() is not None


def test_py_typed_and_licence_are_there():
    files = {str(f) for f in importlib.metadata.files("rl-insight-hooks")}
    assert "rl_insight_hooks/py.typed" in files
    assert any(f.endswith("LICENSE") for f in files)
    page = "rl_insight_hooks/report/page/page"
    assert {f"{page}.html", f"{page}.css", f"{page}.js"} <= files
    assert not any(f.startswith(("tests/", "integrations/")) for f in files)


def test_command_runs(tmp_path):
    done = subprocess.run(
        [str(Path(sys.executable).parent / "rl-insight-report"), "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("rl-insight-hooks ")


def test_sdist_builds_the_same(tmp_path):
    sdists = sorted(REPO.glob(".nox/wheel/tmp/dist/*.tar.gz"))
    if not sdists:
        pytest.skip("no sdist was built: run the nox session wheel")
    with tarfile.open(sdists[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "integrations/torch_npu.py",
        "rl_insight_hooks/api.py",
        "LICENSE",
        "pyproject.toml",
    } <= names
