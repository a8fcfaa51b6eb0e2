# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report.compare import compare, comparison_lines, sampling_noise
from rl_insight_hooks.report.main import run

LAYERS = np.array([3, 4])


def test_by_hand():
    a = np.array([[10, 10, 0, 0], [5, 5, 5, 5]])
    b = np.array([[0, 10, 10, 0], [5, 5, 5, 5]])
    found = compare(("train", LAYERS, a), ("rollout", LAYERS, b))
    assert found.worst_layer == 3
    assert [layer.total_variation for layer in found.layers] == [0.5, 0.0]
    assert found.layers[0].jensen_shannon == pytest.approx(0.5**0.5)
    assert found.total_variation_mean == 0.25
    assert (found.moved[0].layer, found.moved[0].expert) in {(3, 0), (3, 2)}
    assert "25.0% of assignments go elsewhere" in comparison_lines(found, num_layers=0)[1]


def test_sampling_alone_is_told_from_a_difference():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(64), 8)
    draw = lambda n: np.array([rng.multinomial(n, row) for row in p])  # noqa: E731
    layers = np.arange(8)
    same = compare(("a", layers, draw(5000)), ("b", layers, draw(5000)))
    assert same.total_variation_mean == pytest.approx(same.noise, rel=0.25)
    assert "no difference beyond sampling" in "\n".join(comparison_lines(same, num_layers=1))
    assert sampling_noise(np.zeros((1, 4)), np.zeros((1, 4))) == 0


def test_sides_that_do_not_match():
    a = np.ones((2, 4), dtype=int)
    with pytest.raises(UsageError, match="4 experts and b has 5"):
        compare(("a", LAYERS, a), ("b", LAYERS, np.ones((2, 5), dtype=int)))
    with pytest.raises(UsageError, match="no layer in common"):
        compare(("a", LAYERS, a), ("b", LAYERS + 9, a))
    part = compare(("a", LAYERS, a), ("b", LAYERS + 1, a))
    assert (part.only_in_a, part.only_in_b) == ([3], [5])


def test_command(tmp_path, capsys):
    for name, counts in (("a", [30, 10]), ("b", [10, 30])):
        (tmp_path / name).mkdir()
        rows = {"0": {str(e): n for e, n in enumerate(counts)}}
        (tmp_path / name / "eplb_token_collects_0.json").write_text(json.dumps(rows))
    assert run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total_variation_mean"] == 0.5
    assert run(["compare", str(tmp_path / "a")]) == 2
    assert run(["compare", str(tmp_path / "a"), "--roles", "rollout,train"]) == 2
    assert "say what to compare" in capsys.readouterr().err
