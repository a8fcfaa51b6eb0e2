# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost: a grouped-matmul call, a fused-MoE call, a whole step; beside a JSON collector.

    python tests/bench/bench_hooks.py [--rounds 40] [--steps 100]

The host function of the per-call numbers does nothing, so that what is left is ours. Every number is the
best of rounds that alternate between the variants (what else runs on the machine only adds); a full step is
in CPU time, with freed memory kept by the process: page faults vary by more than we cost.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import rl_insight_hooks as rih
from rl_insight_hooks.layers import LayerRef
from rl_insight_hooks.session import fresh_session

REPO = Path(__file__).resolve().parents[2]
NUM_LAYERS = 58  # MoE layers of DeepSeek-V3
WIDTHS = (64, 256)  # experts
NUM_IDS = 4096
CALLS_PER_PASS = 3  # gate, up, down
WARM_UP_PAIRS = 8  # of full steps: until the process has all the memory it keeps

# glibc: never give freed memory back
_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "99999999999",
    "MALLOC_TOP_PAD_": "536870912",
}

Results = dict[str, float]


def cost_us(run: Callable[[], None], num_calls: int) -> float:
    """Return the time of one of the ``num_calls`` calls that ``run`` makes, in us."""
    gc.disable()
    try:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) / num_calls * 1e6
    finally:
        gc.enable()


def best(rounds: list[Results]) -> Results:
    """Return the smallest value of every number over ``rounds``, as ``timeit`` does."""
    return {name: min(one[name] for one in rounds) for name in rounds[0]}


class Layer(torch.nn.Module):
    """One MoE layer: three grouped matmuls that share their group_list."""

    def __init__(self, npu: ModuleType, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = torch.nn.Linear(1, 1)
        self.experts = torch.nn.Identity()
        hidden, width, num_rows = 16, 8, 2 * num_experts
        self.npu = npu
        self.hidden, self.mid = [torch.empty(num_rows, hidden)], [torch.empty(num_rows, width)]
        self.up = [torch.empty(num_experts, hidden, width)]
        self.down = [torch.empty(num_experts, width, hidden)]
        self.options = {
            "group_list": torch.full((num_experts,), 2),
            "group_list_type": 1,
            "group_type": 0,
            "split_item": 2,
        }

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        npu, options = self.npu, self.options
        npu.npu_grouped_matmul(self.hidden, self.up, **options)
        npu.npu_grouped_matmul(self.hidden, self.up, **options)
        npu.npu_grouped_matmul(self.mid, self.down, **options)
        return hidden_states


def fake_torch_npu() -> ModuleType:
    """Put a torch_npu whose grouped matmul returns at once into sys.modules."""
    result = [torch.ones(1)]

    def npu_grouped_matmul(x: Any, weight: Any, **options: Any) -> list[torch.Tensor]:
        return result

    module = ModuleType("torch_npu")
    module.__dict__["npu_grouped_matmul"] = npu_grouped_matmul
    sys.modules["torch_npu"] = module
    return module


def bench_grouped_matmul(num_experts: int, num_rounds: int) -> Results:
    """Cost of one call with the hooks absent, off and on (watched and not), and of a bare ``add_``."""
    npu = fake_torch_npu()
    layers = torch.nn.ModuleList(Layer(npu, num_experts) for _ in range(NUM_LAYERS))
    x = torch.ones(1, 16)
    bufs = [torch.zeros(num_experts, dtype=torch.int64) for _ in range(NUM_LAYERS)]
    repeats = 5
    num_calls = repeats * NUM_LAYERS * CALLS_PER_PASS

    def passes() -> None:
        for _ in range(repeats):
            for layer in layers:
                layer(x)

    def bare_adds() -> None:  # one a layer pass, as the recorder makes
        for _ in range(repeats):
            for layer, buf in zip(layers, bufs, strict=True):
                buf.add_(layer.options["group_list"])

    def one_round(folder: str) -> Results:
        one = {"absent": cost_us(passes, num_calls), "add_": cost_us(bare_adds, num_calls)}
        rih.install(["torch_npu"])
        one["off"] = cost_us(passes, num_calls)
        for name in ("on", "watched"):
            if name == "watched":
                rih.watch(layers)
            with rih.record(folder, step=1, role=name):
                layers[0](x)
                one[name] = cost_us(passes, num_calls)
            rih.flush()  # the writer's thread is no part of a call's cost
        rih.uninstall()
        return one

    original = npu.npu_grouped_matmul
    with tempfile.TemporaryDirectory() as folder:
        one_round(folder)  # first sight of the layers
        result = best([one_round(folder) for _ in range(num_rounds)])
    assert npu.npu_grouped_matmul is original  # off means absent: nothing is left to cost anything
    return result


def bench_expert_ids(num_experts: int, num_rounds: int) -> Results:
    """Cost of recording the 4,096 ids of one fused-MoE apply, and of a bare ``scatter_add_``."""
    from rl_insight_hooks.recorder import Recorder

    recorder, ref = Recorder(), LayerRef(0, "model.layers.0.mlp.experts", "module")
    ids = torch.randint(0, num_experts, (NUM_IDS // 8, 8), dtype=torch.int32)
    valid = torch.ones(ids.shape[0], dtype=torch.bool)
    flat, ones = ids.flatten().long(), torch.ones(NUM_IDS, dtype=torch.int64)
    buf = torch.zeros(num_experts, dtype=torch.int64)
    num_calls = 200

    def bare() -> None:
        for _ in range(num_calls):
            buf.scatter_add_(0, flat, ones)

    def recorded() -> None:
        for _ in range(num_calls):
            recorder.on_expert_ids("fused", ref, ids, num_experts=num_experts)

    def masked() -> None:
        for _ in range(num_calls):
            recorder.on_expert_ids("fused", ref, ids, num_experts=num_experts, valid=valid)

    variants = {"scatter_add_": bare, "on": recorded, "on, with a mask": masked}

    def one_round() -> Results:
        return {name: cost_us(run, num_calls) for name, run in variants.items()}

    one_round()
    return best([one_round() for _ in range(num_rounds)])


def bench_json_collector(num_experts: int, num_rounds: int) -> float:
    """Cost in us of a layer call of a collector that does the work of MindSpeed-RL's (2.3.0).

    In every fused-MoE apply it reads the JSON of all layers, makes ints of its keys, counts the distinct
    ids, adds them and writes the JSON back with an indent of 2.
    """
    ids = torch.randint(0, num_experts, (NUM_IDS // 8, 8), dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "token_collects.json"
        zeros = dict.fromkeys(range(num_experts), 0)
        path.write_text(json.dumps(dict.fromkeys(range(NUM_LAYERS), zeros), indent=2))

        def collect(layer: int) -> None:
            with path.open() as file:
                text_keyed = json.load(file)
            loads = {
                int(number): {int(expert): num for expert, num in row.items()}
                for number, row in text_keyed.items()
            }
            experts, nums = torch.unique(ids, return_counts=True)
            for expert, num in zip(experts.tolist(), nums.tolist(), strict=True):
                loads[layer][expert] += num
            with path.open("w") as file:
                json.dump(loads, file, indent=2)

        return min(cost_us(lambda: collect(7), 1) for _ in range(num_rounds))


def median_interval(values: list[float], num_draws: int = 10_000) -> tuple[float, float]:
    """Return the 95% interval of the median of ``values``, by bootstrap (Efron 1979, percentile method)."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(num_draws)
    )
    return medians[num_draws // 40], medians[-num_draws // 40]


def make_cpu_moe(num_layers: int) -> torch.nn.Module:
    """A MoE of realistic width on CPU: hidden 1024, 16 experts, top-2."""
    sys.modules.pop("torch_npu", None)
    sys.path.insert(0, str(REPO / "examples"))
    from tiny_moe import TinyMoe

    torch.manual_seed(0)
    return TinyMoe(
        vocab=512, hidden=1024, width=512, num_layers=num_layers + 1, num_experts=16, top_k=2
    )


def bench_step(num_layers: int, num_steps: int) -> Results:
    """CPU seconds of a full step (forward, backward), recording on and absent, in alternating pairs.

    CPU time of the whole process: the writer's thread counts, what else runs on the machine does not.
    """
    from rl_insight_hooks import cpu_fallback

    model = make_cpu_moe(num_layers)
    cpu_fallback.install_stand_in()
    ids = torch.randint(0, 512, (256,))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(ids).square().mean().backward()

    def timed(step_number: int, recorded: bool, folder: str) -> float:
        if not recorded:
            begun = time.process_time()
            step()
            return time.process_time() - begun
        rih.install(["torch_npu"])
        region = rih.record(folder, step=step_number, role="actor_update")
        marks = [time.process_time()]
        for part in (region.__enter__, step, lambda: region.__exit__(None, None, None), rih.flush):
            part()
            marks.append(time.process_time())
        rih.uninstall()
        region_s.append(marks[1] - marks[0] + marks[3] - marks[2])
        writer_s.append(marks[4] - marks[3])
        return marks[4] - marks[0]

    region_s: list[float] = []
    writer_s: list[float] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_steps + WARM_UP_PAIRS):
            for recorded in (number % 2 == 0, number % 2 == 1):  # who goes first alternates
                seconds[recorded].append(timed(number, recorded, folder))
    absent, recording = seconds[False][WARM_UP_PAIRS:], seconds[True][WARM_UP_PAIRS:]
    ratios = [on / off for on, off in zip(recording, absent, strict=True)]
    low, high = median_interval(ratios)
    return {
        "absent_s": statistics.median(absent),
        "region_ms": 1e3 * statistics.median(region_s),
        "writer_ms": 1e3 * statistics.median(writer_s),
        "pairs": 100 * (statistics.median(ratios) - 1),
        "low": 100 * (low - 1),
        "high": 100 * (high - 1),
        "bests": 100 * (min(recording) / min(absent) - 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the per-call numbers")
    parser.add_argument("--steps", type=int, default=100, help="pairs of full steps; 0: none")
    parser.add_argument("--layers", type=int, default=8, help="MoE layers of the full step")
    args = parser.parse_args()
    if _KEEP_MEMORY.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_KEEP_MEMORY})
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, one thread; best of {args.rounds} rounds")
    for num_experts in WIDTHS:
        gmm = bench_grouped_matmul(num_experts, args.rounds)
        print(f"\ngrouped matmul, {num_experts} experts, us a call (a third of a layer pass)")
        for name in ("absent", "off", "on", "watched"):
            print(f"  {name:<24} {gmm[name]:8.2f}  added {gmm[name] - gmm['absent']:7.2f}")
        print(f"  {'a bare add_ is':<24} {gmm['add_']:8.2f}")
        for name in ("on", "watched"):
            beyond = gmm[name] - gmm["absent"] - gmm["add_"]
            print(f"  {name + ', beyond add_':<24} {beyond:8.2f}  target 5")
        baseline = bench_json_collector(num_experts, args.rounds)
        fused = bench_expert_ids(num_experts, args.rounds)
        print(
            f"JSON collector, {NUM_LAYERS} layers x {num_experts} experts: {baseline:.0f} us a layer call"
        )
        for name, ours in (
            ("one grouped matmul", gmm["watched"] - gmm["absent"]),
            ("the three of a layer pass", CALLS_PER_PASS * (gmm["watched"] - gmm["absent"])),
            ("the same, nobody watched", CALLS_PER_PASS * (gmm["on"] - gmm["absent"])),
            ("one fused apply, its scatter_add_ too", fused["on"]),
        ):
            print(f"  ours, {name:<38} {ours:8.2f}  {baseline / ours:6,.0f} times cheaper")
        print(f"fused MoE apply, {NUM_IDS} ids, {num_experts} experts, us a call")
        for name, value in fused.items():
            beyond = value - fused["scatter_add_"]
            print(f"  {name:<24} {value:8.2f}  beyond scatter_add_ {beyond:7.2f}  target 15")
    if args.steps:
        with fresh_session():  # as a run has it: without the rows of the benchmarks above
            found = bench_step(args.layers, args.steps)
        print(f"\nfull step, hidden 1024, 16 experts, {args.layers} layers, {args.steps} pairs")
        print(
            f"  absent {found['absent_s']:.3f} CPU s; recording adds {found['pairs']:+.2f}% (median of the "
            f"pairs, 95% interval {found['low']:+.2f}% to {found['high']:+.2f}%), "
            f"{found['bests']:+.2f}% (bests)  target 1%"
        )
        print(
            f"  of it: begin and end of the region {found['region_ms']:.2f} ms, "
            f"the writer's thread {found['writer_ms']:.2f} ms"
        )


if __name__ == "__main__":
    main()
