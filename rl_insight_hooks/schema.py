# SPDX-License-Identifier: Apache-2.0
"""The structs of our files: one definition is writer, reader and validator.

``group_list.json`` (one per step, role and rank) is a :class:`LoadFile`. Unknown fields are refused, so a
file of a newer schema is named and never misread. ``SCHEMA_VERSION`` grows with every change of meaning;
readers keep every older version readable (see ``docs/files.md``).
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1

LOAD_FILE_NAME = "group_list.json"
COLLECTS_PREFIX = "eplb_token_collects_"
NO_STEP_DIR = "step_none"

# Phases of a call. "forward" is what the headline numbers use; "eval" is a forward pass of a module in eval mode
# in a step and role that also has forward passes in train mode; "compiled" is a call in a compiled graph, where
# forward and backward cannot be told apart.
PHASE_FORWARD = "forward"
PHASE_EVAL = "eval"
PHASE_RECOMPUTE = "recompute"
PHASE_DX = "dx"
PHASE_DW = "dw"
PHASE_COMPILED = "compiled"
PHASES = (PHASE_FORWARD, PHASE_EVAL, PHASE_RECOMPUTE, PHASE_DX, PHASE_DW, PHASE_COMPILED)

# Where a layer number came from.
LAYER_FROM_MODULE = (
    "module"  # watch(model), or the seam's own layer object: the decoder layer's number
)
LAYER_FROM_CALL_ORDER = (
    "call_order"  # order among the MoE layers seen in one forward pass: 0, 1, 2, ...
)
LAYER_UNKNOWN = "unknown"  # layer is -1: calls that could not be given to a layer
LAYER_SOURCES = (LAYER_FROM_MODULE, LAYER_FROM_CALL_ORDER, LAYER_UNKNOWN)

ID_LOGICAL = "logical"
ID_PHYSICAL = "physical"

# Whether the ranks of this file's replica group saw the same tokens.
TOKENS_DISJOINT = "disjoint"  # each rank's counts are its own tokens: sum over ranks
TOKENS_REPLICATED = (
    "replicated"  # ranks with the same parallel.replica_group hold equal counts: take one
)
TOKENS_UNKNOWN = "unknown"


class Producer(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Who wrote the file."""

    name: str
    version: str


class Parallel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Sizes of the parallel groups and this rank's place in them; None where unknown.

    ``ep`` expert, ``etp`` expert tensor, ``tp`` tensor, ``pp`` pipeline, ``dp`` data, ``cp`` context.
    ``replica_group`` names the set of ranks that hold the same counts (see ``tokens_layout``).
    """

    ep_size: int | None = None
    ep_rank: int | None = None
    etp_size: int | None = None
    etp_rank: int | None = None
    tp_size: int | None = None
    tp_rank: int | None = None
    pp_size: int | None = None
    pp_rank: int | None = None
    dp_size: int | None = None
    dp_rank: int | None = None
    cp_size: int | None = None
    cp_rank: int | None = None
    replica_group: str | None = None


class Record(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Load of one (layer, phase) over the regions of one step.

    ``counts[i]`` is the number of token-to-expert assignments of column ``i``: per-expert token counts,
    whatever ``group_list_type`` the call used. Column ``i`` is expert ``first_expert + i`` of the file.
    """

    layer: int
    layer_name: str | None = None
    layer_source: str
    phase: str
    seam: str
    num_calls: int  # calls of the seam, e.g. gate, up and down of one pass are 3
    num_passes: int  # passes through the layer; counts holds each pass once
    num_assignments: int  # sum(counts) = tokens x top-k where nothing is dropped
    num_rows: int | None = (
        None  # rows that the seam was given: assignments + padding, where it knows
    )
    num_tokens: int | None = None  # tokens that entered the layer, where the seam knows it
    counts: list[int]
    id_space: str | None = None  # where it differs from the file's
    draft: bool = False  # a draft / MTP layer
    extra_counts: dict[str, int] | None = (
        None  # e.g. {"shared": n, "zero": n}: ids that are no routed experts
    )


class CallRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One call, with ``detail: calls``."""

    layer: int
    phase: str
    index: int  # order of the call within the region
    counts: list[int]


class LoadFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``group_list.json``: the expert load of one step, role and rank."""

    schema_version: int
    producer: Producer
    run_id: str
    writer: str  # the process: host, pid and start time; tells two processes of one rank apart
    step: int | None
    step_source: str  # "given" or "inferred"
    role: str
    rank: int
    world_size: int
    parallel: Parallel
    num_experts: int | None  # E, logical, over all ranks; None where unknown
    top_k: int | None
    first_expert: int  # global id of column 0
    id_space: str
    tokens_layout: str
    num_regions: int
    started_unix_s: float
    ended_unix_s: float
    records: list[Record]
    calls: list[CallRecord] | None = None
    dropped: dict[str, int] = {}
    masked: dict[str, int] = {}
    failed: dict[str, int] = {}
    stamps: dict[
        str, str
    ] = {}  # what falsifies or qualifies the load, e.g. {"forced_routing": "..."}
    notes: list[str] = []  # self-check: what is odd about this region, in words


def encode_load_file(load_file: LoadFile) -> bytes:
    """Return the JSON bytes of ``load_file``, newline at the end."""
    return msgspec.json.encode(load_file) + b"\n"


_decoder = msgspec.json.Decoder(LoadFile)


def decode_load_file(data: bytes) -> LoadFile:
    """Return the validated :class:`LoadFile` in ``data``.

    Raises:
        msgspec.ValidationError: a field is missing, unknown or of a wrong type; the message has the path.
        msgspec.DecodeError: not JSON, or cut off.
    """
    try:
        return _decoder.decode(data)
    except UnicodeDecodeError as error:  # msgspec before 0.19
        raise msgspec.DecodeError(str(error)) from error
