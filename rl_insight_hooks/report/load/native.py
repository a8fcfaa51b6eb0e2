# SPDX-License-Identifier: Apache-2.0
"""Reader of our own ``group_list.json``, every schema version, fast.

The structs are those of :mod:`rl_insight_hooks.schema`, with one change: ``counts`` stays raw bytes
and is turned into an array without making a Python object per number. What the fast way does not
take for plain digits goes through the schema's own decoder, which names what is wrong.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rl_insight_hooks import schema
from rl_insight_hooks.report.load.context import ReadContext, read_bytes
from rl_insight_hooks.report.load.sink import MAX_LAYERS, MAX_RANKS, Block, Sink
from rl_insight_hooks.report.table import NO_STEP, UNKNOWN_LAYER

FORMAT = "rl-insight-hooks"

_DIGIT_0 = ord("0")
_MAX_DIGITS = 8  # of a number that the fast parser reads


def _fields_of(struct: type[msgspec.Struct], **replaced: Any) -> list[Any]:
    """Return ``defstruct`` fields of ``struct``, some types replaced: the lean twin cannot drift."""
    out: list[Any] = []
    for info in msgspec.structs.fields(struct):
        kind = replaced.get(info.name, info.type)
        if info.default is not msgspec.NODEFAULT:
            out.append((info.name, kind, info.default))
        elif info.default_factory is not msgspec.NODEFAULT:
            out.append((info.name, kind, msgspec.field(default_factory=info.default_factory)))
        else:
            out.append((info.name, kind))
    return out


_LeanRecord: Any = msgspec.defstruct(
    "Record",
    _fields_of(schema.Record, counts=msgspec.Raw),
    forbid_unknown_fields=True,
    kw_only=True,
    gc=False,
)
_LeanFile: Any = msgspec.defstruct(
    "LoadFile",
    _fields_of(schema.LoadFile, records=list[_LeanRecord], calls=msgspec.Raw),
    forbid_unknown_fields=True,
    kw_only=True,
    gc=False,
)
_lean_decoder = msgspec.json.Decoder(_LeanFile)


class _Version(msgspec.Struct):
    schema_version: int | None = None


def read_native(paths: list[str], sink: Sink, context: ReadContext) -> None:
    """Put every file of ``paths`` into ``sink``; what cannot be read is a problem of ``context``."""
    for path in paths:
        data = b""
        try:
            data = read_bytes(path)
            block = read_block(data, path, context)
        except OSError as error:
            context.problem(
                "unreadable-file", path, str(error), "Give read permission, or copy it again."
            )
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            _name_problem(path, data, error, context)
        else:
            if block is not None:
                sink.add(block)
        context.done()


def read_block(data: bytes, path: str, context: ReadContext) -> Block | None:
    """Return the block of one ``group_list.json``, or None if the selection leaves it out.

    Raises:
        msgspec.MsgspecError: not JSON, cut off, or not the schema.
        ValueError: right by the schema, but wrong in itself; the message says what.
    """
    load_file = _lean_decoder.decode(data)
    if not 1 <= load_file.schema_version <= schema.SCHEMA_VERSION:
        raise ValueError(version_text(load_file.schema_version))
    context.roles_seen.add(load_file.role)
    if not context.selection.wants(load_file.step, load_file.role, load_file.rank):
        return None
    return block_of(load_file, path, _counts(load_file.records), context)


def block_of(
    load_file: Any, path: str, counts_ne: npt.NDArray[np.int64], context: ReadContext
) -> Block:
    """Return the block of a decoded file (a :class:`schema.LoadFile` or its lean twin) and its counts [n, e].

    Raises:
        ValueError: the records contradict each other; the message says how.
    """
    records = load_file.records
    shape = _shape_of(records)
    layer_n, names = shape.layer_n, shape.names
    phases = shape.phases
    offset = _layers_of_earlier_stages(load_file, context)
    if offset:
        layer_n = layer_n + offset
        names = {layer + offset: name for layer, name in names.items()}
    passes_n = np.array([record.num_passes for record in records], dtype=np.int64)
    tokens_n = np.array(
        [-1 if record.num_tokens is None else record.num_tokens for record in records],
        dtype=np.int64,
    )
    _check(load_file, counts_ne)
    id_spaces = shape.id_spaces | ({load_file.id_space} if shape.has_default_space else set())
    role = load_file.role
    if shape.has_twins:
        layer_n, phases, counts_ne, passes_n, tokens_n = _join_seams(
            layer_n, phases, counts_ne, passes_n, tokens_n
        )
    replicated = load_file.tokens_layout == schema.TOKENS_REPLICATED
    replica = load_file.parallel.replica_group if replicated else None
    return Block(
        source=path,
        format=FORMAT,
        step=NO_STEP if load_file.step is None else load_file.step,
        role=role,
        rank=load_file.rank,
        layer_n=layer_n,
        phases=phases,
        counts_ne=counts_ne,
        first=load_file.first_expert,
        num_passes_n=passes_n,
        num_tokens_n=tokens_n,
        num_experts=load_file.num_experts,
        replica=f"{replica}/{load_file.first_expert}" if replica is not None else None,
        is_picked="ranks" in load_file.stamps,
        id_space=next(iter(id_spaces)) if len(id_spaces) == 1 else load_file.id_space,
        top_k=load_file.top_k,
        world_size=load_file.world_size,
        layer_names=names,
        layer_sources=shape.layer_sources,
    )


def _layers_of_earlier_stages(load_file: Any, context: ReadContext) -> int:
    """Return what to add to layer numbers that count from 0 on every pipeline stage."""
    stage, num_stages = load_file.parallel.pp_rank, load_file.parallel.pp_size
    if not stage or not num_stages or not 0 < stage < num_stages <= MAX_RANKS:
        return 0
    layers: set[int] = {
        r.layer for r in load_file.records if r.layer_source == schema.LAYER_FROM_CALL_ORDER
    }
    if not layers:
        return 0
    context.assume(
        "layers are numbered by call order on each pipeline stage: the stages before are taken to have as many "
        "MoE layers (watch(model) gives the true numbers)"
    )
    return int(stage) * (max(layers) + 1)


def _check(load_file: Any, counts_ne: npt.NDArray[np.int64]) -> None:
    """Raise ValueError if the file contradicts itself."""
    step = load_file.step if load_file.step is not None else 0
    if min(step, load_file.rank, load_file.world_size) < 0 or load_file.world_size > MAX_RANKS:
        raise ValueError(
            f"step {load_file.step}, rank {load_file.rank} of a world of {load_file.world_size}"
        )
    records = load_file.records
    sums = counts_ne.sum(axis=1).tolist()
    claimed = [record.num_assignments for record in records]
    if sums != claimed:
        at = next(n for n, record in enumerate(records) if sums[n] != record.num_assignments)
        raise ValueError(
            f"layer {records[at].layer}, {records[at].phase}: the counts add up to {sums[at]}, "
            f"not to num_assignments {claimed[at]}"
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the records of a file are about, apart from their numbers: equal for most files of a run."""

    layer_n: npt.NDArray[np.int64]
    phases: tuple[str, ...]
    names: dict[int, str]
    layer_sources: frozenset[str]
    id_spaces: frozenset[str]  # those that records name themselves
    has_default_space: bool  # some record has the file's
    has_twins: bool  # two seams recorded one layer and phase


_shape_key = operator.attrgetter("layer", "phase", "seam", "layer_source", "id_space", "layer_name")
_shapes: dict[tuple[Any, ...], _Shape] = {}
_MAX_SHAPES = 256


def _shape_of(records: list[Any]) -> _Shape:
    """Return the shape of ``records``, remembered from the files before.

    Raises:
        ValueError: a layer or phase does not exist, or one seam recorded a layer and phase twice.
    """
    key = tuple(map(_shape_key, records))
    known = _shapes.get(key)
    if known is not None:
        return known
    for layer, phase, *_ in key:
        if phase not in schema.PHASES or not UNKNOWN_LAYER <= layer < MAX_LAYERS:
            raise ValueError(f"layer {layer}, phase {phase!r}: there is no such thing")
    if len({part[:3] for part in key}) < len(key):
        raise ValueError("one seam recorded a layer and phase twice")
    if len(_shapes) >= _MAX_SHAPES:
        _shapes.clear()
    shape = _shapes[key] = _Shape(
        layer_n=np.array([part[0] for part in key], dtype=np.int64),
        phases=tuple(part[1] for part in key),
        names={part[0]: part[5] for part in key if part[5] is not None},
        layer_sources=frozenset(part[3] for part in key),
        id_spaces=frozenset(part[4] for part in key if part[4] is not None),
        has_default_space=any(part[4] is None for part in key),
        has_twins=len({part[:2] for part in key}) < len(key),
    )
    return shape


def _counts(records: list[Any]) -> npt.NDArray[np.int64]:
    """Return counts [n, e] of the records, zero-padded on the right where one is shorter."""
    if not records:
        return np.zeros((0, 0), dtype=np.int64)
    raws = [record.counts for record in records]
    table = _parse_digits(raws)
    if table is not None:
        return table
    rows = [np.array(_counts_decoder.decode(raw), dtype=np.int64) for raw in raws]
    width = max(row.size for row in rows)
    out = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        if row.size and row.min() < 0:
            raise ValueError(
                f"layer {records[number].layer}, {records[number].phase}: negative count {int(row.min())}"
            )
        out[number, : row.size] = row
    return out


_counts_decoder = msgspec.json.Decoder(list[int])


def _parse_digits(raws: list[Any]) -> npt.NDArray[np.int64] | None:
    """Return the numbers in JSON texts ``[1,2,3]`` of as many numbers each, as [texts, numbers].

    A vectorised decimal parser, without an object per number. None if something is no plain digit, a
    number has more than 8 digits, or a text has more numbers than another: the slow way reads that, or
    names it.
    """
    text = b",".join([*raws, b""])
    chars = np.frombuffer(text, dtype=np.uint8)
    digits: npt.NDArray[np.uint8] = chars - np.uint8(_DIGIT_0)  # wraps: below "0" becomes large
    is_digit = digits < 10
    marks = np.flatnonzero(~is_digit)
    marks_per_text, rest = divmod(marks.size, len(raws))
    width = marks_per_text - 2  # of brackets and commas, one of each more than of numbers
    if rest or width < 1 or (width == 1 and b"[]" in text):
        return None
    if chars.take(marks).tobytes() != (b"[" + b"," * (width - 1) + b"],") * len(raws):
        return None
    longest = int((marks[1:] - marks[:-1]).max()) - 1
    if longest > _MAX_DIGITS:
        return None
    ends = marks.reshape(len(raws), marks_per_text)[:, 1:-1] - 1
    number_n = _number_ending_at(digits, is_digit.view(np.uint8), longest)
    table: npt.NDArray[np.int64] = number_n.take(ends).astype(np.int64)
    return table


def _number_ending_at(
    digits: npt.NDArray[np.uint8], is_digit: npt.NDArray[np.uint8], longest: int
) -> npt.NDArray[Any]:
    """Return, for each character [n], the number of up to 8 digits that ends there; ``is_digit`` is 0 or 1.

    Doubling: from digits to pairs, fours and eights, each from the one before it and its neighbour to the
    left, where all characters between are digits. Operations on neighbouring bytes are far cheaper than
    gathers, and those on bytes than those that mix bytes with bools.
    """
    ones = digits * is_digit
    twos: npt.NDArray[np.uint8] = ones.copy()
    twos[1:] += ones[:-1] * np.uint8(10)
    twos *= is_digit
    if longest <= 2:
        return twos
    fours: npt.NDArray[np.uint16] = twos.astype(np.uint16)
    fours[2:] += (twos[:-2] * is_digit[1:-1]).astype(np.uint16) * np.uint16(100)
    if longest <= 4:
        return fours
    fours *= is_digit
    eights: npt.NDArray[np.uint32] = fours.astype(np.uint32)
    between = is_digit[1:-3] * is_digit[2:-2] * is_digit[3:-1]
    eights[4:] += (fours[:-4] * between).astype(np.uint32) * np.uint32(10_000)
    return eights


def _join_seams(
    layer_n: npt.NDArray[np.int64],
    phases: tuple[str, ...],
    counts_ne: npt.NDArray[np.int64],
    passes_n: npt.NDArray[np.int64],
    tokens_n: npt.NDArray[np.int64],
) -> tuple[
    npt.NDArray[np.int64],
    tuple[str, ...],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
]:
    """Add up records of one (layer, phase): two seams saw different calls of it."""
    row_of: dict[tuple[int, str], int] = {}
    target_n = np.array(
        [row_of.setdefault(key, len(row_of)) for key in zip(layer_n.tolist(), phases, strict=True)]
    )
    counts = np.zeros((len(row_of), counts_ne.shape[1]), dtype=np.int64)
    np.add.at(counts, target_n, counts_ne)
    passes = np.zeros(len(row_of), dtype=np.int64)
    np.add.at(passes, target_n, passes_n)
    tokens = np.zeros(len(row_of), dtype=np.int64)
    np.add.at(tokens, target_n, np.maximum(tokens_n, 0))
    tokens[np.unique(target_n[tokens_n < 0])] = -1
    layers = np.array([layer for layer, _ in row_of], dtype=np.int64)
    return layers, tuple(phase for _, phase in row_of), counts, passes, tokens


def _name_problem(path: str, data: bytes, error: Exception, context: ReadContext) -> None:
    """Say what is wrong with a file that could not be decoded, and how to mend it."""
    version = None
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        version = msgspec.json.decode(data, type=_Version).schema_version
    if not data:
        context.problem(
            "empty-file", path, "0 bytes", "The writer was cut off; record the step again."
        )
    elif version is not None and not 1 <= version <= schema.SCHEMA_VERSION:
        context.problem(
            "newer-schema",
            path,
            version_text(version),
            "Upgrade: pip install -U rl-insight-hooks.",
        )
    elif isinstance(error, msgspec.ValidationError):
        context.problem("bad-schema", path, str(error), "Was it edited by hand? See docs/files.md.")
    elif isinstance(error, msgspec.DecodeError | RecursionError):
        context.problem(
            "torn-file", path, str(error), "The file is cut off or is no JSON; copy it again."
        )
    else:
        context.problem(
            "bad-counts", path, str(error), "The file contradicts itself; record the step again."
        )


def version_text(version: int) -> str:
    """Say which schema version a file has and which ones are read."""
    return f"schema_version {version}; this version reads 1 to {schema.SCHEMA_VERSION}"
