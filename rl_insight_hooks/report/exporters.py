# SPDX-License-Identifier: Apache-2.0
"""Live loads for other tools, through their own libraries: a Prometheus text file, TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_insight_hooks.errors import MissingDependencyError, UsageError
from rl_insight_hooks.report.live import Snapshot, StepLoad

PROMETHEUS_PREFIX = "rl_insight_moe_"


class PrometheusFile:
    """Keeps one text file for node_exporter's textfile collector; replaced whole at every write."""

    def __init__(self, path: Path) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise MissingDependencyError(
                "--prometheus needs prometheus-client: pip install 'rl-insight-hooks[prometheus]'"
            ) from None
        if not path.parent.is_dir():
            raise UsageError(f"--prometheus {path}: no folder {path.parent}; make it first")
        self._client: Any = prometheus_client
        self._path = path

    def write(self, snapshot: Snapshot) -> None:
        """Replace the file by what ``snapshot`` shows."""
        registry = self._client.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return self._client.Gauge(PROMETHEUS_PREFIX + name, text, labels, registry=registry)

        step = gauge("step", "Step that is shown; -1 for counts of the whole run.", "role")
        ranks = gauge("ranks", "Ranks that wrote the step.", "role")
        missing = gauge("missing_ranks", "Ranks that wrote other steps, but not this one.", "role")
        of_layer = {
            "max_over_mean": gauge(
                "max_over_mean", "Hottest expert over the mean of experts.", "role", "layer"
            ),
            "cv": gauge("cv", "Standard deviation over mean of experts.", "role", "layer"),
            "num_dead": gauge("dead_experts", "Experts without a token.", "role", "layer"),
            "num_assignments": gauge(
                "assignments", "Token-to-expert assignments of the step.", "role", "layer"
            ),
        }
        for view in snapshot.roles:
            role = view.shown.role
            step.labels(role).set(view.shown.step)
            ranks.labels(role).set(len(view.shown.ranks))
            missing.labels(role).set(len(view.missing))
            for load in view.shown.layers:
                for name, metric in of_layer.items():
                    metric.labels(role, str(load.layer)).set(getattr(load, name))
        self._client.write_to_textfile(str(self._path), registry)


class TensorBoardLog:
    """Writes a few scalars for every finished step, once each."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise MissingDependencyError(
                "--tensorboard needs tensorboard: pip install 'rl-insight-hooks[tensorboard]'"
            ) from None
        self._writer: Any = Writer(str(folder))
        self._written: set[tuple[str, int]] = set()

    def write(self, snapshot: Snapshot) -> None:
        """Add the steps that all ranks have written since the last call."""
        for load in snapshot.complete:
            if (load.role, load.step) in self._written or load.step < 0:
                continue
            self._written.add((load.role, load.step))
            for name, value in scalars(load).items():
                self._writer.add_scalar(f"moe_load/{load.role}/{name}", value, load.step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


def scalars(load: StepLoad) -> dict[str, float]:
    """Return a few numbers of one role and step, by the names of ``rih.summary()``; over all ranks here."""
    layers = load.layers
    return {
        "max_over_mean": load.worst,
        "max_over_mean_avg": sum(one.max_over_mean for one in layers) / len(layers),
        "worst_layer": float(layers[0].layer),
        "cv": max(one.cv for one in layers),
        "dead_experts": float(max(one.num_dead for one in layers)),
        "assignments": float(sum(one.num_assignments for one in layers)),
        "ranks": float(len(load.ranks)),
    }
