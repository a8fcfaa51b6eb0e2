# SPDX-License-Identifier: Apache-2.0
"""Dotted keys and flags in one grammar: ``key=value`` words become the flags of the command.

Understood, in any order and beside flags:

* rl-insight's keys: ``input.path``, ``input.rank_list``, ``output.path``, ``heatmap.parser.{type,step,role}``,
  ``heatmap.visualizer.{type,dpi,cmap,gmm_per_layer}``, ``pipeline.type``, ``preset``, ``config_path``;
* ``<command>.<option>=value`` for every option of every command.

A line of keys alone, without a command, is rl-insight's heatmap. A flag is sugar for one key: both with
different values are an error.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_insight_hooks.errors import UsageError

_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+|preset|config_path)=(.*)", re.DOTALL)

DATA = "DATA"  # stands for the positional argument

# rl-insight's key -> flag of ours
_LEGACY_FLAGS = {
    "input.path": DATA,
    "input.rank_list": "--rank",
    "output.path": "--output",
    "heatmap.parser.step": "--step",
    "heatmap.parser.role": "--role",
    "heatmap.visualizer.dpi": "--dpi",
    "heatmap.visualizer.cmap": "--cmap",
    "heatmap.visualizer.gmm_per_layer": "--gmm-per-layer",
}
# rl-insight's key -> the values that mean what we do
_LEGACY_FIXED = {
    "pipeline.type": ("heatmap", "gmm_heatmap", "gmm"),
    "heatmap.parser.type": ("gmm",),
    "heatmap.visualizer.type": ("gmm_heatmap",),
    "preset": ("heatmap", "gmm", "gmm_heatmap"),
}
_CONFIG_PATH = "config_path"

GetCommand = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Setting:
    key: str
    flag: str
    value: str


def translate(argv: list[str], commands: Iterable[str], get_command: GetCommand) -> list[str]:
    """Return ``argv`` with its ``key=value`` words turned into flags, the command first.

    Raises:
        UsageError: an unknown key, a value that means something else than we do, a key and a flag that
            contradict each other, or a ``config_path`` that cannot be read.
    """
    names = tuple(commands)
    pairs: list[tuple[str, str]] = []
    rest: list[str] = []
    for arg in argv:
        match = _KEY.fullmatch(arg)
        if match is None or Path(arg).exists():
            rest.append(arg)
        else:
            pairs.append((match.group(1), match.group(2)))
    if not pairs:
        return rest
    at = next((i for i, arg in enumerate(rest) if not arg.startswith("-")), None)
    if at is not None and rest[at] in names:
        name = rest.pop(at)
    else:
        name = "heatmap"
    pairs = _with_config_file(pairs)
    flags = flags_of(get_command(name))
    settings = [s for key, value in pairs for s in _setting(name, key, value, flags, names)]
    return [name, *rest, *_as_flags(settings, rest, flags)]


def flags_of(function: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command by the name of its parameter; a bool parameter's flags take no value."""
    flags: dict[str, tuple[str, ...]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        for note in getattr(parameter.annotation, "__metadata__", ()):
            # inside Annotated typer takes the first name of an option for its default
            named = (getattr(note, "default", None), *(getattr(note, "param_decls", None) or ()))
            declared = tuple(d for d in named if isinstance(d, str) and d.startswith("-"))
            if declared:
                flags[name] = declared
    return flags


def _setting(
    command: str,
    key: str,
    value: str,
    flags: Mapping[str, tuple[str, ...]],
    commands: tuple[str, ...],
) -> list[_Setting]:
    if value in ("null", "None", ""):
        return []
    if key in _LEGACY_FIXED:
        if value not in _LEGACY_FIXED[key]:
            known = " or ".join(_LEGACY_FIXED[key])
            raise UsageError(f"{key}={value} is not supported; {key} can be {known}")
        return []
    if key in _LEGACY_FLAGS:
        flag = _LEGACY_FLAGS[key]
        every = {f for group in flags.values() for f in group}
        if flag == DATA or flag in every:
            return [
                _Setting(key, flag, value.strip("[]") if flag in ("--step", "--rank") else value)
            ]
        raise UsageError(f"{key} means nothing to the command {command}")
    head, _, option = key.partition(".")
    if head == command and option in flags:
        return [_Setting(key, flags[option][0], value)]
    raise UsageError(_unknown(command, key, flags, commands))


def _unknown(
    command: str, key: str, flags: Mapping[str, tuple[str, ...]], commands: tuple[str, ...]
) -> str:
    known = [*_LEGACY_FLAGS, *_LEGACY_FIXED, _CONFIG_PATH, *(f"{command}.{name}" for name in flags)]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        return f"unknown key {key}; did you mean {near[0]}?"
    head = key.partition(".")[0]
    if head in commands and head != command:
        return f"unknown key {key}: it is of the command {head}, but {command} runs"
    return f"unknown key {key}; known are {', '.join(known)}"


def _as_flags(
    settings: list[_Setting], rest: list[str], flags: Mapping[str, tuple[str, ...]]
) -> list[str]:
    out: list[str] = []
    given: dict[str, _Setting] = {}
    for setting in settings:
        group = next((g for g in flags.values() if setting.flag in g), (setting.flag,))
        for flag, value in _given_flags(rest, group):
            if value != setting.value:
                raise UsageError(
                    f"{setting.key}={setting.value} and {flag} {value} contradict each other; give one"
                )
        before = given.get(group[0])
        if before is not None and before.value != setting.value:
            raise UsageError(
                f"{before.key}={before.value} and {setting.key}={setting.value} contradict each other"
            )
        if before is not None or any(True for _ in _given_flags(rest, group)):
            continue
        given[group[0]] = setting
        if setting.flag == DATA:
            out.append(setting.value)
        elif setting.value.lower() in ("true", "false") and setting.flag in _switches(flags):
            out += [setting.flag] if setting.value.lower() == "true" else []
        else:
            out += [setting.flag, setting.value]
    return out


def _switches(flags: Mapping[str, tuple[str, ...]]) -> set[str]:
    names = {"json", "force", "strict", "merge", "log", "quiet", "numbers", "rules", "holdout"}
    return {flag for name, group in flags.items() if name in names for flag in group}


def _given_flags(rest: list[str], group: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Yield (flag, value) of the flags of ``group`` that stand on the command line."""
    for i, arg in enumerate(rest):
        flag, equals, value = arg.partition("=")
        if flag in group:
            yield flag, value if equals else (rest[i + 1] if i + 1 < len(rest) else "")


def _with_config_file(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Put the keys of ``config_path=FILE`` in; keys on the command line win over them."""
    files = [value for key, value in pairs if key == _CONFIG_PATH]
    own = [(key, value) for key, value in pairs if key != _CONFIG_PATH]
    named = {key for key, _ in own}
    for file in files:
        own += [(key, value) for key, value in _flat_yaml(file) if key not in named]
    return own


def _flat_yaml(path: str) -> list[tuple[str, str]]:
    from omegaconf import OmegaConf

    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise UsageError(f"config_path={path}: {error.strerror or error}") from error
    except Exception as error:
        raise UsageError(f"config_path={path} is no YAML of keys: {error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"config_path={path} is no YAML of keys")
    flat: list[tuple[str, str]] = []

    def walk(prefix: str, node: dict[Any, Any]) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                walk(f"{name}.", value)
            elif isinstance(value, list):
                flat.append((name, ",".join(map(str, value))))
            elif value is not None:
                flat.append((name, str(value)))

    walk("", loaded)
    return flat
