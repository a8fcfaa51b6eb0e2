# SPDX-License-Identifier: Apache-2.0
"""Settings: one dataclass is the source for YAML keys, keyword arguments and the docs.

A YAML may carry our own block and MindSpeed-RL's own keys::

    rl_insight_hooks: {enable: true, path: expert_load}
    generate_config: {eplb_token_collects: true, eplb_token_save_path: json_file}
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_insight_hooks import envs
from rl_insight_hooks.errors import ConfigError
from rl_insight_hooks.schema import PHASES
from rl_insight_hooks.steps import parse_steps

BLOCK = "rl_insight_hooks"
DEFAULT_PATH = "expert_load"
_MINDSPEED_RL_BLOCKS = ("generate", "generate_config")
_MINDSPEED_RL_DEFAULT_PATH = "json_file"


@dataclass(kw_only=True, slots=True)
class Config:
    """All settings. Every field is a key of the YAML block ``rl_insight_hooks``."""

    enable: bool = field(default=False, metadata={"doc": "switch recording on"})
    path: str = field(default=DEFAULT_PATH, metadata={"doc": "folder for the files"})
    role: str = field(default="default", metadata={"doc": "role of calls outside every region"})
    steps: str | None = field(default=None, metadata={"doc": 'steps to record: "1,3-7"; null: all'})
    every: int = field(
        default=1, metadata={"doc": "record every n-th step only (step % every == 0)"}
    )
    roles: list[str] | None = field(default=None, metadata={"doc": "roles to record; null: all"})
    ranks: str | None = field(
        default=None, metadata={"doc": 'ranks that record: "0,8-15"; null: all'}
    )
    phases: list[str] | None = field(
        default=None, metadata={"doc": f"phases to write, of {', '.join(PHASES)}; null: all"}
    )
    flush_interval: float = field(
        default=60.0, metadata={"doc": "seconds between writes of a role without steps"}
    )
    detail: str = field(
        default="layer", metadata={"doc": '"layer", or "calls": one record per call too'}
    )
    gmm_per_layer: int = field(
        default=0,
        metadata={"doc": "grouped matmuls of one layer pass; 0: told from shapes and objects"},
    )
    resume: bool = field(default=False, metadata={"doc": "go on with the collects found in path"})
    collects: bool = field(default=True, metadata={"doc": "write eplb_token_collects_<rank>.json"})
    collects_roles: list[str] | None = field(
        default=None, metadata={"doc": "roles that the collects file adds up; null: all"}
    )
    replicas: str = field(
        default="one",
        metadata={"doc": '"one" of the ranks that hold the same counts writes, or "all" do'},
    )
    pack_every: int = field(
        default=0,
        metadata={"doc": "fold finished steps into one packed file every n steps; 0: never"},
    )
    run_id: str | None = field(
        default=None, metadata={"doc": "name of the run; null: of the launcher, or made"}
    )
    num_experts: int | None = field(
        default=None, metadata={"doc": "logical experts E, where no module tells"}
    )
    top_k: int | None = field(
        default=None, metadata={"doc": "experts per token, where no module tells"}
    )
    first_expert: int | None = field(
        default=None, metadata={"doc": "global id of this rank's first expert, where nobody tells"}
    )
    ep_size: int | None = field(
        default=None, metadata={"doc": "expert parallel size, where nobody tells"}
    )
    ep_rank: int | None = field(
        default=None, metadata={"doc": "expert parallel rank, where nobody tells"}
    )
    integrations: list[str] | None = field(
        default=None, metadata={"doc": "integrations to install, by name; null: all that are found"}
    )

    def __post_init__(self) -> None:
        for name in ("every",):
            _check_int(name, getattr(self, name), minimum=1)
        for name in ("gmm_per_layer", "pack_every"):
            _check_int(name, getattr(self, name), minimum=0)
        for name in ("num_experts", "top_k", "ep_size"):
            _check_int(name, getattr(self, name), minimum=1, optional=True)
        for name in ("first_expert", "ep_rank"):
            _check_int(name, getattr(self, name), minimum=0, optional=True)
        for name in ("enable", "resume", "collects"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{BLOCK}.{name} is {getattr(self, name)!r}; give true or false")
        if isinstance(self.flush_interval, bool) or not isinstance(
            self.flush_interval, (int, float)
        ):
            raise ConfigError(
                f"{BLOCK}.flush_interval is {self.flush_interval!r}; give seconds, e.g. 60"
            )
        if not self.flush_interval > 0:
            raise ConfigError(
                f"{BLOCK}.flush_interval is {self.flush_interval!r}; give more than 0 seconds"
            )
        if self.detail not in ("layer", "calls"):
            raise ConfigError(f'{BLOCK}.detail is {self.detail!r}; give "layer" or "calls"')
        if self.replicas not in ("one", "all"):
            raise ConfigError(f'{BLOCK}.replicas is {self.replicas!r}; give "one" or "all"')
        for name in ("path", "role"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(
                    f"{BLOCK}.{name} is {getattr(self, name)!r}; give a non-empty text"
                )
        for name in ("roles", "phases", "collects_roles", "integrations"):
            setattr(self, name, _names(name, getattr(self, name)))
        for phase in self.phases or ():
            if phase not in PHASES:
                raise ConfigError(f"{BLOCK}.phases has {phase!r}; known are {', '.join(PHASES)}")
        for name in ("steps", "ranks"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, _steps_text(value))
                parse_steps(getattr(self, name), what=f"{BLOCK}.{name}")

    def wants_step(self, step: int | None) -> bool:
        """Return True when ``step`` passes the filters ``steps`` and ``every``; a role without steps does."""
        if step is None:
            return True
        if step % self.every:
            return False
        return self.steps is None or step in parse_steps(self.steps, what=f"{BLOCK}.steps")

    def wants_role(self, role: str) -> bool:
        """Return True when ``role`` passes the filter ``roles``."""
        return self.roles is None or role in self.roles

    def wants_rank(self, rank: int) -> bool:
        """Return True when ``rank`` passes the filter ``ranks``."""
        return self.ranks is None or rank in parse_steps(self.ranks, what=f"{BLOCK}.ranks")


FIELD_NAMES = tuple(f.name for f in dataclasses.fields(Config))


def load_config(cfg: Any = None) -> Config:
    """Return the :class:`Config` in ``cfg``.

    Args:
        cfg: path of a YAML, a mapping, an OmegaConf DictConfig, a Config, or None for the file that
            ``RL_INSIGHT_HOOKS_CONFIG`` names. Without our block and without MindSpeed-RL's keys the result
            is off. ``RL_INSIGHT_HOOKS=1`` switches on, ``0`` off, over everything.

    Raises:
        ConfigError: the file cannot be read, a key of our block is unknown, or a value is bad.
    """
    if isinstance(cfg, Config):
        config = dataclasses.replace(cfg)
    else:
        config = _from_mapping(_as_mapping(cfg if cfg is not None else envs.config_path()))
    if envs.output_path():
        config.path = str(envs.output_path())
    if envs.switched_on():
        config.enable = True
    if envs.switched_off():
        config.enable = False
    return config


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return ``config`` with ``settings`` changed.

    Raises:
        ConfigError: an unknown setting, or a bad value.
    """
    for key in settings:
        if key not in FIELD_NAMES:
            raise ConfigError(f"{BLOCK}.{key} is no setting of ours{_nearest(key)}")
    return dataclasses.replace(config, **settings)


def _as_mapping(cfg: Any) -> Mapping[str, Any]:
    if cfg is None:
        return {}
    if isinstance(cfg, (str, os.PathLike)):
        return _read_yaml(Path(cfg))
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(cfg):
        cfg = _only_our_keys(cfg)
        cfg = omegaconf.OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(cfg, Mapping):
        raise ConfigError(
            f"enable() takes a YAML path, a mapping or a DictConfig, not {type(cfg).__name__}"
        )
    return cfg


def _only_our_keys(cfg: Any) -> Any:
    """Leave the host's interpolations alone: some resolve only inside the host."""
    from omegaconf import OmegaConf

    wanted = (BLOCK, *_MINDSPEED_RL_BLOCKS)
    return OmegaConf.create(
        {k: OmegaConf.select(cfg, k) for k in wanted if OmegaConf.select(cfg, k) is not None}
    )


def _read_yaml(path: Path) -> Mapping[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
        container = OmegaConf.to_container(_only_our_keys(loaded), resolve=True)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror or error}"
        ) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the configuration {path} is no valid YAML mapping: {error}") from error
    except Exception as error:  # yaml's own errors, without importing yaml
        raise ConfigError(f"the configuration {path} is no valid YAML: {error}") from error
    if not isinstance(container, Mapping):
        raise ConfigError(f"the configuration {path} holds no mapping")
    return {str(key): value for key, value in container.items()}


def _from_mapping(mapping: Mapping[str, Any]) -> Config:
    values = _mindspeed_rl_values(mapping)
    block = mapping.get(BLOCK)
    if block is not None:
        if not isinstance(block, Mapping):
            raise ConfigError(
                f"{BLOCK} is {block!r}; it must be a mapping such as {{enable: true}}"
            )
        for key in block:
            if key not in FIELD_NAMES:
                raise ConfigError(f"{BLOCK}.{key} is no setting of ours{_nearest(str(key))}")
        values.update(block)
    return Config(**values)


def _mindspeed_rl_values(mapping: Mapping[str, Any]) -> dict[str, Any]:
    for name in _MINDSPEED_RL_BLOCKS:
        block = mapping.get(name)
        if not isinstance(block, Mapping):
            continue
        for prefix in ("eplb_", ""):
            switch = block.get(f"{prefix}token_collects")
            if switch is None:
                continue
            if not isinstance(switch, bool):
                raise ConfigError(
                    f"{name}.{prefix}token_collects is {switch!r}; give true or false"
                )
            path = block.get(f"{prefix}token_save_path", block.get("token_save_path"))
            return {"enable": switch, "path": str(path) if path else _MINDSPEED_RL_DEFAULT_PATH}
    return {}


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, FIELD_NAMES, n=1, cutoff=0.5)
    return f"; did you mean {BLOCK}.{near[0]}?" if near else f"; known are {', '.join(FIELD_NAMES)}"


def _check_int(name: str, value: Any, *, minimum: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{BLOCK}.{name} is {value!r}; give a whole number of at least {minimum}")


def _names(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{BLOCK}.{name} is {value!r}; give a list of names")
    return [n.strip() for n in names]


def _steps_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(str(v) for v in value)
    return str(value)
