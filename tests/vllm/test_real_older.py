# SPDX-License-Identifier: Apache-2.0
"""The real vllm-ascend 0.11.0 and 0.13.0, each over its own real vllm, in a process of its own (older_main.py).

Each vllm wheel is 430 MB, so these run only where the environment variable RLIH_VLLM_ERAS names a folder with
the wheels unpacked, made with the Python of the vllm environment::

    pip install --no-deps --target ERAS/0.13.0 -r tests/vllm/requirements-0.13.0.txt
    pip install --no-deps --target ERAS/0.11.0 -r tests/vllm/requirements-0.11.0.txt

Everything else comes from the environment of 0.18 (tests/vllm_worker/requirements.txt).
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

ERAS = os.environ.get("RLIH_VLLM_ERAS", "")
BOTH = "vllm-ascend 0.11.0 and 0.13.0 (RLIH_VLLM_ERAS)"
NEWER = "vllm-ascend 0.13.0 (RLIH_VLLM_ERAS)"
SEAM = "AscendUnquantizedFusedMoEMethod.apply"
ADAPTER = "AscendFusedMoEMethod.apply"


@functools.cache
def ran(version, out):
    env = dict(os.environ)
    path = [str(pathlib.Path(ERAS, version)), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    script = pathlib.Path(__file__).with_name("older_main.py")
    done = subprocess.run(
        [sys.executable, str(script), out, version],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith('{"results"'))
    found = json.loads(line)
    assert found["dist"] == [f"vllm_ascend-{version}.dist-info"]  # not the environment's 0.18
    return found


@pytest.fixture(scope="module")
def results(ascend, tmp_path_factory):
    """results(version) -> the answer of the version's process."""
    outs = {v: str(tmp_path_factory.mktemp(v)) for v in ("0.11.0", "0.13.0")}

    def get(version):
        if not ERAS or not pathlib.Path(ERAS, version, "vllm_ascend").is_dir():
            pytest.skip(f"RLIH_VLLM_ERAS names no folder with {version}: see this module's head")
        return ran(version, outs[version])

    return get


def truth(scenario, verdict="exact", seam=SEAM, version=BOTH):
    return pytest.mark.truth(scenario=scenario, seam=seam, version=version, verdict=verdict)


def counted(results, version, name):
    """The scenario ``name`` of the version's process, after its counts were compared."""
    found = results(version)["results"][name]
    assert found["counted"] == found["expected"]
    assert sum(map(sum, found["expected"].values())) > 0
    assert found["failed"] == {}
    assert found["dropped"] == {}
    return found


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: two layers, several calls")
def test_two_layers(results, version):
    found = counted(results, version, "two_layers")
    assert len(found["counted"]) == 2
    assert found["seams"] == ["vllm_ascend.AscendUnquantizedFusedMoEMethod.apply (selector)"]


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: profile run with forced random routing")
def test_profile_run(results, version):
    found = counted(results, version, "profile_run")
    assert found["masked"] == {"profile_run_calls": 2}
    assert [len(ids) for ids in found["handed"]] == [4, 64, 64]  # the engine did run them


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: rows masked by mc2_mask")
def test_mc2_mask(results, version):
    assert counted(results, version, "mc2_mask")["masked"] == {"masked_ids": 2 * 3}


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: quantised adapter and its scheme", seam=ADAPTER)
def test_the_adapter_counts_once(results, version):
    found = counted(results, version, "adapter_and_scheme")
    assert found["seams"] == ["vllm_ascend.AscendFusedMoEMethod.apply (selector)"]


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: profile run of a quantised method", seam=ADAPTER)
def test_profile_run_of_the_adapter(results, version):
    assert counted(results, version, "adapter_profile_run")["masked"] == {"profile_run_calls": 1}


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
@truth("rollout: EPLB with redundant experts (log2phy)", seam=ADAPTER)
def test_eplb(results, version):
    found = counted(results, version, "eplb")
    assert [len(counts) for counts in found["counted"].values()] == [8]  # logical, not 12


@truth("rollout: experts selected ahead of apply (fc3)", seam=ADAPTER, version=NEWER)
def test_selected_ahead(results):
    counted(results, "0.13.0", "selected_ahead")


@truth("rollout: shared experts placed with the routed", seam=ADAPTER, version=NEWER)
def test_shared_experts_stay_apart(results):
    found = counted(results, "0.13.0", "shared_experts_placed_with_the_routed")
    assert found["extra"] == [{"other_ids": 7}]  # one a token


@pytest.mark.parametrize("version", ["0.11.0", "0.13.0"])
def test_uninstall_restores(results, version):
    assert results(version)["restored"] == [True, True]
