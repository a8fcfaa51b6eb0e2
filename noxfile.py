# SPDX-License-Identifier: Apache-2.0
"""Sessions of CI and of developers; ``make test`` runs the default ones.

Sessions with third parties have an environment of their own. torch 2.13.0 is the release that torch-npu 2.13.0
matches; pip takes a CPU build of it where one lies on the machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = [
    "lint",
    "docs",
    "unit",
    "wheel",
    "browser",
    "npu",
    "megatron",
    "vllm",
    "ray",
    "ssh",
    "rl_insight",
]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

TORCH = os.environ.get("RLIH_TORCH", "torch==2.13.0")
TEST_DEPS = ("pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100", "PyYAML>=6")
LINT_DEPS = ("ruff==0.17.6", "mypy>=1.15", "import-linter>=2.1", "types-PyYAML")
NPU_ENV = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def install_package(session: nox.Session) -> None:
    """Install the project, editable, with its own dependencies."""
    session.install("-e", ".", silent=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy (strict on the package), import-linter."""
    session.install(*LINT_DEPS)
    session.install(TORCH)  # its annotations count
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    install_package(session)
    session.run("mypy", "rl_insight_hooks", "integrations")
    session.run("lint-imports")


@nox.session
def unit(session: nox.Session) -> None:
    """Everything that needs torch at most."""
    session.install(TORCH)
    install_package(session)
    extras = ("pyarrow", "safetensors", "prometheus-client", "tensorboard", "plotly>=5.18")
    session.install(*TEST_DEPS, *extras)
    session.run("pytest", *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """The HTML page in a real headless Chromium."""
    if not has_chromium(session):
        session.warn("SKIPPED: chromium and chromedriver are not here and cannot be installed")
        return
    session.install("-e", ".[html]", silent=True)
    session.install("selenium>=4.20", *TEST_DEPS)
    session.run("pytest", "tests/browser", *session.posargs)


def has_chromium(session: nox.Session) -> bool:
    """Return True when a Chromium and its driver are here, or could be installed (Debian, as root)."""
    programs = ("chromium", "chromedriver")
    if not all(map(shutil.which, programs)) and shutil.which("apt-get") and os.geteuid() == 0:
        install = ["apt-get", "install", "-y", "-q", "chromium", "chromium-driver"]
        codes = [0, *range(1, 256)]  # what counts is whether the programs are there then
        session.run("apt-get", "update", "-q", external=True, silent=True, success_codes=codes)
        session.run(*install, external=True, silent=True, success_codes=codes)
    return all(map(shutil.which, programs))


@nox.session
def wheel(session: nox.Session) -> None:
    """Build wheel and sdist, install the wheel in a clean environment, use it there."""
    session.install("build")
    out = Path(session.create_tmp()) / "dist"
    session.run("python", "-m", "build", "--outdir", str(out), ".", silent=True)
    (built,) = sorted(out.glob("*.whl"))[-1:]
    session.install("--force-reinstall", "--no-deps", str(built))
    session.install(str(built), "pytest>=8.2")
    session.run(
        "pytest", "-c", os.devnull, "--rootdir", "tests/wheel", "tests/wheel", *session.posargs
    )


def npu_environment(session: nox.Session) -> dict[str, str]:
    """Make the driver stubs and return the environment in which torch_npu imports without a device."""
    stubs = Path(session.create_tmp()).resolve() / "driver"
    session.run("python", "tools/make_npu_stubs.py", str(stubs))
    path = os.pathsep.join(filter(None, [str(stubs), os.environ.get("LD_LIBRARY_PATH", "")]))
    return {**NPU_ENV, "LD_LIBRARY_PATH": path}


def installed(session: nox.Session, folder: str) -> bool:
    """Install the requirements of ``folder``; where they cannot be had, say so and return False."""
    try:
        session.install(TORCH)
        session.install("-r", f"{folder}/requirements.txt")
        if Path(f"{folder}/requirements-no-deps.txt").exists():
            session.install("--no-deps", "-r", f"{folder}/requirements-no-deps.txt")
    except nox.command.CommandFailed:
        session.warn(
            f"SKIPPED: the packages of {folder}/requirements*.txt cannot be installed here"
        )
        return False
    session.install("-e", ".", "--no-deps", silent=True)
    return True


@nox.session
def docs(session: nox.Session) -> None:
    """The site, with warnings as errors."""
    install_package(session)
    session.install("sphinx>=7", "myst-parser>=3", "furo")
    out = str(Path(session.create_tmp()).resolve() / "site")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-E", "-b", "html", "docs", out)
    session.log(f"built: {out}/index.html")


@nox.session
def npu(session: nox.Session) -> None:
    """The real torch_npu, msprobe and verl on CPU, with the wheels of older verl."""
    if installed(session, "tests/verl"):
        env = npu_environment(session)
        eras = Path(session.create_tmp()).resolve() / "verl"
        for version in ("0.7.1", "0.8.0", "megatron"):
            requirements = f"tests/verl/requirements-{version}.txt"
            try:
                session.install("--no-deps", "--target", str(eras / version), "-r", requirements)
            except nox.command.CommandFailed:
                session.warn(f"SKIPPED: {requirements} cannot be installed here")
        env["RLIH_VERL_ERAS"] = str(eras)
        session.run("pytest", "tests/npu", "tests/verl", *session.posargs, env=env)


@nox.session
def megatron(session: nox.Session) -> None:
    """The real Megatron-Core on CPU, with expert parallelism over four processes."""
    if installed(session, "tests/megatron"):
        session.run("pytest", "tests/megatron", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """The real vllm and vllm-ascend on CPU."""
    folders = [f for f in ("tests/vllm", "tests/vllm_worker") if Path(f).exists()]
    if installed(session, "tests/vllm_worker"):
        env = npu_environment(session)
        session.run("pytest", *folders, *session.posargs, env=env)


@nox.session
def ray(session: nox.Session) -> None:
    """collect --ray and summarize --ray on a real local cluster."""
    install_package(session)
    session.install("ray>=2.41", *TEST_DEPS)
    session.run("pytest", "tests/ray", *session.posargs)


@nox.session
def ssh(session: nox.Session) -> None:
    """collect --ssh against a real sshd on loopback."""
    install_package(session)
    session.install(*TEST_DEPS)
    session.run("pytest", "tests/ssh", *session.posargs)


@nox.session
def rl_insight(session: nox.Session) -> None:
    """What we export, drawn by the real rl-insight 0.2.1, which has an environment of its own."""
    install_package(session)
    session.install(*TEST_DEPS)
    theirs = Path(session.create_tmp()).resolve() / "rl_insight"
    python = theirs / "bin" / "python"
    if not python.exists():
        session.run("python", "-m", "venv", str(theirs))
    # what its recipe imports; its own list of dependencies names a server's instead
    packages = (TORCH, "matplotlib", "omegaconf", "loguru", "pandas", "ijson", "tqdm", "plotly")
    install = (str(python), "-m", "pip", "install", "-q")
    try:
        session.run(*install, *packages, external=True, silent=True)
        session.run(*install, "--no-deps", "rl-insight==0.2.1", external=True, silent=True)
    except nox.command.CommandFailed:
        session.warn("SKIPPED: rl-insight 0.2.1 cannot be installed here")
        return
    session.run(
        "pytest",
        "tests/unit/report_load/test_export.py",
        *session.posargs,
        env={"RL_INSIGHT_021_PYTHON": str(python)},
    )


@nox.session
def fuzz(session: nox.Session) -> None:
    """10,000 damaged inputs of all formats: no traceback, no hang, the right exit code, nothing silent."""
    install_package(session)
    session.install(*TEST_DEPS, "pyarrow", "safetensors")
    session.run(
        "pytest",
        "tests/unit/report_load/test_fuzz.py",
        *(session.posargs or ["--timeout=3600"]),
        env={"RL_INSIGHT_FUZZ": os.environ.get("RL_INSIGHT_FUZZ", "10000")},
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Numbers of docs/overhead.md: ratios measured in one run."""
    session.install(TORCH)
    install_package(session)
    for script in sorted(Path("tests/bench").glob("bench_*.py")):
        session.run("python", str(script), *session.posargs)


@nox.session
def tests_min(session: nox.Session) -> None:
    """The offline half with the oldest dependencies that pyproject.toml admits and this Python has."""
    session.install("-c", "tests/oldest.txt", "-e", ".[html]", *TEST_DEPS)
    folders = ("rebalance", "report_load", "report_views")
    session.run("pytest", *(f"tests/unit/{folder}" for folder in folders), *session.posargs)


@nox.session(python=["3.10", "3.12"])
def tests_other_python(session: nox.Session) -> None:
    """The part that needs no torch, on the oldest and the newest Python."""
    install_package(session)
    session.install(*TEST_DEPS)
    session.run("pytest", "tests/unit/rebalance", "tests/unit/report_load", *session.posargs)


if __name__ == "__main__":
    sys.exit("run me with nox")
