# SPDX-License-Identifier: Apache-2.0
"""Packed steps: many ``group_list.json`` of one role and rank in one small file, nothing lost.

``<root>/packed/<role>/rank<r>/pack_<first>-<last>.npz`` is a numpy zip of three arrays:

``meta``     uint8: JSON, a list of the step files in order of their steps, every ``counts`` emptied
``lengths``  uint32: length of each ``counts``, in the order in which they stand in ``meta``
``planes``   uint8 [width, sum of lengths]: the counts, byte k of every number in row k (it packs better so)

The file appears whole and is read back before any JSON goes, so a kill at any moment loses nothing.
A step that is both packed and there as JSON counts once, and the JSON wins: it is the same, or a
rerun's. Of two packs that hold a step, the one that ended later wins. Used by the recorder's writer
thread and by ``rl-insight-report pack``: numpy is imported on first use, nothing else beyond what
the writer has.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rl_insight_hooks.atomic import write_atomic
from rl_insight_hooks.errors import DataError
from rl_insight_hooks.paths import load_file_path, role_dir
from rl_insight_hooks.schema import SCHEMA_VERSION, LoadFile, decode_load_file

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_log = logging.getLogger(__name__)

PACK_DIR = "packed"
PACK_NAME = re.compile(r"pack_(\d{1,18})-(\d{1,18})\.npz")

# What a pack may unfold to; a damaged or hostile file is refused before memory is taken.
MAX_UNPACKED_BYTES = 4 << 30
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the same steps make the same bytes

_meta_decoder = msgspec.json.Decoder(list[LoadFile])


def pack_path(root: str | os.PathLike[str], role: str, rank: int, first: int, last: int) -> Path:
    """Return where the steps ``first`` to ``last`` of a role and rank are packed."""
    return Path(root) / PACK_DIR / role_dir(role) / f"rank{rank}" / f"pack_{first}-{last}.npz"


def pack_steps(
    root: str | os.PathLike[str], role: str, rank: int, steps: Iterable[int]
) -> Path | None:
    """Fold the step files of ``steps`` into one pack and remove them; return its path.

    Steps without a file are left out (an earlier call was killed after packing them). A step file
    that cannot be read stays where it is, with a warning. None if there was nothing to pack.

    Raises:
        OSError: the pack could not be written; every step file is still there.
        DataError: what was written does not read back the same; every step file is still there.
    """
    paths: list[Path] = []
    files: dict[int, LoadFile] = {}
    for step in sorted(set(steps)):
        path = load_file_path(os.fspath(root), step, role, rank)
        try:
            data = path.read_bytes()
            files[step] = decode_load_file(data)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s cannot be packed and stays: %s", path, error)
            continue
        paths.append(path)
    if not files:
        return None
    target = pack_path(root, role, rank, min(files), max(files))
    with contextlib.suppress(FileNotFoundError):
        files = {**_by_step(read_pack(target.read_bytes(), target)), **files}
    target.parent.mkdir(parents=True, exist_ok=True)
    ordered = [files[step] for step in sorted(files)]
    write_atomic(target, encode_pack(ordered))
    if read_pack(target.read_bytes(), target) != ordered:
        raise DataError(f"{target}: does not read back as written; the step files stay")
    for path in paths:
        _remove(path, Path(root))
    return target


class Packer:
    """Folds steps while a run goes on: the writer thread tells it of every step file that it wrote.

    A step is finished when a later one of the same role was written; when ``every`` steps are
    finished they become one pack. The newest step always stays JSON, and so do the last ones of the
    run (``rl-insight-report pack`` takes them). With ``every`` 0 nothing is packed.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._loose: dict[tuple[str, str, int], set[int]] = {}

    def wrote(
        self, root: str | os.PathLike[str], role: str, rank: int, step: int | None
    ) -> Path | None:
        """Note a step file that is on disk; return the pack, if one was made now.

        Raises:
            OSError, DataError: see :func:`pack_steps`. The steps stay loose and are tried again
            with the next one.
        """
        if not self._every or step is None:
            return None
        loose = self._loose.setdefault((os.fspath(root), role, rank), set())
        loose.add(step)
        finished = loose - {max(loose)}
        if len(finished) < self._every:
            return None
        packed = pack_steps(root, role, rank, finished)
        loose -= finished
        return packed


def _by_step(files: list[LoadFile]) -> dict[int, LoadFile]:
    return {load_file.step: load_file for load_file in files if load_file.step is not None}


def _remove(path: Path, root: Path) -> None:
    """Remove a packed step file, and the folders that are empty then."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    for folder in path.parents:
        if folder == root:
            return
        try:
            folder.rmdir()
        except OSError:
            return


def encode_pack(files: list[LoadFile]) -> bytes:
    """Return the bytes of a pack of ``files``; equal files give equal bytes."""
    import zipfile

    import numpy as np

    counts = [holder.counts for load_file in files for holder in _holders(load_file)]
    lengths = np.array([len(row) for row in counts], dtype=np.uint32)
    flat = np.array([number for row in counts for number in row], dtype=np.int64)
    bare = [_without_counts(load_file) for load_file in files]
    meta = np.frombuffer(msgspec.json.encode(bare), dtype=np.uint8)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, array in (("meta", meta), ("lengths", lengths), ("planes", _planes(flat))):
            entry = zipfile.ZipInfo(f"{name}.npy", _ZIP_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            archive.writestr(entry, buffer.getvalue())
    return out.getvalue()


class NewerPackError(DataError):
    """A pack has fields of a newer version."""


class _Version(msgspec.Struct):
    schema_version: int = 0


def read_pack(data: bytes, where: str | os.PathLike[str]) -> list[LoadFile]:
    """Return the step files in a pack, counts filled in.

    Raises:
        DataError: the bytes are no pack, are damaged, or are of a newer version; names ``where``.
    """
    files, flat, starts = read_pack_arrays(data, where)
    numbers = flat.tolist()
    at = 0
    for load_file in files:
        for holder in _holders(load_file):
            holder.counts = numbers[starts[at] : starts[at + 1]]
            at += 1
    return files


def read_pack_arrays(
    data: bytes, where: str | os.PathLike[str]
) -> tuple[list[LoadFile], npt.NDArray[np.int64], list[int]]:
    """Return (step files with empty counts, all counts [sum of lengths], where each begins, and the end).

    Raises:
        DataError: see :func:`read_pack`.
    """
    import numpy as np

    arrays = _arrays(data, where)
    try:
        files = _meta_decoder.decode(arrays["meta"].tobytes())
    except msgspec.MsgspecError as error:
        newest = _newest_schema(arrays["meta"].tobytes())
        if newest > SCHEMA_VERSION:
            raise NewerPackError(
                f"{os.fspath(where)}: schema_version {newest}; this version reads 1 to {SCHEMA_VERSION}"
            ) from None
        raise DataError(
            f"{os.fspath(where)}: the pack's meta data cannot be read: {error}"
        ) from None
    lengths, planes = arrays["lengths"], arrays["planes"]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    num_holders = sum(1 for load_file in files for _ in _holders(load_file))
    if lengths.ndim != 1 or planes.ndim != 2 or num_holders != lengths.size:
        raise DataError(
            f"{os.fspath(where)}: the pack has {lengths.size} rows for {num_holders} records"
        )
    if starts[-1] != planes.shape[1] or not 1 <= planes.shape[0] <= 8:
        raise DataError(f"{os.fspath(where)}: the pack has {planes.shape} counts for {starts[-1]}")
    wide = np.zeros((planes.shape[1], 8), dtype=np.uint8)
    wide[:, : planes.shape[0]] = planes.T
    return files, wide.view("<i8").reshape(-1).astype(np.int64, copy=False), starts


def _newest_schema(meta: bytes) -> int:
    """Return the newest schema version in a pack's meta data that cannot be decoded; 0 where none can be told."""
    try:
        versions = msgspec.json.decode(meta, type=list[_Version])
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return max((version.schema_version for version in versions), default=0)


def _arrays(data: bytes, where: str | os.PathLike[str]) -> dict[str, Any]:
    import zipfile

    import numpy as np

    found = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MAX_UNPACKED_BYTES:
                raise DataError(
                    f"{os.fspath(where)}: unfolds to more than {MAX_UNPACKED_BYTES} bytes"
                )
            for name, dtype in (("meta", "u1"), ("lengths", "<u4"), ("planes", "u1")):
                with archive.open(f"{name}.npy") as entry:
                    array = np.lib.format.read_array(entry, allow_pickle=False)
                if array.dtype != np.dtype(dtype):
                    raise DataError(f"{os.fspath(where)}: array {name!r} is of {array.dtype}")
                found[name] = array
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds for damaged bytes
        what = f"{type(error).__name__}: {error}"
        raise DataError(f"{os.fspath(where)}: no pack, or damaged ({what})") from None
    return found


def _planes(flat: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the bytes of ``flat`` [n] as [width, n], with as many rows as the largest number needs."""
    import numpy as np

    if flat.size and int(flat.min()) < 0:
        width = 8
    else:
        width = max(1, (int(flat.max()).bit_length() + 7) // 8) if flat.size else 1
    return np.ascontiguousarray(flat.astype("<i8").view(np.uint8).reshape(-1, 8).T[:width])


def _holders(load_file: LoadFile) -> Iterator[Any]:
    """Yield everything in a step file that has ``counts``, in file order."""
    yield from load_file.records
    yield from load_file.calls or ()


def _without_counts(load_file: LoadFile) -> LoadFile:
    replace = msgspec.structs.replace
    records = [replace(record, counts=[]) for record in load_file.records]
    calls = None
    if load_file.calls is not None:
        calls = [replace(call, counts=[]) for call in load_file.calls]
    return replace(load_file, records=records, calls=calls)
