# SPDX-License-Identifier: Apache-2.0
"""What is here and what would be hooked: for ``rl-insight-report doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import dataclass, field

from rl_insight_hooks import envs
from rl_insight_hooks._version import __version__
from rl_insight_hooks.installer import INTEGRATIONS, TARGETS
from rl_insight_hooks.patching import chain_of

# Distributions whose version matters, by the name on the package index.
_DISTRIBUTIONS = (
    "torch",
    "torch-npu",
    "mindstudio-probe",
    "verl",
    "vllm",
    "vllm-ascend",
    "megatron-core",
    "transformers",
    "ray",
    "numpy",
    "matplotlib",
    "msgspec",
    "omegaconf",
    "typer",
    "wrapt",
)


@dataclass(slots=True)
class Hook:
    """One hooked attribute and who stands on it, outermost first."""

    where: str
    chain: list[str]


@dataclass(slots=True)
class Integration:
    """One integration."""

    name: str
    supported: str
    state: str  # "hooked", "ready" or "absent"
    reason: str
    hooks: list[Hook] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Diagnosis:
    """What ``doctor --json`` prints."""

    version: str
    python: str
    machine: str
    switched: str  # "on", "off", or "by code" when the environment says nothing
    config_path: str | None
    versions: dict[str, str]
    integrations: list[Integration]
    tools_on_attributes: list[str]


def diagnose(*, import_targets: bool = True) -> Diagnosis:
    """Return what would be hooked in this environment; hooks are taken out again.

    Args:
        import_targets: import the top-level packages of installed targets first (slow, but then what a run
            would see is seen). A package that fails to import is named with its error.
    """
    from rl_insight_hooks.session import get_session

    errors = _import_targets() if import_targets and not envs.switched_off() else {}
    session = get_session()
    was_installed = session.installer.installed
    if not was_installed and not envs.switched_off():
        session.installer.install()
    found = [_integration(name, errors) for name in INTEGRATIONS]
    uncovered = session.installer.uncovered()
    hooks = [Hook(p.where, chain_of(p.owner, p.name)) for p in session.installer.patcher.patches]
    for integration in found:
        integration.hooks = [h for h in hooks if _belongs(h.where, integration.name)]
        if integration.hooks:
            integration.state, integration.reason = "hooked", ""
    if found and uncovered:
        found[0].uncovered = uncovered
    others = sorted(
        {link for h in hooks for link in h.chain[:-1] if not link.startswith("rl_insight_hooks")}
    )
    if not was_installed:
        session.installer.uninstall()
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        switched="off" if envs.switched_off() else "on" if envs.switched_on() else "by code",
        config_path=envs.config_path(),
        versions=_versions(),
        integrations=found,
        tools_on_attributes=others,
    )


def lines(found: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    out = [
        f"rl-insight-hooks {found.version}, Python {found.python}, {found.machine}",
        f"switched {found.switched} (RL_INSIGHT_HOOKS); settings: {found.config_path or 'none named'}",
        "",
        "versions: " + ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        "",
    ]
    width = max(len(i.name) for i in found.integrations)
    for integration in found.integrations:
        line = f"{integration.name.ljust(width)}  {integration.state:<7}"
        if integration.hooks:
            line += f" {len(integration.hooks)} places"
        if integration.reason:
            line += f" {integration.reason}"
        out.append(f"{line}  [supports {integration.supported}]" if integration.supported else line)
        for hook in integration.hooks:
            out.append(f"  {hook.where}: {' -> '.join(hook.chain)}")
        out += [f"  not covered here: {text}" for text in integration.uncovered]
    if found.tools_on_attributes:
        out += [
            "",
            f"other tools stand on hooked attributes: {', '.join(found.tools_on_attributes)}",
        ]
    return out


def _import_targets() -> dict[str, str]:
    errors = {}
    for top in sorted(
        {target.partition(".")[0] for targets in TARGETS.values() for target in targets}
    ):
        if not _is_there(top):
            continue
        try:
            importlib.import_module(top)
        except Exception as error:
            errors[top] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    return errors


def _is_there(top: str) -> bool:
    """Return True when the package is imported or installed."""
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _integration(name: str, errors: dict[str, str]) -> Integration:
    from rl_insight_hooks.session import get_session

    top = TARGETS[name][0].partition(".")[0]
    if top in errors:
        return Integration(name, "", "absent", f"{top} does not import here: {errors[top]}")
    if not _is_there(top):
        return Integration(name, "", "absent", f"{top} is not installed here")
    reason = get_session().installer.reasons.get(name)
    supported = ""
    if any(target in sys.modules for target in TARGETS[name]):
        supported = getattr(importlib.import_module(INTEGRATIONS[name]), "SUPPORTED", "")
    waits = f"waits for the import of {' or '.join(TARGETS[name])}"
    return Integration(name, supported, "ready", reason or waits)


def _belongs(where: str, name: str) -> bool:
    return where.replace("torch.ops.npu", "torch_npu").startswith(f"{name}.") or (
        name == "torch_npu" and where.startswith("npu.")
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
