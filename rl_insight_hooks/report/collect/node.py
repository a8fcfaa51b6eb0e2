# SPDX-License-Identifier: Apache-2.0
"""What runs on a node: list, hash, check and read load files. Standard library only.

Ray ships this module by value, so nothing of ours need be installed on the nodes. At home the same checks are
run on what came by ssh.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Names of files that hold loads, of every format that the reports read.
INCLUDE = (
    "group_list*.json",
    "pack_*.npz",
    "eplb_token_collects_*.json",
    "token_collects_all.json",
    "*group_list.pt",
    "dump.json",
    "stack.json",
    "construct.json",
    "rank*.jsonl",
    "expert_distribution_recorder_*.pt",
    "rank*.safetensors",
    "meta_info.json",
)

Stat = tuple[str, int, int, int]  # path below the root, inode, size in bytes, mtime in ns
Sent = tuple[str, int, str, "str | None", bytes]  # path, mtime in ns, sha256, what is broken, data


def list_files(root: str, include: Sequence[str]) -> tuple[str, list[Stat]]:
    """Return the folder that ``root`` names here (``~`` and variables filled in) and its load files, sorted.

    Links are not followed; names that start with a dot are left out (a writer's unfinished files).

    Raises:
        OSError: the folder is not there or cannot be read.
    """
    folder = Path(os.path.expandvars(root)).expanduser()
    next(
        folder.iterdir(), None
    )  # a missing root is an error; a folder that goes while we walk is not
    found: list[Stat] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith(".") or not any(fnmatch.fnmatchcase(name, p) for p in include):
                continue
            path = Path(parent, name)
            try:
                info = path.lstat()
            except OSError:
                continue  # packed or replaced meanwhile
            if stat.S_ISREG(info.st_mode):
                relative = path.relative_to(folder).as_posix()
                found.append((relative, info.st_ino, info.st_size, info.st_mtime_ns))
    return str(folder), sorted(found)


def hash_files(folder: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each of ``paths`` below ``folder``; those that cannot be read are left out."""
    digests = {}
    for path in paths:
        digest = hashlib.sha256()
        try:
            with Path(folder, path).open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except OSError:
            continue
        digests[path] = digest.hexdigest()
    return digests


def send_files(folder: str, paths: Iterable[str], batch_bytes: int) -> Iterator[list[Sent]]:
    """Yield the files in batches of about ``batch_bytes``; a broken one is named and its data stays here."""
    batch: list[Sent] = []
    num_bytes = 0
    for path in paths:
        try:
            with Path(folder, path).open("rb") as file:
                mtime_ns = os.fstat(file.fileno()).st_mtime_ns
                data = file.read()
        except OSError as error:
            batch.append((path, 0, "", f"cannot be read ({error.strerror or error})", b""))
            continue
        broken = what_is_broken(path, data)
        digest = hashlib.sha256(data).hexdigest()
        batch.append((path, mtime_ns, digest, broken, b"" if broken else data))
        num_bytes += len(data)
        if num_bytes >= batch_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def what_is_broken(path: str, data: bytes) -> str | None:
    """Return what shows that a file was cut off, in words; None if it is whole."""
    if not data:
        return "0 bytes"
    try:
        if path.endswith(".json"):
            json.loads(data)
        elif path.endswith(".jsonl"):
            for line in data.splitlines():
                if line.strip():
                    json.loads(line)
        elif path.endswith(".npz") or (path.endswith(".pt") and data[:2] == b"PK"):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                bad = archive.testzip()
            if bad is not None:
                return f"damaged: {bad} has a wrong checksum"
        elif path.endswith(".safetensors"):
            return _broken_safetensors(data)
    except (
        ValueError,
        RecursionError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
    ) as error:
        return f"cut off or damaged ({error})"
    return None


def _broken_safetensors(data: bytes) -> str | None:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    offsets = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max(offsets, default=0)
    return None if len(data) == expected else f"cut off: {len(data)} of {expected} bytes"
