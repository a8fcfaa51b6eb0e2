# SPDX-License-Identifier: Apache-2.0
"""The arrays of DeepSeek's EPLB as npz: ``phy2log`` [L, P], ``log2phy`` [L, E, X] padded with -1, ``logcnt``
[L, E].

Beside them, since nothing in those arrays says so, ``layer_ids`` [L] (decoder layers) and ``num_devices``. The
bytes depend on the placement only (zip entries carry no time), so equal maps have equal hashes.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.rebalance.formats.found import FoundMap
from rl_insight_hooks.rebalance.placement import Placement, replica_count_of

RULES: dict[str, str] = {
    "maps-agree": "log2phy and logcnt say the same as phy2log",
}


def encode(placement: Placement) -> bytes:
    """Return the npz file."""
    arrays = {
        "phy2log": placement.physical_to_logical,
        "log2phy": placement.logical_to_physical,
        "logcnt": placement.replica_count,
        "layer_ids": np.array(placement.layer_ids, dtype=np.int64),
        "num_devices": np.array(placement.num_devices, dtype=np.int64),
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # its time is fixed: 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content.getvalue())
    return stream.getvalue()


def decode(data: bytes) -> FoundMap:
    """Return what the file says; ``layer_ids`` and ``num_devices`` may be missing.

    Raises:
        DataError: it is no such file, or breaks one of :data:`RULES`.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays: dict[str, npt.NDArray[Any]] = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for damaged bytes
        raise DataError(f"the deepseek map is no npz file of plain arrays: {error}") from None
    phy2log = _whole(arrays, "phy2log", 2)
    if phy2log.min() < 0:
        raise DataError(f"phy2log holds {phy2log.min()}; expert ids start at 0")
    num_experts = None
    if "logcnt" in arrays:
        logcnt = _whole(arrays, "logcnt", 2)
        num_experts = logcnt.shape[1]
        if phy2log.max() >= num_experts or not np.array_equal(
            replica_count_of(phy2log, num_experts), logcnt
        ):
            raise DataError("maps-agree: logcnt is not how often phy2log holds each expert")
    if "log2phy" in arrays:
        _check_log2phy(phy2log, _whole(arrays, "log2phy", 3))
    return FoundMap(
        format="deepseek",
        physical_to_logical=phy2log,
        num_devices=_whole(arrays, "num_devices", 0).item() if "num_devices" in arrays else None,
        layer_ids=tuple(_whole(arrays, "layer_ids", 1).tolist()) if "layer_ids" in arrays else None,
        num_experts=num_experts,
    )


def _whole(arrays: dict[str, npt.NDArray[Any]], name: str, ndim: int) -> npt.NDArray[np.int64]:
    array = arrays.get(name)
    if array is None or array.ndim != ndim or array.dtype.kind not in "iu" or not array.size:
        seen = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
        raise DataError(f"{name} must be whole numbers with {ndim} dimensions; it is {seen}")
    return array.astype(np.int64)


def _check_log2phy(phy2log: npt.NDArray[np.int64], log2phy: npt.NDArray[np.int64]) -> None:
    num_layers, num_slots = phy2log.shape
    layer, expert, copy = np.nonzero(log2phy >= 0)
    slot = log2phy[layer, expert, copy]
    right = (
        len(log2phy) == num_layers and len(slot) == phy2log.size and bool((slot < num_slots).all())
    )
    seen = np.zeros(phy2log.shape, dtype=bool)
    if right:
        seen[layer, slot] = phy2log[layer, slot] == expert
    if not (right and seen.all()):
        raise DataError("maps-agree: log2phy does not list the slots of each expert in phy2log")
