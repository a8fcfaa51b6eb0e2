# SPDX-License-Identifier: Apache-2.0
"""Reader of our own ``group_list.json``, every schema version, fast.

The structs are those of :mod:`rl_insight_hooks.schema`, with one change: ``counts`` stays raw bytes
and is turned into an array without making a Python object per number. What the fast way does not
take for plain digits goes through the schema's own decoder, which names what is wrong.
"""

from __future__ import annotations

import contextlib
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
_COMMA = ord(",")
_MAX_DIGITS = 18  # of an int64


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
    layer_n = np.array([record.layer for record in records], dtype=np.int64)
    layer_n += _layers_of_earlier_stages(load_file, context)
    phases = tuple([record.phase for record in records])
    passes_n = np.array([record.num_passes for record in records], dtype=np.int64)
    tokens_n = np.array(
        [-1 if record.num_tokens is None else record.num_tokens for record in records],
        dtype=np.int64,
    )
    _check(load_file, counts_ne)
    names = {
        layer: record.layer_name
        for layer, record in zip(layer_n.tolist(), records, strict=True)
        if record.layer_name is not None
    }
    id_spaces = {record.id_space or load_file.id_space for record in records}
    role = load_file.role
    if len(set(zip(layer_n.tolist(), phases, strict=True))) < len(records):
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
        id_space=id_spaces.pop() if len(id_spaces) == 1 else load_file.id_space,
        top_k=load_file.top_k,
        world_size=load_file.world_size,
        layer_names=names,
        layer_sources=frozenset(record.layer_source for record in records),
    )


def _layers_of_earlier_stages(load_file: Any, context: ReadContext) -> int:
    """Return what to add to layer numbers that count from 0 on every pipeline stage."""
    stage, num_stages = load_file.parallel.pp_rank, load_file.parallel.pp_size
    layers: set[int] = {
        r.layer for r in load_file.records if r.layer_source == schema.LAYER_FROM_CALL_ORDER
    }
    if not stage or not num_stages or not layers or not 0 < stage < num_stages <= MAX_RANKS:
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
    sums = counts_ne.sum(axis=1)
    claimed = np.array([record.num_assignments for record in records], dtype=np.int64)
    if (sums != claimed).any():
        at = int((sums != claimed).argmax())
        raise ValueError(
            f"layer {records[at].layer}, {records[at].phase}: the counts add up to {int(sums[at])}, "
            f"not to num_assignments {int(claimed[at])}"
        )
    seen: set[tuple[int, str, str]] = set()
    for record in records:
        if record.phase not in schema.PHASES or not UNKNOWN_LAYER <= record.layer < MAX_LAYERS:
            raise ValueError(
                f"layer {record.layer}, phase {record.phase!r}: there is no such thing"
            )
        seen.add((record.layer, record.phase, record.seam))
    if len(seen) < len(records):
        raise ValueError("one seam recorded a layer and phase twice")


def _counts(records: list[Any]) -> npt.NDArray[np.int64]:
    """Return counts [n, e] of the records, zero-padded on the right where one is shorter."""
    if not records:
        return np.zeros((0, 0), dtype=np.int64)
    raws = [bytes(record.counts) for record in records]
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


def _parse_digits(raws: list[bytes]) -> npt.NDArray[np.int64] | None:
    """Return the numbers in ``[1,2,3]`` texts of equal length as [texts, numbers].

    A vectorised decimal parser: one pass per digit position instead of one object per number. None if something
    is no plain digit, or the texts differ in length: the slow way reads that, or names it.
    """
    text = b",".join([raw[1:-1] for raw in raws])
    chars = np.frombuffer(text, dtype=np.uint8)
    digits: npt.NDArray[np.uint8] = chars - np.uint8(_DIGIT_0)  # wraps: below "0" becomes large
    commas = np.flatnonzero(digits > 9)
    if not (chars[commas] == _COMMA).all():
        return None
    num = commas.size + 1
    ends = np.empty(num, dtype=np.int64)
    ends[:-1] = commas
    ends[-1] = chars.size
    lengths = ends.copy()
    lengths[1:] -= commas + 1
    width, rest = divmod(num, len(raws))
    text_ends = np.cumsum([len(raw) - 1 for raw in raws]) - 1
    longest = int(lengths.max())
    if rest or int(lengths.min()) < 1 or longest > _MAX_DIGITS:
        return None
    if (ends[width - 1 :: width] != text_ends).any():
        return None
    # Two digits fit into a byte: half of the work is done on bytes.
    short = np.minimum(lengths, _MAX_DIGITS + 1).astype(np.uint8)
    at = ends - 1
    values: npt.NDArray[Any] = np.zeros(num, dtype=np.int32 if longest <= 9 else np.int64)
    for place in range(0, longest, 2):
        pair = _digit_at(digits, at, short, place)
        if place + 1 < longest:
            tens = _digit_at(digits, at, short, place + 1)
            tens *= np.uint8(10)
            pair += tens
        values += pair * values.dtype.type(10**place) if place else pair
    return values.astype(np.int64).reshape(len(raws), width)


def _digit_at(
    digits: npt.NDArray[np.uint8],
    last: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.uint8],
    place: int,
) -> npt.NDArray[np.uint8]:
    """Return the digit of weight 10**place of each number, 0 where the number is shorter."""
    digit: npt.NDArray[np.uint8] = digits.take(last - place if place else last, mode="clip")
    if place:
        digit *= lengths > place
    return digit


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
