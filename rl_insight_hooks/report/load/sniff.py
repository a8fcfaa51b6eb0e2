# SPDX-License-Identifier: Apache-2.0
# Paths are plain text here: Path objects cost a third more over 100,000 files.
# ruff: noqa: PTH113, PTH116, PTH118, PTH119, PTH120, PTH202, PTH112, PTH208
"""Find what can be read below a path, and tell the formats apart by name and content, never by folder name.

A folder may mix formats; each file goes to the reader of its own. What is no load file is counted
in a note, and what should be one but cannot be (empty, a broken link) is a problem.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field

from rl_insight_hooks.errors import DataError
from rl_insight_hooks.packfile import PACK_NAME
from rl_insight_hooks.report.load.context import SEVERITY_NOTE, ReadContext
from rl_insight_hooks.schema import COLLECTS_PREFIX, LOAD_FILE_NAME

EXPECTED = (
    "group_list.json or pack_*.npz (rl-insight-hooks), eplb_token_collects_*.json or token_collects_all.json "
    "(MindSpeed-RL), *.group_list.pt or dump.json (msprobe), tokens_per_expert/rank*.jsonl (Megatron-Core), "
    "expert_distribution_recorder_*.pt (SGLang), rank*.safetensors with meta_info.json (TensorRT-LLM)"
)

_COLLECTS_NAME = re.compile(re.escape(COLLECTS_PREFIX) + r"(\d+)\.json")
_MEGATRON_NAME = re.compile(r"rank_?(\d+)\.jsonl")
_SAFETENSORS_NAME = re.compile(r"rank_?(\d+)\.safetensors")
_SGLANG_PREFIX = "expert_distribution_recorder_"
_GROUP_LIST_SUFFIX = "group_list.pt"
_MSPROBE_JSONS = ("dump.json", "stack.json", "construct.json")
_COLLECTS_ALL = "token_collects_all.json"
_TENSOR_DIR = "dump_tensor_data"

# A JSON of an unknown name is looked into up to this size.
_MAX_PEEK_BYTES = 64 << 20


@dataclass(slots=True)
class DumpDir:
    """One msprobe dump: the folder of its JSON files, and the tensors' folder with the names in it."""

    path: str
    tensor_dir: str
    tensor_names: list[str] = field(default_factory=list)
    has_dump_json: bool = False
    has_stack_json: bool = False


@dataclass(slots=True)
class Found:
    """What there is to read, by format; paths sorted."""

    roots: list[str] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    packs: list[str] = field(default_factory=list)
    collects: list[str] = field(default_factory=list)
    dumps: dict[str, DumpDir] = field(default_factory=dict)
    megatron: list[str] = field(default_factory=list)
    sglang: list[str] = field(default_factory=list)
    safetensors: list[str] = field(default_factory=list)
    explicit: set[str] = field(default_factory=set)  # files that the user named one by one
    ignored: list[str] = field(default_factory=list)

    @property
    def num_files(self) -> int:
        """Number of files that a reader will open."""
        num_tensors = sum(len(dump.tensor_names) for dump in self.dumps.values())
        lists = (
            self.native,
            self.packs,
            self.collects,
            self.megatron,
            self.sglang,
            self.safetensors,
        )
        return num_tensors + sum(map(len, lists))

    @property
    def is_empty(self) -> bool:
        """True if no reader has anything to open."""
        return self.num_files == 0 and not self.dumps


def find(paths: list[str], context: ReadContext) -> Found:
    """Return what there is to read at ``paths`` (files or folders).

    Raises:
        DataError: a path does not exist or cannot be opened, or there is nothing to read at any.
    """
    found = Found()
    visited: set[str] = set()
    for path in paths:
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be opened ({_reason(error)}). Expected: {EXPECTED}"
            ) from None
        found.roots.append(path)
        if stat.S_ISDIR(mode):
            _walk(path, found, visited, context)
        else:
            found.explicit.add(path)
            _classify(path, os.path.basename(path), found, context)
            _add_neighbours(path, found)
    if found.is_empty and not any(problem.severity == "error" for problem in context.problems):
        others = f" {len(found.ignored)} other files are there." if found.ignored else ""
        raise DataError(f"{', '.join(paths)}: nothing to read.{others} Expected: {EXPECTED}")
    _note_ignored(found, context)
    for paths_of_format in (found.collects, found.megatron, found.sglang, found.safetensors):
        paths_of_format.sort(key=natural_key)  # here the order of names says something
    return found


def natural_key(path: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which rank2 comes before rank10."""
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part)
        for part in re.split(r"(\d+)", path)
    ]


def _walk(root: str, found: Found, visited: set[str], context: ReadContext) -> None:
    # A folder is known by its path without links, so that a link that leads back ends there.
    waiting = [(root, os.path.realpath(root))]
    while waiting:
        folder, real = waiting.pop()
        if real in visited:
            continue
        visited.add(real)
        try:
            entries = _sorted_entries(folder)
        except OSError as error:
            context.problem(
                "unreadable-folder",
                folder,
                _reason(error),
                "Give read permission, or leave the folder out.",
            )
            continue
        folders: list[tuple[str, str]] = []
        links: list[tuple[str, str]] = []
        tensor_names: list[str] = []
        for entry in entries:
            name = entry.name
            if name.endswith(_GROUP_LIST_SUFFIX):
                tensor_names.append(name)
                continue
            try:
                is_dir = entry.is_dir()
            except OSError:
                is_dir = False
            if not is_dir:
                _classify(entry.path, name, found, context)
            elif entry.is_symlink():
                links.append((entry.path, os.path.realpath(entry.path)))
            else:
                folders.append((entry.path, os.path.join(real, name)))
        if tensor_names:
            _dump_of(folder, found).tensor_names += tensor_names
        # Real folders come first, so that a link beside the folder that it leads to changes nothing.
        waiting = links[::-1] + waiting if links else waiting
        waiting.extend(reversed(folders))


def _sorted_entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _dump_of(tensor_dir: str, found: Found) -> DumpDir:
    parent = (
        os.path.dirname(tensor_dir) if os.path.basename(tensor_dir) == _TENSOR_DIR else tensor_dir
    )
    dump = found.dumps.get(parent)
    if dump is None:
        dump = found.dumps[parent] = DumpDir(path=parent, tensor_dir=tensor_dir)
    elif not dump.tensor_names:
        dump.tensor_dir = tensor_dir
    return dump


def _add_neighbours(path: str, found: Found) -> None:
    """One file of a dump was named: the others still say what it means."""
    for dump in found.dumps.values():
        dump.has_dump_json |= os.path.isfile(os.path.join(dump.path, "dump.json"))
        dump.has_stack_json |= os.path.isfile(os.path.join(dump.path, "stack.json"))
        if not dump.tensor_names and os.path.isdir(dump.tensor_dir):
            names = sorted(os.listdir(dump.tensor_dir))
            dump.tensor_names = [name for name in names if name.endswith(_GROUP_LIST_SUFFIX)]


def _classify(path: str, name: str, found: Found, context: ReadContext) -> None:
    if name.endswith(".tmp") and name.startswith("."):
        context.problem(
            "temp-file",
            path,
            "a file that was being written, or that a killed process left",
            "Ignored; remove it when no process writes here any more.",
            SEVERITY_NOTE,
        )
    elif name == LOAD_FILE_NAME:
        found.native.append(path)
    elif PACK_NAME.fullmatch(name):
        found.packs.append(path)
    elif name in _MSPROBE_JSONS:
        _classify_msprobe_json(path, name, found)
    elif _COLLECTS_NAME.fullmatch(name) or name == _COLLECTS_ALL:
        found.collects.append(path)
    elif name.endswith(_GROUP_LIST_SUFFIX):
        _dump_of(os.path.dirname(path), found).tensor_names.append(name)
    elif name.startswith(_SGLANG_PREFIX) and name.endswith(".pt"):
        found.sglang.append(path)
    elif _SAFETENSORS_NAME.fullmatch(name):
        found.safetensors.append(path)
    elif name.endswith(".jsonl") and _is_megatron(path, name):
        found.megatron.append(path)
    elif name.endswith(".json") and name != "meta_info.json":
        _classify_json(path, found)
    elif path in found.explicit and name.endswith((".pt", ".pth")):
        found.sglang.append(path)
    elif path in found.explicit and name.endswith(".safetensors"):
        found.safetensors.append(path)
    elif name != "meta_info.json":
        found.ignored.append(path)


def _classify_msprobe_json(path: str, name: str, found: Found) -> None:
    folder = os.path.dirname(path)
    dump = found.dumps.get(folder)
    if dump is None:
        dump = found.dumps[folder] = DumpDir(
            path=folder, tensor_dir=os.path.join(folder, _TENSOR_DIR)
        )
    dump.has_dump_json |= name == "dump.json"
    dump.has_stack_json |= name == "stack.json"


def _is_megatron(path: str, name: str) -> bool:
    if (
        _MEGATRON_NAME.fullmatch(name)
        and os.path.basename(os.path.dirname(path)) == "tokens_per_expert"
    ):
        return True
    return b'"tpe"' in _head(path)


def _classify_json(path: str, found: Found) -> None:
    """Tell a renamed load file from everything else that ends in .json."""
    head = _head(path)
    if b'"schema_version"' in head and b'"producer"' in head:
        found.native.append(path)
    elif re.match(rb'\s*\{\s*"\d+"\s*:\s*\{\s*("\d+"\s*:|\})', head):
        found.collects.append(path)
    elif path in found.explicit and b'"npu_grouped_matmul' in head:
        _classify_msprobe_json(path, "dump.json", found)
    else:
        found.ignored.append(path)


def _head(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return b""
    try:
        return os.read(fd, 4096) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(fd)


def _note_ignored(found: Found, context: ReadContext) -> None:
    for path in found.ignored:
        if path in found.explicit:
            context.problem(
                "unknown-format",
                path,
                "no known load format" if os.path.getsize(path) else "empty file",
                f"Expected: {EXPECTED}",
            )
    rest = [path for path in found.ignored if path not in found.explicit]
    if rest:
        examples = ", ".join(os.path.basename(path) for path in rest[:3])
        context.problem(
            "ignored-file",
            os.path.commonpath(rest) if len(rest) > 1 else rest[0],
            f"{len(rest)} files are no load files ({examples}{', ...' if len(rest) > 3 else ''})",
            "Nothing to do if that is so.",
            SEVERITY_NOTE,
        )


def _reason(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
