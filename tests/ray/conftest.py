# SPDX-License-Identifier: Apache-2.0
"""A real local Ray cluster: one driver node without data, and four raylets with a folder each."""

from __future__ import annotations

import time

import pytest

ray = pytest.importorskip(
    "ray", reason="Ray is not installed (pip install 'rl-insight-hooks[ray]')"
)

from ray.cluster_utils import Cluster  # noqa: E402

NUM_NODES = 4
RANKS_PER_NODE = 16


class LocalCluster:
    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self.raylets = [
            # num_cpus=0: as in a running training, no CPU is free for our tasks
            self.cluster.add_node(num_cpus=0, labels={"slot": str(number)})
            for number in range(NUM_NODES)
        ]
        self.cluster.wait_for_nodes()

    def kill(self, number: int) -> None:
        """Kill a raylet (SIGKILL) and wait until the cluster knows."""
        node_id = self.raylets[number].node_id
        self.cluster.remove_node(self.raylets[number], allow_graceful=False)
        deadline = time.monotonic() + 60
        while any(info["NodeID"] == node_id and info["Alive"] for info in ray.nodes()):
            assert time.monotonic() < deadline, "the cluster does not notice that a node is dead"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster():
    local = LocalCluster()
    ray.init(address=local.cluster.address, log_to_driver=False)
    yield local
    ray.shutdown()
    local.cluster.shutdown()
