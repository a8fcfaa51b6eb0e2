# SPDX-License-Identifier: Apache-2.0
"""Read the files of ``torch.save`` without torch and without unpickling.

A ``.pt`` file is a zip of stored (uncompressed) entries: ``<name>/data.pkl`` says what tensors there are,
``<name>/data/<key>`` holds the bytes of each storage. ``data.pkl`` is parsed opcode by opcode; nothing is
imported or called: the few constructors that a tensor needs are known by name, every other name is refused.
"""

from __future__ import annotations

import pickletools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# storage class or dtype -> numpy dtype, little endian; bfloat16 is widened by hand
_DTYPES = {
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bf16",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint8": "<u1",
    "bool": "?",
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "bf16",
}
_UNTYPED = "UntypedStorage"

_END_RECORD = b"PK\x05\x06"
_ENTRY_RECORD = b"PK\x01\x02"
_LOCAL_RECORD = b"PK\x03\x04"
_DESCRIPTOR = b"PK\x07\x08"
_MAX_ENTRIES = 1 << 16
_MAX_OPCODES = 1 << 20
# A tensor may repeat its storage (expand); up to this many elements are made of one.
_MAX_EXPANDED = 1 << 20

# First bytes of the format that torch.save used before 1.6, and of a bare pickle.
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


class TorchFileError(ValueError):
    """The bytes are no file of ``torch.save``, are damaged, or hold what is not allowed; says which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored entry: its bytes are ``data[start:end]``."""

    header: int  # offset of the local header
    start: int
    end: int
    crc: int


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    key: str


def load(data: bytes) -> Any:
    """Return what ``torch.save`` stored: tensors as numpy arrays, in dicts, lists, tuples and scalars.

    Raises:
        TorchFileError: the bytes are damaged, of another format, or name anything but tensors and plain data.
    """
    entries, pickle_entry = _tensor_entries(data)
    for name, entry in entries.items():
        if zlib.crc32(data[entry.start : entry.end]) != entry.crc:
            raise TorchFileError(f"checksum of entry {name!r} is wrong: the file is damaged")
    return _run(data[pickle_entry.start : pickle_entry.end], _StorageReader(data, entries))


def load_int_tensor(data: bytes) -> npt.NDArray[np.int64]:
    """Return the one integer tensor of the file, as int64.

    Raises:
        TorchFileError: see :func:`load`; or the file holds no integer tensor.
    """
    found = load(data)
    if not isinstance(found, np.ndarray):
        raise TorchFileError(f"holds {type(found).__name__}, not one tensor")
    if found.dtype.kind not in "iu":
        raise TorchFileError(f"holds a tensor of {found.dtype}, not of integers")
    return found.astype(np.int64)


# --- zip -------------------------------------------------------------------------------------------


def read_entries(data: bytes) -> dict[str, Entry]:
    """Return the entries of a zip whose entries are all stored.

    Raises:
        TorchFileError: no zip, cut off, damaged or compressed.
    """
    if not data:
        raise TorchFileError("empty file (0 bytes)")
    if data.startswith(_LEGACY_MAGIC):
        raise TorchFileError(
            "written in the old, non-zip format of torch.save, which only unpickling can read"
        )
    if not data.startswith(_LOCAL_RECORD):
        what = (
            "a bare pickle, which is never unpickled"
            if data[:1] == b"\x80"
            else "no file of torch.save"
        )
        raise TorchFileError(what)
    end = data.rfind(_END_RECORD, max(0, len(data) - 65_557))
    if end < 0 or end + 22 > len(data):
        raise TorchFileError("cut off: the zip directory at the end is missing")
    num_entries, _, offset = struct.unpack_from("<HII", data, end + 10)
    if num_entries > _MAX_ENTRIES:
        raise TorchFileError(f"{num_entries} entries are too many")
    entries: dict[str, Entry] = {}
    for _ in range(num_entries):
        if data[offset : offset + 4] != _ENTRY_RECORD or offset + 46 > len(data):
            raise TorchFileError("the zip directory is damaged")
        method, crc, packed, size = struct.unpack_from("<10xH4xIII", data, offset)
        len_name, len_extra, len_comment, header = struct.unpack_from("<HHH8xI", data, offset + 28)
        name = data[offset + 46 : offset + 46 + len_name].decode("utf-8", "replace")
        offset += 46 + len_name + len_extra + len_comment
        if method != 0 or packed != size:
            raise TorchFileError(f"entry {name!r} is compressed; torch.save does not compress")
        if data[header : header + 4] != _LOCAL_RECORD or header + 30 > len(data):
            raise TorchFileError(f"entry {name!r} is damaged")
        start = header + 30 + sum(struct.unpack_from("<HH", data, header + 26))
        if start + size > len(data):
            raise TorchFileError(f"entry {name!r} is cut off")
        entries[name] = Entry(header, start, start + size, crc)
    return entries


def _tensor_entries(data: bytes) -> tuple[dict[str, Entry], Entry]:
    """Return the entries by their name below the archive's own folder, and that of ``data.pkl``."""
    entries = read_entries(data)
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise TorchFileError("a zip without data.pkl: not written by torch.save")
    folder = pickles[0][: -len("data.pkl")]
    inside = {
        name[len(folder) :]: entry for name, entry in entries.items() if name.startswith(folder)
    }
    order = inside.get("byteorder")
    if order is not None and data[order.start : order.end] != b"little":
        raise TorchFileError("written on a big-endian machine")
    return inside, inside["data.pkl"]


class _StorageReader:
    """Makes arrays of storages: the only thing that the pickle machine can ask for."""

    def __init__(self, data: bytes, entries: dict[str, Entry]) -> None:
        self._data = data
        self._entries = entries

    def tensor(self, arguments: tuple[Any, ...], dtype: str | None = None) -> npt.NDArray[Any]:
        """Return the array of ``(storage, offset, size, stride)``."""
        storage, offset, size, stride = arguments
        if not isinstance(storage, _Storage):
            raise TorchFileError("a tensor without a storage")
        kind = dtype if dtype is not None else storage.dtype
        if kind is None:
            raise TorchFileError("a tensor without a dtype")
        numbers = (offset, *size, *stride)
        if any(type(number) is not int or number < 0 for number in numbers) or len(size) != len(
            stride
        ):
            raise TorchFileError(f"a tensor of size {size}, stride {stride}, offset {offset}")
        entry = self._entries.get(f"data/{storage.key}")
        if entry is None:
            raise TorchFileError(f"storage {storage.key!r} is missing")
        return _strided(self._data[entry.start : entry.end], kind, offset, size, stride)


def _strided(raw: bytes, kind: str, offset: int, size: Any, stride: Any) -> npt.NDArray[Any]:
    dtype = np.dtype("<u2") if kind == "bf16" else np.dtype(kind)
    have = len(raw) // dtype.itemsize
    num = 1
    for length in size:
        num *= length
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if num and (last >= have or num > max(have, _MAX_EXPANDED)):
        raise TorchFileError(
            f"a tensor of size {tuple(size)} does not fit its storage of {have} elements"
        )
    if not num:
        return np.zeros(size, dtype=np.float32 if kind == "bf16" else dtype)
    flat = np.frombuffer(raw, dtype=dtype, count=have)
    steps = [step * dtype.itemsize for step in stride]
    array: npt.NDArray[Any] = np.lib.stride_tricks.as_strided(flat[offset:], size, steps).copy()
    if kind == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array


# --- pickle ----------------------------------------------------------------------------------------

_MARK = object()


def _global(name: str) -> Any:
    module, _, attribute = name.partition(" ")
    if module == "torch" and attribute == _UNTYPED:
        return _Global(_UNTYPED)
    if module in ("torch", "torch.storage") and attribute in _DTYPES:
        return _Global(attribute)
    if module == "torch.storage" and attribute == _UNTYPED:
        return _Global(_UNTYPED)
    allowed = (
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch._utils _rebuild_parameter",
        "collections OrderedDict",
        "torch Size",
    )
    if name in allowed:
        return _Global(attribute)
    raise TorchFileError(
        f"names {module}.{attribute}: only tensors and plain data are read, nothing is run"
    )


def _reduce(function: Any, arguments: Any, storages: _StorageReader) -> Any:
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise TorchFileError("calls something that is no tensor constructor")
    if function.name == "OrderedDict":
        return dict(arguments[0]) if arguments else {}
    if function.name == "Size" and len(arguments) == 1:
        return tuple(arguments[0])
    if function.name == "_rebuild_tensor_v2" and len(arguments) >= 4:
        return storages.tensor(arguments[:4])
    if function.name == "_rebuild_tensor_v3" and len(arguments) >= 7:
        kind = arguments[6]
        return storages.tensor(arguments[:4], _DTYPES.get(getattr(kind, "name", "")))
    if function.name == "_rebuild_parameter" and arguments:
        return arguments[0]
    raise TorchFileError(f"{function.name} is called with {len(arguments)} arguments")


def _storage(saved: Any) -> _Storage:
    """Return the storage of a persistent id ``("storage", class, key, location, num_elements)``."""
    if not isinstance(saved, tuple) or len(saved) < 3 or saved[0] != "storage":
        raise TorchFileError("a persistent id that is no storage")
    if not isinstance(saved[1], _Global) or not isinstance(saved[2], str):
        raise TorchFileError("a storage of unknown type")
    return _Storage(_DTYPES.get(saved[1].name), saved[2])


def _run(pickled: bytes, storages: _StorageReader) -> Any:
    """Interpret the opcodes of ``data.pkl``; build only plain Python values and arrays."""
    try:
        return _Machine(storages).run(pickled)
    except TorchFileError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, struct.error, OverflowError) as error:
        raise TorchFileError(f"data.pkl is damaged ({error})") from None


class _Machine:
    """Stack machine for the opcodes that ``torch.save`` of tensors and plain data writes."""

    def __init__(self, storages: _StorageReader) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if number > _MAX_OPCODES:
                raise TorchFileError("data.pkl is too long for tensors and plain data")
            if opcode.name == "STOP":
                return self._stack.pop()
            step = _STEPS.get(opcode.name)
            if step is None:
                raise TorchFileError(
                    f"data.pkl uses opcode {opcode.name}, which tensors do not need"
                )
            step(self, argument)
        raise TorchFileError("data.pkl has no end")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise TorchFileError("data.pkl is damaged (no mark)")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def pop_many(self, num: int) -> tuple[Any, ...]:
        if len(self._stack) < num:
            raise TorchFileError("data.pkl is damaged (stack is empty)")
        items = tuple(self._stack[len(self._stack) - num :])
        del self._stack[len(self._stack) - num :]
        return items

    def memoize(self, key: int | None) -> None:
        self._memo[len(self._memo) if key is None else key] = self._stack[-1]

    def get(self, key: int) -> None:
        self.push(self._memo[key])

    def stack_global(self, _: Any) -> None:
        module, name = self.pop_many(2)
        self.push(_global(f"{module} {name}"))

    def reduce(self, _: Any) -> None:
        function, arguments = self.pop_many(2)
        self.push(_reduce(function, arguments, self._storages))

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TorchFileError("data.pkl is damaged (items of no dict)")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int | tuple):
                raise TorchFileError("a dict key that is no text or number")
            target[key] = value

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TorchFileError("data.pkl is damaged (items of no list)")
        target.extend(items)

    def build(self, _: Any) -> None:
        """State set on an OrderedDict (its attributes): of no use here, dropped."""
        self.pop_many(1)
        if not isinstance(self._stack[-1], dict):
            raise TorchFileError("data.pkl sets the state of something that is no dict")


_Step = Callable[[_Machine, Any], None]
_push_argument: _Step = lambda machine, argument: machine.push(argument)  # noqa: E731
_memoize: _Step = lambda machine, argument: machine.memoize(argument)  # noqa: E731
_get: _Step = lambda machine, argument: machine.get(argument)  # noqa: E731
_STEPS: dict[str, _Step] = {
    "PROTO": lambda machine, argument: None,
    "FRAME": lambda machine, argument: None,
    "GLOBAL": lambda machine, argument: machine.push(_global(argument)),
    "STACK_GLOBAL": _Machine.stack_global,
    "MARK": lambda machine, argument: machine.push(_MARK),
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, argument: machine.push(machine.pop_many(1)),
    "TUPLE2": lambda machine, argument: machine.push(machine.pop_many(2)),
    "TUPLE3": lambda machine, argument: machine.push(machine.pop_many(3)),
    "BINPERSID": lambda machine, argument: machine.push(_storage(machine.pop_many(1)[0])),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "SETITEM": lambda machine, argument: machine.set_items(list(machine.pop_many(2))),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, argument: machine.append(list(machine.pop_many(1))),
    "APPENDS": lambda machine, argument: machine.append(machine.pop_to_mark()),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        _push_argument,
    ),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _get),
}


# --- many small files of one shape -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Template:
    """Where the numbers of a file lie; another file with the same size and the same pickle is alike."""

    pickle_start: int
    pickle: bytes
    header_start: int
    header: bytes
    start: int
    end: int
    crc_at: int
    shape: tuple[int, ...]
    kind: str


class TensorReader:
    """Reads many small integer tensors: the first of a kind in full, those that equal it by fixed offsets.

    The short way still compares the whole pickle, the storage's header and its checksum, so it accepts only
    what the full parse would.
    """

    def __init__(self) -> None:
        self._templates: dict[int, list[_Template]] = {}

    def read(self, data: bytes) -> npt.NDArray[np.int64]:
        """Return the integer tensor of one file.

        Raises:
            TorchFileError: see :func:`load_int_tensor`.
        """
        for known in self._templates.get(len(data), ()):
            raw = data[known.start : known.end]
            if (
                data.startswith(known.pickle, known.pickle_start)
                and data.startswith(known.header, known.header_start)
                and int.from_bytes(data[known.crc_at : known.crc_at + 4], "little")
                == zlib.crc32(raw)
            ):
                return np.frombuffer(raw, known.kind).reshape(known.shape)
        tensor = load_int_tensor(data)
        self._learn(data, tensor)
        return tensor

    def _learn(self, data: bytes, tensor: npt.NDArray[np.int64]) -> None:
        entries, pickle_entry = _tensor_entries(data)
        storage = entries.get("data/0")
        if storage is None or storage.end - storage.start != 8 * tensor.size or not tensor.size:
            return
        raw = data[storage.start : storage.end]
        if raw != tensor.astype("<i8").tobytes():
            return  # strided, or of another dtype: not worth a short way
        if data[storage.end : storage.end + 4] == _DESCRIPTOR:
            crc_at = storage.end + 4
            header = data[storage.header : storage.header + 30]
        else:
            crc_at = storage.header + 14
            header = data[storage.header : storage.header + 14]
        self._templates.setdefault(len(data), []).append(
            _Template(
                pickle_start=pickle_entry.start,
                pickle=data[pickle_entry.start : pickle_entry.end],
                header_start=storage.header,
                header=header,
                start=storage.start,
                end=storage.end,
                crc_at=crc_at,
                shape=tensor.shape,
                kind="<i8",
            )
        )
