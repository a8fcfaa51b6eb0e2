# SPDX-License-Identifier: Apache-2.0
"""What is here and what would be hooked: for ``rl-insight-report doctor``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
import textwrap
from dataclasses import dataclass, field

from rl_insight_hooks import envs
from rl_insight_hooks._version import __version__
from rl_insight_hooks.installer import INTEGRATIONS, TARGETS
from rl_insight_hooks.patching import Patch, chain_of

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


_WIDTH = 110
# Links of a chain that are no other tool: ours, and torch's own decorators (no_grad, inference_mode).
_NO_TOOLS = frozenset({"rl_insight_hooks", "torch", "builtins", "functools", "contextlib"})


@dataclass(slots=True)
class Hook:
    """One hooked attribute and who stands on it, outermost first."""

    where: str
    chain: list[str]
    others: list[str]  # links of the chain that are neither ours nor of the library itself


@dataclass(slots=True)
class Integration:
    """One integration."""

    name: str
    supported: str
    state: str  # "hooked", "ready", "failed" or "absent"
    reason: str
    hooks: list[Hook] = field(default_factory=list)
    not_imported: dict[str, str] = field(
        default_factory=dict
    )  # target -> why it does not import here
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
        import_targets: import the modules of installed targets first (slow, but then what a run would see is
            seen). One that fails to import is named with its error. What they print goes to stderr.
    """
    from rl_insight_hooks.session import get_session

    is_off = envs.switched_off()
    errors = _import_targets() if import_targets and not is_off else {}
    installer = get_session().installer
    was_installed = installer.installed
    if not was_installed and not is_off:
        installer.install()
        installer.reassert()  # as a region does at its begin: what came with the imports is hooked too
    uncovered = installer.uncovered()
    hooks: dict[str, list[Hook]] = {name: [] for name in INTEGRATIONS}
    for patch in installer.patcher.patches:
        hooks[_integration_of(patch)].append(_hook(patch))
    found = [
        _integration(name, hooks[name], errors, installer.reasons.get(name, ""))
        for name in INTEGRATIONS
    ]
    if uncovered:
        next((i for i in found if i.hooks), found[0]).uncovered = uncovered
    others = sorted({link for of_one in hooks.values() for hook in of_one for link in hook.others})
    if not was_installed:
        installer.uninstall()
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        switched="off" if is_off else "on" if envs.switched_on() else "by code",
        config_path=envs.config_path(),
        versions=_versions(),
        integrations=found,
        tools_on_attributes=others,
    )


def lines(found: Diagnosis) -> list[str]:
    """Return the diagnosis as text."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    out = [
        f"rl-insight-hooks {found.version}, Python {found.python}, {found.machine}",
        f"switched {found.switched} (RL_INSIGHT_HOOKS); settings: {found.config_path or 'none named'}",
        *_wrapped("versions: ", versions),
        "",
    ]
    width = max(len(i.name) for i in found.integrations)
    for integration in found.integrations:
        said = f"{len(integration.hooks)} places" if integration.hooks else integration.reason
        out += _wrapped(f"{integration.name.ljust(width)}  {integration.state:<7} ", said)
        if integration.supported:
            out.append(f"  supports {integration.supported}")
        out += _hook_lines(integration.hooks)
        for target, why in integration.not_imported.items():
            out += _wrapped(f"  does not import here: {target}: ", why)
        for text in integration.uncovered:
            out += _wrapped("  not covered here: ", text)
    if found.tools_on_attributes:
        tools = ", ".join(found.tools_on_attributes)
        out += ["", *_wrapped("other tools stand on hooked attributes: ", tools)]
    return out


def _hook_lines(hooks: list[Hook]) -> list[str]:
    """Return one line an owner, and one for each attribute that another tool stands on too."""
    names: dict[str, list[str]] = {}
    for hook in hooks:
        owner, _, name = hook.where.rpartition(".")
        names.setdefault(owner, []).append(name)
    out = []
    for owner, of_owner in sorted(names.items()):
        out += _wrapped(f"  {owner}: ", ", ".join(of_owner))
    for hook in hooks:
        if hook.others:
            out.append(f"  also on {hook.where}, outermost first:")
            out += [f"    {link}" for link in hook.chain]
    return out


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        head + text,
        _WIDTH,
        subsequent_indent=" " * (len(head) if len(head) < _WIDTH // 2 else 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _import_targets() -> dict[str, str]:
    """Import every target that is there; return why those that fail do, by name."""
    errors: dict[str, str] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for targets in TARGETS.values():
            for target in targets:
                top = target.partition(".")[0]
                if _is_there(top) and top not in errors:
                    for module in (top, target):
                        why = _import_error(module)
                        if why is not None:
                            errors[module] = why
                            break
    return errors


def _import_error(name: str) -> str | None:
    """Import ``name``; return why that failed, or None: it did not, or this version has no such module."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        return str(error)
    except (Exception, SystemExit) as error:
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"
    return None


def _is_there(top: str) -> bool:
    """Return True when the package is imported or installed."""
    return top in sys.modules or importlib.util.find_spec(top) is not None


def _integration(name: str, hooks: list[Hook], errors: dict[str, str], problem: str) -> Integration:
    tops = list(dict.fromkeys(target.partition(".")[0] for target in TARGETS[name]))
    there = [top for top in tops if _is_there(top)]
    is_imported = any(target in sys.modules for target in TARGETS[name])
    broken = {target: errors[target] for target in (*there, *TARGETS[name]) if target in errors}
    module = importlib.import_module(INTEGRATIONS[name]) if is_imported or hooks else None
    found = Integration(name, getattr(module, "SUPPORTED", ""), "hooked", problem, hooks, broken)
    if hooks:
        return found
    if not there:
        found.state, found.reason = "absent", f"{tops[0]} is not installed here"
    elif problem:
        found.state = "failed"
    elif set(there) <= set(errors):
        found.state = "failed"
        found.reason = f"{there[0]} does not import here: {errors[there[0]]}"
        found.not_imported = {}
    elif broken:
        found.state, found.reason = "failed", "what it hooks does not import here"
    elif envs.switched_off():
        found.state, found.reason = "ready", "but RL_INSIGHT_HOOKS=0 forbids it"
    elif is_imported:
        found.state, found.reason = "ready", f"this version of {there[0]} has nothing to hook"
    else:
        found.state = "ready"
        found.reason = f"hooks {there[0]} as soon as its modules are imported"
    return found


def _hook(patch: Patch) -> Hook:
    """Return the chain on one attribute; what the package of its owner put there is no other tool."""
    chain = chain_of(patch.owner, patch.name)
    mro = patch.owner.__mro__ if isinstance(patch.owner, type) else ()
    own = {patch.owner_path.partition(".")[0], *(c.__module__.partition(".")[0] for c in mro)}
    tops = [re.split(r"[. ]", link, maxsplit=1)[0] for link in chain]
    others = [
        link
        for link, top in zip(chain, tops, strict=True)
        if top not in own and top not in _NO_TOOLS
    ]
    return Hook(f"{patch.owner_path}.{patch.name}", chain, others)


def _integration_of(patch: Patch) -> str:
    """Return who replaced it; what came late, outside an install, belongs to its owner's package."""
    if patch.integration in INTEGRATIONS:
        return patch.integration
    top = patch.owner_path.partition(".")[0]
    return top if top in INTEGRATIONS else "mindspeed"


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
