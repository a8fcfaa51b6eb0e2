# SPDX-License-Identifier: Apache-2.0
"""The nodes of a running Ray cluster as sources: one pinned task per node that takes no CPU from the training.

The code of :mod:`node` travels with the task (cloudpickle by value): nothing of ours need be installed on the
nodes. Data comes in batches through a streaming generator with back-pressure, so memory stays flat on both
sides, and what came before a node died is kept.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rl_insight_hooks
from rl_insight_hooks.errors import MissingDependencyError, RlInsightError, UsageError
from rl_insight_hooks.report.collect import node
from rl_insight_hooks.report.collect.model import (
    FileStat,
    OnFile,
    Received,
    SourceError,
    Survey,
)
from rl_insight_hooks.report.collect.ray_argument import AUTO

if TYPE_CHECKING:
    from rl_insight_hooks.report.collect.fold import FoldRequest, NodeHead
    from rl_insight_hooks.report.load.sink import Block

_log = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
_PROBE_S = 10.0
_BATCHES_AHEAD = 2
_NODE_DIED = ("NodeDiedError", "LocalRayletDiedError", "OwnerDiedError")
_RUN_AGAIN = "Run the same command again when it is back: what came is not copied twice."


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of the cluster."""

    node_id: str
    hostname: str
    ip: str
    labels: tuple[tuple[str, str], ...]
    name: str  # hostname, with the node id where two nodes have one
    is_alive: bool


@contextlib.contextmanager
def connected(address: str, *, ship_package: bool = False) -> Iterator[Any]:
    """Connect as :func:`connect` does, and leave the cluster at the end of the block.

    Ray prints what happens to its nodes to stdout, even with ``log_to_driver=False``; stdout is for our data, so
    within the block it is logged (debug). What concerns us comes as a :class:`SourceError`.
    """
    with contextlib.redirect_stdout(_Log()):
        ray = connect(address, ship_package=ship_package)
        try:
            yield ray
        finally:
            ray.shutdown()  # ends Ray's printing threads


class _Log(io.TextIOBase):
    """Something to print to: lines are logged."""

    def __init__(self) -> None:
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            _log.debug("ray: %s", line)
        return len(text)


def connect(address: str, *, ship_package: bool = False) -> Any:
    """Connect to the running cluster at ``address`` ("auto" finds it) and return the ``ray`` module.

    With ``ship_package`` this very version of the package travels to the nodes (they need numpy and msgspec).

    Raises:
        MissingDependencyError: Ray is not installed.
        UsageError: the address is Ray Client's.
        RlInsightError: no cluster answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            f"--ray needs Ray ({error}); install it: pip install 'rl-insight-hooks[ray]'"
        ) from None
    if address.startswith("ray://"):
        raise UsageError(
            f"--ray {address}: files cannot be streamed through Ray Client; run this on a node of the "
            "cluster (there --ray auto finds it), or submit it: ray job submit -- rl-insight-report ..."
        )
    if not ray.is_initialized():
        _probe(address)
        package = str(Path(rl_insight_hooks.__file__).parent)
        runtime_env = {"py_modules": [package]} if ship_package else None
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=runtime_env,
            )
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise RlInsightError(
                f"--ray {address}: Ray cannot connect ({first_line}); start this on a node of the running "
                "cluster with --ray auto; where Ray asks for a token, set RAY_AUTH_MODE=token as its nodes do"
            ) from None
    return ray


def _probe(address: str) -> None:
    """Raise at once if nobody listens at ``address``: ``ray.init`` itself tries for many minutes.

    Raises:
        RlInsightError: no connection.
    """
    found = address
    if address == AUTO:
        try:
            from ray._private.services import canonicalize_bootstrap_address

            found = canonicalize_bootstrap_address(address) or ""
        except (ImportError, AttributeError, ConnectionError):
            return  # another version of Ray, or no cluster at all: ray.init says so at once
    host, colon, port = found.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise RlInsightError(
            f"--ray {address}: nobody answers at {found} ({error}); start this on a node of the running "
            "cluster, or give its address as in `ray status --address`"
        ) from None


def list_nodes(ray: Any) -> list[RayNode]:
    """Return the nodes that the cluster knows, living ones first, then by name."""
    infos = ray.nodes()
    hosts = [info["NodeManagerHostname"] for info in infos]
    found = []
    for info, host in zip(infos, hosts, strict=True):
        node_id = info["NodeID"]
        found.append(
            RayNode(
                node_id=node_id,
                hostname=host,
                ip=info["NodeManagerAddress"],
                labels=tuple(sorted((info.get("Labels") or {}).items())),
                name=host if hosts.count(host) == 1 else f"{host}-{node_id[:8]}",
                is_alive=bool(info["Alive"]),
            )
        )
    return sorted(found, key=lambda one: (not one.is_alive, one.name))


_FIELD = re.compile(r"\{([^{}]*)\}")


def fill_path(template: str, where: RayNode) -> str:
    """Return ``template`` for one node: {hostname}, {ip}, {node_id} and {label:KEY} are filled in.

    Raises:
        UsageError: a field is unknown, or the node has no such label.
    """
    values = {"hostname": where.hostname, "ip": where.ip, "node_id": where.node_id}
    values |= {f"label:{key}": value for key, value in where.labels}

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in sorted(values))
            raise UsageError(
                f"path {template!r}: node {where.name} has no {{{match[1]}}}; it has {known}"
            )
        return values[match[1]]

    return _FIELD.sub(value_of, template)


def check_template(template: str) -> None:
    """Raise unless ``template`` is a path that means the same in every process of a node.

    Raises:
        UsageError: it is relative.
    """
    if not template.startswith(("/", "~", "$", "{")):
        raise UsageError(
            f"DATA {template!r}: write it from the root; tasks on the nodes start in other folders"
        )


class NodeTasks:
    """Runs functions on one node, whatever its CPUs are busy with."""

    def __init__(self, ray: Any, where: RayNode, timeout_s: float) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(node)
        self._ray = ray
        self._where = where
        self._timeout_s = timeout_s
        self._is_stopped = False
        self._options: dict[str, Any] = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(where.node_id, soft=False),
        }

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what ``function`` returns on the node.

        Raises:
            SourceError: it raised there, or the node died.
        """
        task = self._ray.remote(function).options(**self._options)
        try:
            return self._ray.get(task.remote(*args), timeout=self._timeout_s)
        except Exception as error:
            raise self._explain(error) from None

    def stream(
        self, function: Callable[..., Iterator[Any]], *args: Any, **options: Any
    ) -> Iterator[Any]:
        """Yield what the generator ``function`` yields on the node, a few items ahead at most.

        Raises:
            SourceError: it raised there, or the node died; what was yielded is good.
        """
        task = self._ray.remote(function).options(
            num_returns="streaming",
            _generator_backpressure_num_objects=_BATCHES_AHEAD,
            **self._options,
            **options,
        )
        try:
            items = task.remote(*args)
            deadline = time.monotonic() + self._timeout_s
            while True:
                if self._is_stopped:
                    self._ray.cancel(items, force=True)
                    raise SourceError("stopped")
                ready, _ = self._ray.wait([items], num_returns=1, timeout=1.0)
                if not ready:
                    if time.monotonic() > deadline:
                        raise SourceError(f"nothing came for {self._timeout_s:g} s", _RUN_AGAIN)
                    continue
                try:
                    item = next(items)
                except StopIteration:
                    return
                yield self._ray.get(item, timeout=self._timeout_s)
                del item
                deadline = time.monotonic() + self._timeout_s
        except (SourceError, GeneratorExit):
            raise
        except Exception as error:
            raise self._explain(error) from None

    def stop(self) -> None:
        """Make ``stream`` end soon."""
        self._is_stopped = True

    def _explain(self, error: Exception) -> SourceError:
        """Return in words what Ray says of a task that failed."""
        cause = getattr(error, "cause", None)
        if isinstance(cause, FileNotFoundError):
            return SourceError(f"no folder {cause.filename} there", "Check the path.")
        if isinstance(cause, OSError):
            return SourceError(f"{cause.filename}: {cause.strerror}", "Check the path.")
        if isinstance(cause, ImportError):
            return SourceError(f"{cause}", "Install numpy and msgspec on the nodes.")
        if cause is not None:
            return SourceError(f"the task failed: {type(cause).__name__}: {cause}")
        kind = type(error).__name__
        if kind in _NODE_DIED or not self._lives():
            return SourceError(f"the node died ({kind})", _RUN_AGAIN)
        text = str(error).strip()
        first_line = text.splitlines()[0] if text else ""
        return SourceError(f"{kind}: {first_line}", _RUN_AGAIN)

    def _lives(self) -> bool:
        """Return False once the cluster knows that the node is dead (it may take a moment to notice)."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            alive = {info["NodeID"] for info in self._ray.nodes() if info["Alive"]}
            if self._where.node_id not in alive:
                return False
            time.sleep(0.5)
        return True


class RaySource:
    """One folder on one node; see :class:`~rl_insight_hooks.report.collect.model.Source`."""

    def __init__(
        self,
        tasks: NodeTasks,
        where: RayNode,
        path: str,
        include: Sequence[str],
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.name = where.name
        self._tasks = tasks
        self._path = path
        self._include = tuple(include)
        self._batch_bytes = batch_bytes
        self._folder = path

    def survey(self) -> Survey:
        """Return the load files of the node's folder; a node without the folder has none (a head node, say)."""
        started = time.time()
        try:
            self._folder, stats = self._tasks.call(node.list_files, self._path, self._include)
        except SourceError as error:
            if not error.what.startswith("no folder"):
                raise
            stats = []
        files = tuple(FileStat(*stat) for stat in stats)
        return Survey(folder=self._folder, files=files, listed_unix_s=started)

    def digests(self, paths: Sequence[str]) -> dict[str, str]:
        """Return sha256 by path."""
        found: Mapping[str, str] = self._tasks.call(node.hash_files, self._folder, list(paths))
        return dict(found)

    def fetch(self, paths: Sequence[str], staging: Path, on_file: OnFile) -> None:
        """Stream the files; each is checked against the sha256 that the node made of what it read."""
        batches = self._tasks.stream(node.send_files, self._folder, list(paths), self._batch_bytes)
        for batch in batches:
            for path, mtime_ns, digest, broken, data in batch:
                if broken is None:
                    target = staging / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
                    if node.hash_files(str(staging), [path]) != {path: digest}:
                        broken = "changed on the way: its checksum here differs"
                on_file(Received(path, digest, mtime_ns, broken))

    def fold(self, request: FoldRequest) -> Iterator[NodeHead | list[Block]]:
        """Fold the node's files there; see :mod:`rl_insight_hooks.report.collect.fold`."""
        from rl_insight_hooks.report.collect.fold import fold_node

        return self._tasks.stream(fold_node, request)

    def stop(self) -> None:
        """Make a fetch that is under way end soon."""
        self._tasks.stop()


def ray_sources(
    ray: Any, template: str, include: Sequence[str], timeout_s: float
) -> tuple[list[RaySource], list[str]]:
    """Return a source for each living node, and the names of the dead ones.

    Raises:
        UsageError: ``template`` has an unknown field.
    """
    nodes = list_nodes(ray)
    sources = [
        RaySource(NodeTasks(ray, where, timeout_s), where, fill_path(template, where), include)
        for where in nodes
        if where.is_alive
    ]
    return sources, [where.name for where in nodes if not where.is_alive]
