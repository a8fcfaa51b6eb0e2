# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report doctor`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def run_doctor(env, cwd, *args):
    """Return what it printed on stdout; it must exit with 0."""
    command = [sys.executable, "-m", "rl_insight_hooks.report.main", "doctor", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=cwd)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
