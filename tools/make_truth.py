#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make docs/truth.md from the ``@pytest.mark.truth`` marks of the tests, read by ast: nothing is imported.

python tools/make_truth.py           write the page
python tools/make_truth.py --check   exit 1 when the page is not what the marks say
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs/truth.md"
KEYS = ("scenario", "seam", "version", "verdict")
VERDICTS = ("exact", "marked", "not covered", "not run")

HEAD = """# What is exact, what is marked

Made by `tools/make_truth.py` from the tests' own list: every row is a test whose right counts are computed
independently of the recorder. **exact**: equal to that truth. **marked**: right as far as it goes; the file says what
may be wrong. **not covered**: nothing is recorded, and the file says so. **not run**: the test is there, but no
machine at hand had the device that it needs.

"""


Row = tuple[str, str, str, str, str, int]
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def marks(path: Path) -> list[Row]:
    """Return (scenario, seam, version, verdict, test, times) of the marked tests in one file."""
    module = ast.parse(path.read_text())
    rows = []
    for node in ast.walk(module):
        if not isinstance(node, Function):
            continue
        for decorator in node.decorator_list:
            values = _mark_values(module, decorator)
            if values is None:
                continue
            if set(values) != set(KEYS) or values["verdict"] not in VERDICTS:
                raise SystemExit(f"{path}:{node.lineno}: truth mark has {values}")
            test = f"{path.relative_to(REPO)}::{node.name}"
            rows.append((*(values[key] for key in KEYS), test, _num_cases(node)))
    return rows


def _mark_values(module: ast.Module, decorator: ast.expr) -> dict[str | None, str] | None:
    """Return what a decorator says, if it is the mark or the file's own function ``truth`` that makes it."""
    if not isinstance(decorator, ast.Call):
        return None
    called = ast.unparse(decorator.func)
    if called == "pytest.mark.truth":
        return {k.arg: _value(module, k.value, {}) for k in decorator.keywords}
    if called != "truth":
        return None
    maker, home = _maker(module)
    made = next(n.value for n in ast.walk(maker) if isinstance(n, ast.Return))
    assert isinstance(made, ast.Call)
    names = [a.arg for a in maker.args.args]
    given: dict[str, ast.expr] = dict(
        zip(names[len(names) - len(maker.args.defaults) :], maker.args.defaults, strict=True)
    )
    given |= {
        a.arg: d for a, d in zip(maker.args.kwonlyargs, maker.args.kw_defaults, strict=True) if d
    }
    given |= dict(zip(names, decorator.args, strict=False))
    given |= {str(k.arg): k.value for k in decorator.keywords}
    return {k.arg: _value(home, k.value, given) for k in made.keywords}


def _maker(module: ast.Module) -> tuple[ast.FunctionDef, ast.Module]:
    """Return the function ``truth`` of a test file and the module that it stands in: its own, or a helper's."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == "truth":
            return node, module
        if isinstance(node, ast.ImportFrom) and any(n.name == "truth" for n in node.names):
            return _maker(ast.parse((REPO / f"tests/support/{node.module}.py").read_text()))
    raise SystemExit("a test is marked by truth(), which neither it nor a helper defines")


def _value(module: ast.Module, value: ast.expr, given: dict[str, ast.expr]) -> str:
    """Return a literal, an argument of the maker, or a constant of the file, as text."""
    if isinstance(value, ast.Name):
        if value.id in given:
            return _value(module, given[value.id], {})
        for node in module.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == value.id:
                return str(ast.literal_eval(node.value))
    return str(ast.literal_eval(value))


def _num_cases(node: Function) -> int:
    """Cases of the test, from its literal parametrize lists; at least 1."""
    num = 1
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and ast.unparse(decorator.func) == "pytest.mark.parametrize"
        ):
            values = decorator.args[1] if len(decorator.args) > 1 else None
            if isinstance(values, ast.List | ast.Tuple):
                num *= max(len(values.elts), 1)
    return num


def page() -> str:
    """Return the text of docs/truth.md."""
    rows = sorted(
        row for path in sorted((REPO / "tests").rglob("test_*.py")) for row in marks(path)
    )
    num_cases = sum(row[5] for row in rows)
    exact = sum(row[3] == "exact" for row in rows)
    lines = [
        HEAD + f"{len(rows)} scenarios ({exact} exact), {num_cases} cases or more.\n",
        "| scenario | seam | version | verdict | test |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {s} | {seam} | {v} | {verdict} | `{test}` |" for s, seam, v, verdict, test, _ in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text() != text:
            raise SystemExit("docs/truth.md is not what the tests say: run tools/make_truth.py")
        return
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
