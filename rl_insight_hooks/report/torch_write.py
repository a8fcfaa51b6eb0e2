# SPDX-License-Identifier: Apache-2.0
"""Write an integer tensor as ``torch.save`` does, without torch; ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import numpy.typing as npt

_DATE = (1980, 1, 1, 0, 0, 0)

# The pickle that torch.save writes for a contiguous int64 tensor of one dimension on the CPU; what differs
# from tensor to tensor is the length (twice).
_HEAD = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\nLongStorage\n"
    b"q\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
)
_MIDDLE = b"tq\x05QK\x00"
_TAIL = b"\x85q\x06K\x01\x85q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."


def int_tensor_file(values: npt.ArrayLike) -> bytes:
    """Return the bytes of a ``.pt`` file that holds ``values`` [n] as an int64 tensor."""
    array = np.ascontiguousarray(values, dtype="<i8").reshape(-1)
    length = _int_opcode(array.size)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (
            ("data.pkl", _HEAD + length + _MIDDLE + length + _TAIL),
            ("byteorder", b"little"),
            ("data/0", array.tobytes()),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}", _DATE), data)
    return out.getvalue()


def _int_opcode(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + number.to_bytes(1, "little")
    if number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    return b"J" + number.to_bytes(4, "little")
