# SPDX-License-Identifier: Apache-2.0
"""Known counts behind the page that tests/browser looks at, and how it is opened."""

from __future__ import annotations

import numpy as np

from rl_insight_hooks.paths import load_file_path
from rl_insight_hooks.schema import LoadFile, Parallel, Producer, Record, encode_load_file

ROLES = ("actor_update", "\u6f14\u5458<b>\u56de\u653e</b>")
STEPS = (1, 2, 5)
LAYERS = (3, 4, 6)
NUM_RANKS, NUM_LOCAL = 2, 4


def counts_of(role: int, step: int, rank: int, layer: int) -> list[int]:
    """Tokens of the four experts of one rank; different for every row."""
    rng = np.random.default_rng([role, step, rank, layer])
    return rng.integers(0, 100_000, NUM_LOCAL).tolist()


def row_of(role: int, layer: int, steps=STEPS, ranks=range(NUM_RANKS)) -> list[int]:
    """Tokens of all experts of ``ranks``, added up over ``steps``."""
    return [
        sum(counts_of(role, step, rank, layer)[e] for step in steps)
        for rank in ranks
        for e in range(NUM_LOCAL)
    ]


def write_data(root):
    """Write the files of every role, step and rank below ``root``."""
    for r, role in enumerate(ROLES):
        for step in STEPS:
            for rank in range(NUM_RANKS):
                records = [
                    Record(
                        layer=layer,
                        layer_name=f"model.layers.{layer}.mlp.experts",
                        layer_source="module",
                        phase="forward",
                        seam="test",
                        num_calls=3,
                        num_passes=1,
                        num_assignments=sum(counts_of(r, step, rank, layer)),
                        counts=counts_of(r, step, rank, layer),
                    )
                    for layer in LAYERS
                ]
                file = LoadFile(
                    schema_version=1,
                    producer=Producer("rl-insight-hooks", "0"),
                    run_id="run",
                    writer="w",
                    step=step,
                    step_source="given",
                    role=role,
                    rank=rank,
                    world_size=NUM_RANKS,
                    parallel=Parallel(ep_size=NUM_RANKS, ep_rank=rank),
                    num_experts=NUM_RANKS * NUM_LOCAL,
                    top_k=2,
                    first_expert=rank * NUM_LOCAL,
                    id_space="logical",
                    tokens_layout="disjoint",
                    num_regions=1,
                    started_unix_s=1.0,
                    ended_unix_s=2.0,
                    records=records,
                )
                path = load_file_path(str(root), step, f"role{r}", rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode_load_file(file))


def opened(browser, page):
    """Open ``page`` and wait until it is drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("performance")  # what the browser asked for before
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(
        lambda b: b.execute_script("return document.body.dataset.ready") is not None
    )
    assert browser.execute_script("return document.body.dataset.ready") == "yes"
    return browser
