# SPDX-License-Identifier: Apache-2.0
"""What a heatmap shows, and that the picture shows it: on pixels that matter."""

from __future__ import annotations

import dataclasses

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from small_table import table

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report import heatmap_data
from rl_insight_hooks.report.heatmap import Style, draw


def many(num_layers, num_experts, *, steps=(1,), roles=("train",), ranks=(None,), hot=()):
    rng = np.random.default_rng(0)
    rows = [
        (s, r, k, la, "forward", rng.integers(0, 50, num_experts))
        for r in roles
        for s in steps
        for k in ranks
        for la in range(num_layers)
    ]
    for n, expert in hot:
        rows[n][5][expert] = 1000
    return table(rows, roles=roles)


def test_blocks_rows_and_labels():
    picture = heatmap_data.build(many(3, 4, steps=(1, 2), roles=("a", "b"), ranks=(0, 1)))
    assert [b.label for b in picture.blocks] == [
        f"step {s} | {r} | rank {k}" for s in (1, 2) for r in ("a", "b") for k in (0, 1)
    ]
    assert picture.row_labels == ("0", "1", "2") * 8
    assert picture.column_labels == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("view", "row_name", "num_blocks"), [("ranks", "rank", 6), ("steps", "step", 6)]
)
def test_views(view, row_name, num_blocks):
    data = many(3, 4, steps=(1, 2), ranks=(0, 1))
    picture = heatmap_data.build(data, view=view)
    assert picture.row_name == row_name
    assert len(picture.blocks) == num_blocks
    assert np.nansum(picture.value_RC) == data.counts_NE.sum()


def test_view_experts_is_turned():
    data = many(3, 4, hot=[(2, 1)])
    picture = heatmap_data.build(data, view="experts")
    assert picture.value_RC.shape == (4, 3)
    assert np.array_equal(picture.value_RC, data.counts_NE.T)
    assert (picture.hottest[0].row, picture.hottest[0].column) == (1, 2)


def test_view_experts_keeps_each_layer_in_its_column(tmp_path):
    data = table(
        [
            (1, "a", None, 0, "forward", [1, 2, 3]),
            (1, "a", None, 1, "forward", [4, 5, 6]),
            (1, "b", None, 1, "forward", [7, 8, 0]),
            (1, "b", None, 10, "forward", [9, 1, 0]),
        ],
        roles=("a", "b"),
    )
    held = np.array([3, 3, 2, 2])
    picture = heatmap_data.build(dataclasses.replace(data, held_N=held), view="experts")
    assert picture.column_labels == ("0", "1", "10")
    nan = float("nan")
    expected = [[1, 4, nan], [2, 5, nan], [3, 6, nan], [nan, 7, 9], [nan, 8, 1], [nan] * 3]
    assert np.array_equal(picture.value_RC, np.array(expected), equal_nan=True)
    hot = picture.hottest[0]
    assert (hot.row, hot.column, hot.tokens) == (3, 2, 9)
    assert "layer 10 expert 0" in hot.label
    draw(picture, tmp_path / "p.png", Style(dpi=50))


def test_normalize_and_sort():
    data = table(
        [
            (1, "train", None, 0, "forward", [1, 2, 3, 6]),
            (1, "train", None, 1, "forward", [0, 4, 0, 0]),
        ]
    )
    assert heatmap_data.build(data, normalize="row").value_RC.tolist() == [
        [1 / 3, 2 / 3, 1, 2],
        [0, 4, 0, 0],
    ]
    assert heatmap_data.build(data, normalize="layer").value_RC[0].tolist() == [
        1 / 6,
        2 / 6,
        3 / 6,
        1,
    ]
    by_load = heatmap_data.build(data, sort="load")
    assert by_load.column_labels == ("1", "3", "2", "0")
    assert by_load.value_RC[1].tolist() == [4, 0, 0, 0]


def test_experts_that_a_rank_does_not_hold_are_not_zero():
    data = table([(1, "train", 1, 0, "forward", [0, 0, 5, 7])], held=(2, 2))
    picture = heatmap_data.build(data)
    assert picture.column_labels == ("2", "3")
    assert picture.imbalance_R[0] == pytest.approx(7 / 6)


def test_pooling_loses_no_hot_row_and_mixes_no_blocks():
    hot = [(17, 3), (4321, 0), (9999, 7)]
    picture = heatmap_data.build(many(100, 8, steps=range(100), hot=hot))
    pooled = heatmap_data.pooled(picture, 400)
    assert pooled.num_rows_per_pixel_row == 25
    assert pooled.value_RC.shape[0] == 400
    assert (pooled.value_RC == 1000).sum() == 3
    assert all(b.num_rows == 4 for b in pooled.blocks)
    for row, column in hot:
        assert pooled.value_RC[row // 25, column] == 1000


def test_pages_are_cut_between_blocks():
    picture = heatmap_data.build(many(10, 4, steps=range(7)))
    pages = heatmap_data.pages(picture, 30)
    assert [p.value_RC.shape[0] for p in pages] == [30, 30, 10]
    assert np.array_equal(np.concatenate([p.value_RC for p in pages]), picture.value_RC)


def test_bad_options_are_named():
    data = many(1, 2)
    with pytest.raises(UsageError, match="--view sideways"):
        heatmap_data.build(data, view="sideways")
    with pytest.raises(UsageError, match="nothing to draw"):
        heatmap_data.build(data.take(np.zeros(1, dtype=bool)))
    with pytest.raises(UsageError, match="no colour map"):
        Style(cmap="virids")
    with pytest.raises(UsageError, match="dpi"):
        Style(dpi=0)


def colour_count(picture, colour, tolerance=0.02):
    return int((np.abs(picture[..., :3] - np.array(colour[:3])) < tolerance).all(-1).sum())


def test_hot_cell_is_hot_on_the_picture(tmp_path):
    data = table(
        [
            (1, "train", None, la, "forward", [100 if (la, e) == (2, 5) else 10 for e in range(8)])
            for la in range(4)
        ]
    )
    (file,), notes = draw(
        heatmap_data.build(data, num_hottest=0), tmp_path / "p.png", Style(dpi=100)
    )
    assert notes == []
    picture = matplotlib.image.imread(file)
    cmap = matplotlib.colormaps["viridis"]
    hot, cold = colour_count(picture, cmap(1.0)), colour_count(picture, cmap(0.1))
    assert hot > 500
    assert 15 < cold / hot < 45  # 31 cells to one, less what the colour bar shows of both


def test_no_token_is_not_grey_on_a_log_scale(tmp_path):
    data = table([(1, "train", None, la, "forward", [100, 0, 0, 10]) for la in range(4)])
    (file,), _ = draw(
        heatmap_data.build(data, num_hottest=0), tmp_path / "p.png", Style(dpi=100, log=True)
    )
    picture = matplotlib.image.imread(file)
    assert (
        colour_count(picture, matplotlib.colors.to_rgb("#e4e4e4")) < 1000
    )  # letters have grey edges
    cmap = matplotlib.colormaps["viridis"]
    zeros_and_tens, hundreds = colour_count(picture, cmap(0.0)), colour_count(picture, cmap(1.0))
    assert 2.5 < zeros_and_tens / hundreds < 3.5


@pytest.mark.parametrize(
    "role", ["a$b_{c", "x" * 300, "\u8bad\u7ec3\u66f4\u65b0\u53c2\u8003\u6a21\u578b" * 2]
)
def test_every_name_fits_and_is_no_formula(tmp_path, role):
    data = table([(1, role, None, 0, "forward", [1, 2])], roles=(role,))
    (file,), _ = draw(heatmap_data.build(data), tmp_path / "p.png", Style(dpi=100, title=role))
    picture = matplotlib.image.imread(file)
    above_the_footer = picture[:-100, :, :3]
    for edge in (above_the_footer[:, :4], above_the_footer[:, -4:]):
        assert edge.min() == 1.0  # white: nothing runs out of the picture


def test_blocks_are_apart(tmp_path):
    data = many(4, 8, steps=(1, 2, 3))
    (file,), _ = draw(heatmap_data.build(data, num_hottest=0), tmp_path / "p.png", Style(dpi=100))
    picture = matplotlib.image.imread(file)[..., :3]
    # a column through the middle of the heat area: coloured runs with white between them
    column = picture[:, int(picture.shape[1] * 0.5)]
    coloured = ~(column > 0.98).all(-1)
    runs = np.flatnonzero(np.diff(coloured.astype(int)) == 1)
    lengths = np.flatnonzero(np.diff(coloured.astype(int)) == -1) - runs[: len(runs)]
    assert (lengths > 50).sum() == 3


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_endings_and_folder(tmp_path, ending):
    (file,), _ = draw(heatmap_data.build(many(2, 4)), tmp_path / f"x{ending}", Style(dpi=60))
    assert file.stat().st_size > 1000
    (file,), _ = draw(heatmap_data.build(many(2, 4)), tmp_path / "folder", Style(dpi=60))
    assert file.name == "gmm_heatmap.png"
    with pytest.raises(UsageError, match=r"\.gif"):
        draw(heatmap_data.build(many(2, 4)), tmp_path / "x.gif")


def test_names_beyond_latin_are_drawn_or_noted(tmp_path):
    data = many(2, 4, roles=("演员",))
    files, notes = draw(heatmap_data.build(data), tmp_path / "p.png", Style(dpi=60))
    from rl_insight_hooks.report.heatmap import _font_beyond_latin

    assert files[0].exists()
    assert bool(notes) == (_font_beyond_latin() is None)


def test_twenty_thousand_rows_say_that_they_are_pooled(tmp_path):
    picture = heatmap_data.build(many(200, 8, steps=range(100), hot=[(12_345, 3)]))
    (file,), notes = draw(picture, tmp_path / "p.png", Style(dpi=50))
    assert "maximum of up to" in notes[0]
    assert colour_count(matplotlib.image.imread(file), matplotlib.colormaps["viridis"](1.0)) > 0
