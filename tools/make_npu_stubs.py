#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make stand-ins of the driver libraries that torch_npu links to, so that it imports without a device.

    python tools/make_npu_stubs.py OUT_DIR
    LD_LIBRARY_PATH=OUT_DIR TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c "import torch_npu"

Run it with the Python of the environment that holds torch and torch_npu; it needs gcc and nm. Every function
that torch_npu asks the driver for and nobody defines becomes one that returns 0. Nothing that touches a device
works; the real operators, their schemas, the dispatcher and autograd do. Made files are not to be committed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

# The libraries by which torch_npu finds the driver; the functions may all live in the first.
_LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")

# Functions whose answer is looked at on import: a chip name, no devices, "no context yet".
_BODIES = {
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B1"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no driver"; }',
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 107002; }",
}

_SYSTEM = ("libc.so.6", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")


def symbols(library: Path, *, defined: bool) -> set[str]:
    """Return the names that ``library`` defines, or strongly needs."""
    flag = "--defined-only" if defined else "--undefined-only"
    listed = subprocess.run(
        ["nm", "-D", flag, str(library)], capture_output=True, text=True, check=False
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {row[-1].split("@")[0] for row in rows if row and (defined or row[0] == "U")}


def system_library(name: str) -> Path:
    """Return where the compiler finds a library of the system."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())


def missing_symbols() -> list[str]:
    """Return what torch_npu needs and neither it, torch, Python nor the system defines."""
    site = Path(sysconfig.get_paths()["purelib"])
    own = [*(site / "torch_npu/lib").glob("*.so"), *(site / "torch_npu").glob("_C*.so")]
    if not own:
        raise SystemExit(f"no torch_npu below {site}: run this with the Python that has it")
    providers = [
        *own,
        *(site / "torch/lib").glob("*.so*"),
        *(site / "torch_npu.libs").glob("*.so*"),
    ]
    providers += [system_library(name) for name in _SYSTEM] + [Path(sys.executable).resolve()]
    needed = set().union(*(symbols(library, defined=False) for library in own))
    there = set().union(*(symbols(library, defined=True) for library in providers))
    return sorted(name for name in needed - there if not name.startswith(("Py", "_Py")))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: make_npu_stubs.py OUT_DIR")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    names = missing_symbols()
    source = out / "driver.c"
    source.write_text("\n".join(_BODIES.get(n, f"int {n}() {{ return 0; }}") for n in names) + "\n")
    (out / "empty.c").write_text("")
    for library in _LIBRARIES:
        body = source if library == _LIBRARIES[0] else out / "empty.c"
        target = out / f"lib{library}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(target), str(body)], check=True)
    print(f"{len(names)} functions stubbed in {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
