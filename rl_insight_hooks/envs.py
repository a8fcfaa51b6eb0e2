# SPDX-License-Identifier: Apache-2.0
"""The only reader of os.environ. Every variable that we look at stands here."""

from __future__ import annotations

import os

SWITCH = "RL_INSIGHT_HOOKS"  # "0" beats every other setting; "1" switches the plugins on
CONFIG = "RL_INSIGHT_HOOKS_CONFIG"  # path of a YAML with our block
PATH = "RL_INSIGHT_HOOKS_PATH"  # where files go, over the YAML's path
RUN_ID = "RL_INSIGHT_HOOKS_RUN_ID"

# The first one that is set wins: launchers before schedulers.
_RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZE_NAMES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RUN_ID_NAMES = (RUN_ID, "VERL_RAY_JOB_ID", "RAY_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")

_ON = frozenset({"1", "true", "on", "yes"})
_OFF = frozenset({"0", "false", "off", "no"})


def switched_off() -> bool:
    """Return True when the environment forbids every hook of ours."""
    return os.environ.get(SWITCH, "").strip().lower() in _OFF


def switched_on() -> bool:
    """Return True when the environment asks the plugins to come up."""
    return os.environ.get(SWITCH, "").strip().lower() in _ON


def config_path() -> str | None:
    """Return the path of the YAML named by the environment, or None."""
    return os.environ.get(CONFIG) or None


def output_path() -> str | None:
    """Return the output folder named by the environment, or None."""
    return os.environ.get(PATH) or None


def run_id() -> str | None:
    """Return the id that the launcher gave to this job, or None."""
    for name in _RUN_ID_NAMES:
        value = os.environ.get(name)
        if value and value != "none":
            return value
    return None


def rank() -> int | None:
    """Return the global rank that the launcher set, or None."""
    return _first_int(_RANK_NAMES)


def world_size() -> int | None:
    """Return the world size that the launcher set, or None."""
    return _first_int(_WORLD_SIZE_NAMES)


def get(name: str) -> str | None:
    """Return one variable for an integration (each names its own), or None when unset or empty."""
    return os.environ.get(name) or None


def _first_int(names: tuple[str, ...]) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None
