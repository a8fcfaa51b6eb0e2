# SPDX-License-Identifier: Apache-2.0
"""Draws a :class:`~rl_insight_hooks.report.heatmap_data.Heatmap`. No arithmetic on loads here.

matplotlib's object API, no pyplot: no global state, and a third of the import time.
"""

from __future__ import annotations

import math
import unicodedata
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL.Image
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import PcolorImage
from matplotlib.patches import Rectangle

from rl_insight_hooks.errors import UsageError
from rl_insight_hooks.report import heatmap_data
from rl_insight_hooks.report.heatmap_data import Heatmap

DEFAULT_FILE_NAME = "gmm_heatmap.png"
ENDINGS = (".png", ".svg", ".pdf")

_MAX_HEIGHT_IN = 24.0
_MAX_ROWS_PER_PAGE = 1500
_MAX_PAGES = 8
_MAX_LABEL_CELLS = 60
_NAMES_ARE_NO_FORMULAS: dict[str, Any] = {"parse_math": False}  # a dollar begins none
_ABSENT_COLOUR = "#e4e4e4"
_BAND_COLOURS = (
    "#4c72b0",
    "#dd8452",
    "#55a868",
    "#8172b3",
    "#937860",
    "#64b5cd",
    "#c44e52",
    "#8c8c8c",
)
_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "SimHei",
    "Microsoft YaHei",
    "PingFang SC",
    "Droid Sans Fallback",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How to draw."""

    dpi: int = 200
    cmap: str = "viridis"
    log: bool = False
    title: str = ""

    def __post_init__(self) -> None:
        if self.dpi < 20 or self.dpi > 1200:
            raise UsageError(f"--dpi {self.dpi} is out of range; choose 20 to 1200")
        if self.cmap not in matplotlib.colormaps:
            raise UsageError(
                f"--cmap {self.cmap} is no colour map of matplotlib; try viridis or magma"
            )


def draw(
    picture: Heatmap, output: Path, style: Style | None = None
) -> tuple[list[Path], list[str]]:
    """Draw ``picture`` to ``output``, in several files where one would be unreadable.

    Args:
        picture: what to draw.
        output: a file ending in .png, .svg or .pdf, or a folder (then ``gmm_heatmap.png`` in it).
        style: resolution, colours, title.

    Returns:
        (files written, notes for the user).

    Raises:
        UsageError: an ending that cannot be written.
    """
    style = style or Style()
    target = output_file(output)
    notes: list[str] = []
    fonts = ["DejaVu Sans"]
    texts = [style.title, *(b.label for b in picture.blocks)]
    if not all(text.isascii() for text in texts):
        found = _font_beyond_latin()
        if found is None:
            notes.append(
                "some names are not in latin letters and no CJK font is installed: they are drawn as boxes; "
                "install e.g. the package fonts-noto-cjk"
            )
        else:
            fonts.append(found)
    shown = heatmap_data.pages(picture, _MAX_ROWS_PER_PAGE)
    if len(shown) > _MAX_PAGES:
        shown = [picture]
    files = []
    with (
        matplotlib.rc_context({"font.family": fonts, "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the note says it
        top = float(np.nanmax(picture.value_RC)) if np.isfinite(picture.value_RC).any() else 1.0
        for i, page in enumerate(shown):
            drawn = heatmap_data.pooled(page, _row_budget(style, len(page.blocks)))
            if drawn.num_rows_per_pixel_row > 1:
                notes.append(
                    f"{page.value_RC.shape[0]} rows do not fit: each drawn row is the maximum of up to "
                    f"{drawn.num_rows_per_pixel_row}"
                )
            part = f" ({i + 1} of {len(shown)})" if len(shown) > 1 else ""
            file = (
                target
                if len(shown) == 1
                else target.with_name(f"{target.stem}-{i + 1}{target.suffix}")
            )
            figure = _figure(drawn, style, top, part)
            file.parent.mkdir(parents=True, exist_ok=True)
            _save(figure, file, style.dpi)
            files.append(file)
    return files, notes


def _save(figure: Figure, file: Path, dpi: int) -> None:
    if file.suffix.lower() != ".png":
        figure.savefig(file, dpi=dpi)
        return
    # as savefig does, but without the alpha of a white figure and with the fast kind of compression:
    # half the time, about the same size
    figure.set_dpi(dpi)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    size = canvas.get_width_height(physical=True)
    image = PIL.Image.frombytes("RGB", size, canvas.buffer_rgba(), "raw", "RGBX")
    image.save(file, "png", dpi=(dpi, dpi), compress_type=zlib.Z_RLE, compress_level=1)


def output_file(output: Path) -> Path:
    """Return the file to write for what was given as ``-o``.

    Raises:
        UsageError: an ending that cannot be written.
    """
    if output.is_dir() or output.suffix == "":
        return output / DEFAULT_FILE_NAME
    if output.suffix.lower() not in ENDINGS:
        raise UsageError(
            f"-o {output}: cannot write {output.suffix}; choose {', '.join(ENDINGS)} or a folder"
        )
    return output


def _row_budget(style: Style, num_blocks: int) -> int:
    """Rows that fit the tallest figure: at least one pixel each."""
    return max(int(_MAX_HEIGHT_IN * style.dpi * 0.85) - 4 * num_blocks, 50)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Sizes in inches, chosen so that text keeps its size at any number of rows and columns."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    gap_rows: float


def _layout(picture: Heatmap, footer_lines: int) -> _Layout:
    num_rows, num_columns = picture.value_RC.shape
    row_in = min(max(10.5 / num_rows, 0.012), 0.24)
    heat_height = min(max(num_rows * row_in, 1.6, 0.24 * len(picture.blocks)), _MAX_HEIGHT_IN * 0.9)
    heat_width = min(max(num_columns * 0.16, 5.0), 12.0)
    longest_block = max((_cells(_shortened(b.label)) for b in picture.blocks), default=0)
    longest_row = max((len(label) for label in picture.row_labels), default=1)
    left = 0.55 + 0.075 * longest_block + 0.08 * longest_row
    right = 2.9
    top, bottom = 0.95, 0.75 + 0.17 * footer_lines + 0.08
    gap = 0.06 * num_rows / heat_height if len(picture.blocks) > 1 else 0.0
    return _Layout(
        left + heat_width + right, top + heat_height + bottom, left, right, top, bottom, gap
    )


def _figure(picture: Heatmap, style: Style, top_value: float, part: str) -> Figure:
    footer = [
        f"{h.label}: {h.tokens:,} tokens, {h.over_mean:.1f}x its row's mean"
        for h in picture.hottest
    ]
    lay = _layout(picture, len(footer) + 1 if footer else 0)
    figure = Figure(figsize=(lay.width, lay.height), facecolor="white")
    FigureCanvasAgg(figure)
    heat_w = lay.width - lay.left - lay.right
    heat_h = lay.height - lay.top - lay.bottom
    box = (lay.left / lay.width, lay.bottom / lay.height, heat_w / lay.width, heat_h / lay.height)
    heat = figure.add_axes(box)
    side = figure.add_axes(
        ((lay.left + heat_w + 0.12) / lay.width, box[1], 1.1 / lay.width, box[3]), sharey=heat
    )
    scale = figure.add_axes(
        (
            (lay.left + heat_w + 1.5) / lay.width,
            (lay.bottom + max(heat_h - 4.0, 0.0)) / lay.height,
            0.16 / lay.width,
            min(heat_h, 4.0) / lay.height,
        )
    )
    tops = _row_tops(picture, lay.gap_rows)
    norm = _norm(picture, style, top_value)
    base = matplotlib.colormaps[style.cmap]
    colours = base.with_extremes(bad=_ABSENT_COLOUR)
    # a logarithm has no zero: no token at all is drawn as the fewest, and only the absent are grey
    least = norm.vmin if style.log and norm.vmin is not None else 0.0
    shown_RC = np.ma.masked_invalid(np.maximum(picture.value_RC, least))
    heat.add_image(_cells_image(heat, picture, tops, colours(norm(shown_RC), bytes=True)))
    end = tops[-1] + 1
    heat.set_xlim(-0.5, picture.value_RC.shape[1] - 0.5)
    heat.set_ylim(end, 0)
    heat.set_facecolor("white")
    for spine in heat.spines.values():
        spine.set_visible(False)
    _ticks(heat, picture, tops, heat_w, heat_h / end)
    _bands(heat, picture, tops, lay, heat_w, heat_h / end)
    _mark_hottest(heat, picture, tops)
    _imbalance(side, picture, tops)
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=scale)
    bar.set_label(picture.unit)
    bar.outline.set_visible(False)
    title = style.title or "Expert load"
    if picture.num_rows_per_pixel_row > 1:
        title += f"  [each row is the maximum of up to {picture.num_rows_per_pixel_row} rows]"
    title = _shortened(title, int((lay.width - 0.5) / 0.11) - len(part)) + part
    at = (0.25 / lay.width, 1 - 0.38 / lay.height)
    figure.text(*at, title, fontsize=13, va="center", **_NAMES_ARE_NO_FORMULAS)
    _footer(figure, lay, footer)
    return figure


def _cells_image(
    axes: Any, picture: Heatmap, tops: np.ndarray, rgba_RC4: np.ndarray
) -> PcolorImage:
    """One image for all blocks: colours are looked up per cell, not per pixel, and gaps are see-through."""
    gap = np.zeros((1, *rgba_RC4.shape[1:]), dtype=np.uint8)
    strips, edges = [], []
    for block in picture.blocks:
        rows = slice(block.first_row, block.first_row + block.num_rows)
        strips += [rgba_RC4[rows], gap]
        edges += [*tops[rows], tops[rows][-1] + 1]
    x = np.arange(rgba_RC4.shape[1] + 1) - 0.5
    return PcolorImage(axes, x, edges, np.concatenate(strips[:-1]))


def _row_tops(picture: Heatmap, gap: float) -> np.ndarray:
    """Top of each row in data units: rows are 1 high, blocks a gap apart."""
    tops = np.arange(picture.value_RC.shape[0], dtype=float)
    for i, block in enumerate(picture.blocks):
        tops[block.first_row : block.first_row + block.num_rows] += i * gap
    return tops


def _norm(picture: Heatmap, style: Style, top_value: float) -> Normalize:
    """One norm for all pages."""
    if style.log:
        finite = picture.value_RC[np.isfinite(picture.value_RC) & (picture.value_RC > 0)]
        low = float(finite.min()) if finite.size else 0.1
        # at least a decade: a narrower bar has no readable ticks
        return LogNorm(vmin=low, vmax=max(top_value, low * 10.0), clip=False)
    return Normalize(vmin=0.0, vmax=top_value if top_value > 0 else 1.0)


def _ticks(axes: Any, picture: Heatmap, tops: np.ndarray, width_in: float, row_in: float) -> None:
    num_columns = picture.value_RC.shape[1]
    longest = max(len(label) for label in picture.column_labels)
    step = _nice_step(num_columns * 0.085 * (longest + 1.5) / width_in)
    at = list(range(0, num_columns, step))
    axes.set_xticks(at, [picture.column_labels[i] for i in at], fontsize=8)
    axes.set_xlabel(picture.column_name, fontsize=9)
    step = _nice_step(0.13 / row_in)
    rows = [
        r
        for block in picture.blocks
        for r in range(block.first_row, block.first_row + block.num_rows, step)
        # the last label of a block must not run into the first of the next
        if block.num_rows >= step or r == block.first_row
    ]
    if len(picture.blocks) > 1 and min(b.num_rows for b in picture.blocks) * row_in < 0.13:
        rows = []  # blocks too low for a row label: their own labels must do
    axes.set_yticks(
        [tops[r] + 0.5 for r in rows], [picture.row_labels[r] for r in rows], fontsize=8
    )
    axes.tick_params(length=2, pad=2)
    axes.set_ylabel("")
    axes.annotate(
        picture.row_name, (0, 1), xytext=(-4, 4), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="bottom", fontsize=9,
    )  # fmt: skip


def _nice_step(least: float) -> int:
    """Return the smallest of 1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, ... that is at least ``least``."""
    if least <= 1:
        return 1
    for step in (2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512):
        if step >= least:
            return step
    return int(10 ** math.ceil(math.log10(least)))


def _bands(
    axes: Any, picture: Heatmap, tops: np.ndarray, lay: _Layout, width_in: float, row_in: float
) -> None:
    """A coloured band with a label left of each block; labels thin out where blocks are too low."""
    groups = list(dict.fromkeys(b.group for b in picture.blocks))
    per_inch = picture.value_RC.shape[1] / width_in
    longest_row = max(len(label) for label in picture.row_labels)
    band_x = -0.5 - (0.22 + 0.08 * longest_row) * per_inch
    free_from = -1.0
    for block in picture.blocks:
        y, height = tops[block.first_row], float(block.num_rows)
        colour = _BAND_COLOURS[groups.index(block.group) % len(_BAND_COLOURS)]
        axes.add_patch(
            Rectangle((band_x, y), 0.1 * per_inch, height, color=colour, clip_on=False, linewidth=0)
        )
        middle = y + height / 2
        if middle - 0.075 / row_in < free_from:
            continue
        free_from = middle + 0.075 / row_in
        axes.text(
            band_x - 0.06 * per_inch,
            middle,
            _shortened(block.label),
            ha="right",
            va="center",
            fontsize=8,
            clip_on=False,
            **_NAMES_ARE_NO_FORMULAS,
        )


def _cells(text: str) -> int:
    """Return the width of ``text`` in latin letters: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _shortened(text: str, most: int = _MAX_LABEL_CELLS) -> str:
    """Return ``text``, cut off with dots where it is wider than ``most`` latin letters."""
    if _cells(text) <= most:
        return text
    while text and _cells(text) > most - 3:
        text = text[:-1]
    return text + "..."


def _mark_hottest(axes: Any, picture: Heatmap, tops: np.ndarray) -> None:
    for cell in picture.hottest:
        axes.add_patch(
            Rectangle(
                (cell.column - 0.5, tops[cell.row]),
                1,
                1,
                fill=False,
                edgecolor="red",
                linewidth=0.9,
            )
        )


def _imbalance(axes: Any, picture: Heatmap, tops: np.ndarray) -> None:
    """max/mean of each row, beside it; numbers where rows are few enough to read."""
    value = np.nan_to_num(picture.imbalance_R, nan=1.0)
    low, high_R = np.ones_like(value), np.maximum(value, 1.0)
    corner_R42 = np.stack(
        [
            np.stack([low, high_R, high_R, low], axis=1),
            (tops + 0.1)[:, None] + np.array([0.0, 0.0, 0.8, 0.8]),
        ],
        axis=2,
    )
    axes.add_collection(
        PolyCollection(list(corner_R42), facecolor="#8c8c8c", linewidth=0), autolim=False
    )
    high = max(float(value.max()), 1.05)
    axes.set_xlim(1.0, 1.0 + (high - 1.0) * 1.45)
    axes.set_xticks([1.0, high], ["1", f"{high:.1f}"], fontsize=8)
    axes.set_xlabel("max/mean", fontsize=9)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.tick_params(axis="x", length=2, pad=2)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)
    row_in = axes.get_position().height * axes.figure.get_figheight() / (tops[-1] + 1)
    if row_in >= 0.11:
        for y, v in zip(tops, picture.imbalance_R, strict=True):
            text = "-" if np.isnan(v) else f"{v:.2f}"
            axes.text(
                max(0 if np.isnan(v) else v, 1.0) + (high - 1.0) * 0.04,
                y + 0.5,
                text,
                va="center",
                fontsize=7,
            )


def _footer(figure: Figure, lay: _Layout, lines: list[str]) -> None:
    if not lines:
        return
    for i, line in enumerate(["hottest cells (framed red):", *lines]):
        y = (0.17 * (len(lines) - i) + 0.16) / lay.height
        figure.text(0.25 / lay.width, y, line, fontsize=8, va="center", **_NAMES_ARE_NO_FORMULAS)


def _font_beyond_latin() -> str | None:
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return next((name for name in _CJK_FONTS if name in installed), None)
