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
VERDICTS = ("exact", "marked", "not covered")

HEAD = """# What is exact, what is marked

Made by `tools/make_truth.py` from the tests' own list: every row is a test whose right counts are computed
independently of the recorder. **exact**: equal to that truth. **marked**: right as far as it goes; the file says what
may be wrong. **not covered**: nothing is recorded, and the file says so.

"""


def marks(path: Path) -> list[tuple[str, str, str, str, str, int]]:
    """Return (scenario, seam, version, verdict, test, times) of the marked tests in one file."""
    rows = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if not (
                isinstance(decorator, ast.Call)
                and ast.unparse(decorator.func) == "pytest.mark.truth"
            ):
                continue
            values = {}
            for keyword in decorator.keywords:
                try:
                    values[keyword.arg] = str(ast.literal_eval(keyword.value))
                except ValueError:  # a constant of the test module
                    values[keyword.arg] = _constant(path, keyword.value)
            if set(values) != set(KEYS) or values["verdict"] not in VERDICTS:
                raise SystemExit(f"{path}:{node.lineno}: truth mark has {values}")
            test = f"{path.relative_to(REPO)}::{node.name}"
            rows.append((*(values[key] for key in KEYS), test, _num_cases(node)))
    return rows


def _constant(path: Path, value: ast.expr) -> str:
    name = ast.unparse(value)
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{path}: truth mark with {name}, which is no constant of the file")


def _num_cases(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
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
