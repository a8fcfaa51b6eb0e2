# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH118
"""The grouped-matmul calls of one msprobe dump (one step, stage and rank), in the order they were made.

Values come from the ``*.group_list.pt`` files; ``dump.json`` says what they mean
(``group_list_type``, ``group_type``, shapes), ``stack.json`` who called. Either may be missing (a
crash leaves tensors only); what then has to be assumed is said.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rl_insight_hooks import group_list as group_lists
from rl_insight_hooks.group_list import WEIGHT_GROUP_TYPE
from rl_insight_hooks.report.load.context import SEVERITY_WARNING, ReadContext, read_bytes
from rl_insight_hooks.report.load.sniff import DumpDir
from rl_insight_hooks.report.load.torch_zip import TensorReader, TorchFileError
from rl_insight_hooks.schema import PHASE_DW, PHASE_DX, PHASE_FORWARD, PHASE_RECOMPUTE

IntArray = npt.NDArray[np.int64]

API = "npu_grouped_matmul"
_CALL_NAME = re.compile(
    r"^(?:[A-Za-z]+\.)+?(npu_grouped_matmul\w*|npu_gmm\w*)\.(\d{1,15})\.forward"
)
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_USUAL_BYTES = 8192  # a group_list of up to 500 experts or so
_FRAME = re.compile(r"^File (?P<file>.*?), line (?P<line>\d+), in (?P<function>[^,]+)")


@dataclass(slots=True)
class Calls:
    """Calls of one dump in index order (c of them); shape letters: c calls, e experts."""

    index_c: IntArray
    counts_ce: IntArray  # tokens per expert, or the raw values where the type is still unknown
    phase_c: list[str | None]  # None: not known
    stack_c: IntArray  # id of the call stack, -1 unknown
    in_width_c: IntArray  # columns of x, -1 unknown
    out_width_c: IntArray  # columns of the result, -1 unknown
    is_dw_c: npt.NDArray[np.bool_]  # group_type 2
    x_shape_c: list[tuple[int, ...] | None]
    weight_shape_c: list[tuple[int, ...] | None]
    has_dump: bool = False
    has_stack: bool = False

    @property
    def num_calls(self) -> int:
        """Number of calls c."""
        return int(self.index_c.size)


class _Leaf(msgspec.Struct):
    """A tensor or scalar in dump.json; only what is used here."""

    type: str | None = None
    shape: list[int] | None = None
    value: Any = None


class _Api(msgspec.Struct):
    input_args: list[Any] = msgspec.field(default_factory=list)
    input_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class _Dump(msgspec.Struct):
    task: str | None = None
    data: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


_dump_decoder = msgspec.json.Decoder(_Dump)
_api_decoder = msgspec.json.Decoder(_Api)
_stack_decoder = msgspec.json.Decoder(dict[str, tuple[list[str], list[str]]])


@dataclass(slots=True)
class _Info:
    """What dump.json says of one call."""

    group_list_type: int = group_lists.CUMULATIVE  # the operator's default when the key is absent
    group_type: int | None = None
    values: list[int] | None = None  # a Python-list group_list has no .pt file
    x_shape: tuple[int, ...] | None = None
    weight_shape: tuple[int, ...] | None = None
    num_weights: int = 1


@dataclass(slots=True)
class CallReader:
    """Reads dumps; keeps the file templates from one dump to the next, which makes the many files cheap."""

    context: ReadContext
    tensors: TensorReader = field(default_factory=TensorReader)
    _task: str | None = None  # of the dump.json read last

    def read(self, dump: DumpDir) -> Calls | None:
        """Return the calls of ``dump``, or None if there are none; what is wrong is a problem."""
        lost: set[int] = set()
        raw = self._tensors(dump, lost)
        infos = self._dump_json(dump) if dump.has_dump_json else None
        if infos is not None:
            self._add_list_calls(raw, infos, dump, lost)
        if not raw:
            self._say_why_empty(dump, infos)
            return None
        indices = sorted(raw)
        values = [raw[index] for index in indices]
        calls = _make_calls(indices, len(values))
        stacks = self._stack_json(dump) if dump.has_stack_json else None
        if infos is not None:
            calls.has_dump = True
            kept = self._apply_infos(calls, values, infos, dump)
        else:
            kept = self._assume_types(indices, values, dump)
        calls = _keep(calls, [number for number, counts in enumerate(kept) if counts is not None])
        rows = [counts for counts in kept if counts is not None]
        if not rows:
            return None
        calls.counts_ce = _stack_rows(rows)
        if stacks is not None:
            calls.has_stack = True
            _apply_stacks(calls, stacks)
        return calls

    # --- group_list.pt ---

    def _tensors(self, dump: DumpDir, lost: set[int]) -> dict[int, IntArray]:
        """Return the values by call number; numbers of files that cannot be read go into ``lost``."""
        out: dict[int, IntArray] = {}
        others: dict[str, int] = {}
        read = self.tensors.read
        prefix = dump.tensor_dir + os.sep
        for name in dump.tensor_names:
            match = _CALL_NAME.match(name)
            if match is not None and match[1] != API:
                others[match[1]] = others.get(match[1], 0) + 1
                continue
            path = prefix + name
            try:
                values = read(read_bytes(path, _USUAL_BYTES))
                if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] != 2):
                    raise TorchFileError(f"a group_list of shape {values.shape}")
            except OSError as error:
                lost.update([int(match[2])] if match is not None else [])
                self.context.problem("unreadable-file", path, str(error), "Copy the dump again.")
                continue
            except TorchFileError as error:
                lost.update([int(match[2])] if match is not None else [])
                rule = "empty-file" if str(error).startswith("empty") else "bad-tensor-file"
                self.context.problem(
                    rule, path, str(error), "Copy the dump again; this call is missing."
                )
                continue
            index = int(match[2]) if match is not None else _index_in(name, out)
            if index in out:
                self.context.problem(
                    "duplicate-call",
                    path,
                    f"call {index} is there twice",
                    "Keep one dump to a folder.",
                )
                continue
            out[index] = values
        self.context.done(len(dump.tensor_names))
        for api, num in others.items():
            self.context.problem(
                "other-api",
                dump.path,
                f"{num} group_list files of {api}, which this reader does not give to layers, are left out",
                f"Dump {API} to see these layers.",
                SEVERITY_WARNING,
            )
        return out

    # --- dump.json ---

    def _dump_json(self, dump: DumpDir) -> dict[int, _Info] | None:
        path = os.path.join(dump.path, "dump.json")
        try:
            decoded = _dump_decoder.decode(read_bytes(path))
            infos = {}
            for name, raw in decoded.data.items():
                match = _CALL_NAME.match(name)
                if match is not None and match[1] == API and name.endswith(".forward"):
                    infos[int(match[2])] = _info(_api_decoder.decode(raw))
        except (OSError, msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            self.context.problem(
                "torn-dump-json",
                path,
                f"cannot be read ({error}); the tensors are read without it",
                "Let the debugger stop cleanly: the JSON files are complete only after stop().",
                SEVERITY_WARNING,
            )
            return None
        self._task = decoded.task
        return infos

    def _say_why_empty(self, dump: DumpDir, infos: dict[int, _Info] | None) -> None:
        """A dump without any value: say which setting of msprobe would have made them."""
        fix = 'Dump again with "level": "L1", "task": "tensor" and "list": ["npu_grouped_matmul"].'
        if infos and self._task == "statistics":
            what = "task is statistics: it has no group_list values, only their maximum"
            self.context.problem("statistics-dump", dump.path, what, fix)
        elif not dump.tensor_names:
            what = "no call of npu_grouped_matmul was dumped (level L0 dumps modules only)"
            if infos:
                what = f"dump.json lists {len(infos)} calls, but no group_list file is there"
            self.context.problem("no-calls", dump.path, what, fix)

    def _add_list_calls(
        self, raw: dict[int, IntArray], infos: dict[int, _Info], dump: DumpDir, lost: set[int]
    ) -> None:
        """Add calls whose group_list is a list of ints in dump.json (they have no .pt file)."""
        missing = []
        for index, info in infos.items():
            if info.values is not None:
                raw.setdefault(index, np.array(info.values, dtype=np.int64))
            elif index not in raw and index not in lost:
                missing.append(index)
        if missing and dump.tensor_names:
            self.context.problem(
                "missing-tensor-file",
                dump.path,
                f"dump.json lists {len(missing)} calls without a group_list file (first: {min(missing)})",
                "Copy the dump again, with dump_tensor_data.",
            )

    def _apply_infos(
        self, calls: Calls, values: list[IntArray], infos: dict[int, _Info], dump: DumpDir
    ) -> list[IntArray | None]:
        kept: list[IntArray | None] = []
        unlisted = 0
        for number, (index, raw) in enumerate(zip(calls.index_c.tolist(), values, strict=True)):
            info = infos.get(index)
            if info is None:
                unlisted += 1
                info = _Info(group_list_type=_guess_type(raw))
            calls.is_dw_c[number] = info.group_type == WEIGHT_GROUP_TYPE
            calls.x_shape_c[number] = info.x_shape
            calls.weight_shape_c[number] = info.weight_shape
            calls.in_width_c[number], calls.out_width_c[number] = _widths(info)
            try:
                num_experts = info.num_weights if info.num_weights > 1 else None
                kept.append(group_lists.counts_of(raw, info.group_list_type, num_experts))
            except ValueError as error:
                kept.append(None)
                self.context.problem(
                    "bad-counts",
                    os.path.join(dump.path, f"call {index}"),
                    str(error),
                    "The dump contradicts itself; this call is left out.",
                )
        if unlisted:
            self.context.problem(
                "unlisted-call",
                dump.path,
                f"{unlisted} calls have a group_list file but are not in dump.json",
                "Do not mix two dumps in one folder; the type of these lists was guessed from their values.",
                SEVERITY_WARNING,
            )
        return kept

    def _assume_types(
        self, indices: list[int], values: list[IntArray], dump: DumpDir
    ) -> list[IntArray | None]:
        """No dump.json: cumulative only if every list of the dump is non-decreasing, else counts."""
        kept: list[IntArray | None] = []
        flat = [value for value in values if value.ndim == 1]
        table = np.stack(flat) if len({value.size for value in flat}) == 1 else None
        if table is not None:
            cumulative = bool((table[:, 1:] >= table[:, :-1]).all())
        else:
            cumulative = bool(flat) and all(_is_cumulative(value) for value in flat)
        self.context.assume(
            "msprobe dump without dump.json: group_list taken as "
            + (
                "cumulative (every list is non-decreasing)"
                if cumulative
                else "counts (not all lists rise)"
            )
        )
        if table is not None and len(flat) == len(values) and table.min(initial=0) >= 0:
            return list(group_lists.counts_from_cumulative(table) if cumulative else table)
        for index, raw in zip(indices, values, strict=True):
            kind = group_lists.SPARSE_PAIRS if raw.ndim == 2 else int(not cumulative)
            try:
                kept.append(group_lists.counts_of(raw, kind))
            except ValueError as error:
                kept.append(None)
                where = os.path.join(dump.path, f"call {index}")
                self.context.problem("bad-counts", where, str(error), "This call is left out.")
        return kept

    # --- stack.json ---

    def _stack_json(self, dump: DumpDir) -> dict[int, tuple[int, list[str]]] | None:
        path = os.path.join(dump.path, "stack.json")
        try:
            decoded = _stack_decoder.decode(read_bytes(path))
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.context.problem(
                "torn-stack-json",
                path,
                f"cannot be read ({error}); the tensors are read without it",
                "Let the debugger stop cleanly: the JSON files are complete only after stop().",
                SEVERITY_WARNING,
            )
            return None
        out: dict[int, tuple[int, list[str]]] = {}
        for number, (names, frames) in enumerate(decoded.values()):
            for name in names:
                match = _CALL_NAME.match(name)
                if match is not None and match[1] == API:
                    out[int(match[2])] = (number, frames)
        return out


def _make_calls(indices: list[int], num: int) -> Calls:
    unknown = np.full(num, -1, dtype=np.int64)
    return Calls(
        index_c=np.array(indices, dtype=np.int64),
        counts_ce=np.zeros((num, 0), dtype=np.int64),
        phase_c=[None] * num,
        stack_c=unknown.copy(),
        in_width_c=unknown.copy(),
        out_width_c=unknown.copy(),
        is_dw_c=np.zeros(num, dtype=bool),
        x_shape_c=[None] * num,
        weight_shape_c=[None] * num,
    )


def _keep(calls: Calls, numbers: list[int]) -> Calls:
    if len(numbers) == calls.num_calls:
        return calls
    return Calls(
        index_c=calls.index_c[numbers],
        counts_ce=calls.counts_ce[numbers],
        phase_c=[calls.phase_c[number] for number in numbers],
        stack_c=calls.stack_c[numbers],
        in_width_c=calls.in_width_c[numbers],
        out_width_c=calls.out_width_c[numbers],
        is_dw_c=calls.is_dw_c[numbers],
        x_shape_c=[calls.x_shape_c[number] for number in numbers],
        weight_shape_c=[calls.weight_shape_c[number] for number in numbers],
        has_dump=calls.has_dump,
        has_stack=calls.has_stack,
    )


def _stack_rows(rows: list[IntArray]) -> IntArray:
    width = max(row.size for row in rows)
    if all(row.size == width for row in rows):
        return np.stack(rows)
    out = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : row.size] = row
    return out


def _index_in(name: str, taken: dict[int, IntArray]) -> int:
    """Return the call number in a file name of another scheme: its last number, else the next free one."""
    match = _LAST_NUMBER.search(name[: -len("group_list.pt")])
    if match is not None and len(match[1]) < 10 and int(match[1]) not in taken:
        return int(match[1])
    return max(taken, default=-1) + 1


def _is_cumulative(values: IntArray) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _guess_type(values: IntArray) -> int:
    if values.ndim == 2:
        return group_lists.SPARSE_PAIRS
    return group_lists.CUMULATIVE if _is_cumulative(values) else group_lists.COUNTS


def _info(api: _Api) -> _Info:
    kwargs = api.input_kwargs
    args = api.input_args
    x = kwargs.get("x", args[0] if args else None)
    weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
    info = _Info(
        group_type=_value(kwargs.get("group_type")),
        x_shape=_shape(x),
        weight_shape=_shape(weight),
        num_weights=len(weight) if isinstance(weight, list) else 1,
    )
    kind = _value(kwargs.get("group_list_type"))
    if kind is not None:
        info.group_list_type = kind
    group_list = kwargs.get("group_list")
    if isinstance(group_list, list):
        values = [_value(leaf) for leaf in group_list]
        if any(value is None for value in values):
            raise ValueError("a group_list that is no list of ints")
        info.values = [int(value) for value in values if value is not None]
        info.group_list_type = group_lists.CUMULATIVE
    return info


def _value(leaf: Any) -> int | None:
    value = leaf.get("value") if isinstance(leaf, dict) else leaf
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 62:
        return None
    return value


def _shape(tensors: Any) -> tuple[int, ...] | None:
    first = tensors[0] if isinstance(tensors, list) and tensors else tensors
    shape = first.get("shape") if isinstance(first, dict) else None
    if isinstance(shape, list) and all(_value(length) is not None for length in shape):
        return tuple(shape)
    return None


def _widths(info: _Info) -> tuple[int, int]:
    """Return (columns of x, columns of the result); -1 where the shapes do not say."""
    if not info.x_shape or not info.weight_shape or len(info.weight_shape) < 2:
        return -1, -1
    width = info.x_shape[-1]
    rows, columns = info.weight_shape[-2:]
    if width == rows:
        return width, columns
    return (width, rows) if width == columns else (width, -1)


# --- who called ------------------------------------------------------------------------------------


def _apply_stacks(calls: Calls, stacks: dict[int, tuple[int, list[str]]]) -> None:
    phase_of_stack: dict[int, str] = {}
    for number, index in enumerate(calls.index_c.tolist()):
        known = stacks.get(index)
        if known is None:
            continue
        stack, frames = known
        calls.stack_c[number] = stack
        phase = phase_of_stack.get(stack)
        if phase is None:
            phase = phase_of_stack[stack] = phase_of_frames(frames)
        if calls.is_dw_c[number]:
            phase = PHASE_DW  # wherever it is called from: weight gradients may be put off
        calls.phase_c[number] = phase
    if not calls.has_dump:
        _split_dx_dw(calls)


def _split_dx_dw(calls: Calls) -> None:
    """Without group_type: of two stacks inside backward, the one that came first is dX (its usual place)."""
    backward = [number for number, phase in enumerate(calls.phase_c) if phase == PHASE_DX]
    stacks = list(dict.fromkeys(calls.stack_c[backward].tolist()))
    if len(stacks) == 2:
        for number in backward:
            if calls.stack_c[number] == stacks[1]:
                calls.phase_c[number] = PHASE_DW


def phase_of_frames(frames: list[str]) -> str:
    """Return the phase of a call from its frames, innermost first.

    A call whose own frames (up to the first ``backward``) are the backward of an autograd Function is dX or dW.
    One that runs a forward inside a backward (checkpoint) is recompute. Everything else is forward.
    """
    entered_forward = False
    for frame in frames:
        match = _FRAME.match(frame)
        if match is None:
            continue
        function, file = match["function"].strip(), match["file"]
        if function in ("unpack_hook", "recompute_fn", "_run_fn_with_dynamo_disabled"):
            return PHASE_RECOMPUTE
        if function == "backward" and not file.endswith(("_tensor.py", "autograd/__init__.py")):
            is_checkpoint = "checkpoint" in file or file.endswith("random.py")
            return PHASE_RECOMPUTE if entered_forward or is_checkpoint else PHASE_DX
        if function == "_engine_run_backward":
            return PHASE_RECOMPUTE if entered_forward else PHASE_DX
        entered_forward |= function in ("forward", "_call_impl")
    return PHASE_FORWARD
