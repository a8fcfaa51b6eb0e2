# SPDX-License-Identifier: Apache-2.0
"""msprobe dumps: the real one against the router's own counts, and simulated runs of every schedule."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.load.msprobe import Place, place_of
from rl_insight_hooks.report.load.msprobe_calls import phase_of_frames
from rl_insight_hooks.report.torch_write import int_tensor_file

# --- the real dump ---------------------------------------------------------------------------------


def _forward_counts(table):
    """Return {(step, role, layer): counts} of the forward rows of a table merged over ranks."""
    forward = table.phases.index("forward")
    return {
        (int(table.step_N[row]), table.role_of(row), int(table.layer_N[row])): table.counts_NE[
            row
        ].tolist()
        for row in np.flatnonzero(table.phase_N == forward).tolist()
    }


@pytest.fixture(scope="module")
def truth(shared):
    stored = json.loads((shared / "msprobe_verl_truth.json").read_text())["truth"]
    return {
        (int(step), role, int(layer)): counts
        for step, roles in stored.items()
        for role, layers in roles.items()
        for layer, counts in layers.items()
    }


@pytest.mark.parametrize("lost", [(), ("dump.json",), ("stack.json",), ("dump.json", "stack.json")])
def test_real_dump_gives_the_routers_own_counts(shared, truth, tmp_path, lost):
    root = tmp_path / "dump"
    shutil.copytree(shared / "msprobe_verl", root)
    os.system(f"chmod -R u+w {root}")
    for name in lost:
        for path in root.rglob(name):
            path.unlink()
    table = load(root, merge_ranks=True)
    assert _forward_counts(table) == truth
    assert table.problems == ()
    said = " ".join(table.assumptions)
    assert ("without dump.json" in said) == ("dump.json" in lost)
    assert ("without stack.json" in said or "and stack.json" in said) == ("stack.json" in lost)


def test_real_dump_has_recompute_and_backward_apart(shared):
    table = load(shared / "msprobe_verl", roles="actor_update")
    assert table.phases == ("forward", "recompute", "dx", "dw")
    forward = table.counts_NE[table.phase_N == 0]
    for phase in (1, 2, 3):
        assert (table.counts_NE[table.phase_N == phase] == forward).all()
    assert set(table.num_passes_N.tolist()) == {2}  # two micro-batches


@pytest.mark.parametrize("kept_json", [(), ("dump.json",), ("dump.json", "stack.json")])
@pytest.mark.parametrize("num_kept", [15, 27])
def test_a_dump_that_lost_calls_is_not_taken_for_complete(
    shared, tmp_path, by_rule, num_kept, kept_json
):
    """msprobe loses calls under non-reentrant checkpointing: 15 or 27 of 96 are dumped."""
    root = tmp_path / "dump"
    shutil.copytree(shared / "msprobe_verl", root)
    os.system(f"chmod -R u+w {root}")
    kept = set(range(15)) | (set(range(48, 60)) if num_kept == 27 else set())
    for folder in root.glob("*/actor_update/step0/rank*"):
        for path in (folder / "dump_tensor_data").iterdir():
            if int(path.name.split(".")[2]) not in kept:
                path.unlink()
        for name in {"dump.json", "stack.json"} - set(kept_json):
            (folder / name).unlink()
        for name in kept_json:
            value = json.loads((folder / name).read_text())
            if name == "dump.json":
                value["data"] = {
                    k: v for k, v in value["data"].items() if int(k.split(".")[2]) in kept
                }
            else:
                value = {
                    number: [[api for api in names if int(api.split(".")[2]) in kept], frames]
                    for number, (names, frames) in value.items()
                }
            (folder / name).write_text(json.dumps(value))
    table = load(root)
    found = set(by_rule(table))
    assert {"incomplete-dump", "incomplete-backward"} & found
    assert all("actor_update" in problem.where for problem in table.problems)
    # the other stages are untouched, and have their four layers
    ref = table.take(table.role_N == table.roles.index("ref_compute_log_prob"))
    assert sorted(set(ref.layer_N.tolist())) == [0, 1, 2, 3]


# --- simulated runs --------------------------------------------------------------------------------


class Run:
    """Plays a training step and keeps the calls and the truth."""

    def __init__(self, *, layers, gmms, experts, cumulative, hidden=8, inner=6):
        self.layers, self.gmms, self.cumulative = layers, gmms, cumulative
        self.experts, self.hidden, self.inner = experts, hidden, inner
        self.calls = []
        self.truth = [[0] * experts for _ in range(layers)]

    def widths(self):
        up = [(self.hidden, self.inner)] * (self.gmms - 1)
        return [*up, (self.inner, self.hidden)]

    def call(self, counts, kind, x, weight, frames, group):
        values = list(itertools.accumulate(counts)) if self.cumulative else list(counts)
        self.calls.append(
            {
                "values": values,
                "x": x,
                "weight": weight,
                "frames": frames,
                "group": group,
                "kind": kind,
            }
        )

    def layer(self, number, counts, *, recompute):
        tail = (
            ["File /torch/utils/checkpoint.py, line 331, in backward, \n run"] if recompute else []
        )
        for line, (rows, columns) in enumerate(self.widths()):
            frames = [
                f"File /npu_patch.py, line {line}, in forward, \n output = npu_grouped_matmul(",
                "File /torch/nn/modules/module.py, line 1789, in _call_impl, \n return forward_call(",
                *tail,
            ]
            x, weight = [sum(counts), rows], [self.experts, rows, columns]
            self.call(counts, "forward", x, weight, frames, 0)
        if not recompute:
            self.truth[number] = [a + b for a, b in zip(self.truth[number], counts, strict=True)]

    def backward(self, counts):
        tokens = sum(counts)
        for rows, columns in reversed(self.widths()):
            frames = ["File /npu_patch.py, line 107, in backward, \n dx = npu_grouped_matmul("]
            self.call(counts, "dx", [tokens, columns], [self.experts, rows, columns], frames, 0)
            frames = ["File /npu_patch.py, line 117, in backward, \n dw = npu_grouped_matmul("]
            self.call(counts, "dw", [rows, tokens], [tokens, columns], frames, 2)

    def micro_batch_backward(self, loads, unit):
        """``unit`` layers to a checkpoint; 0: no checkpointing."""
        number = self.layers
        while number > 0:
            low = max(0, number - (unit or 1))
            if unit:
                for layer in range(low, number):
                    self.layer(layer, loads[layer], recompute=True)
            for layer in reversed(range(low, number)):
                self.backward(loads[layer])
            number = low

    def write(self, folder, *, dump=True, stack=True):
        tensors = Path(folder) / "dump_tensor_data"
        tensors.mkdir(parents=True)
        data, stacks = {}, {}
        for index, call in enumerate(self.calls):
            api = f"NPU.npu_grouped_matmul.{index}.forward"
            (tensors / f"{api}.kwargs.group_list.pt").write_bytes(int_tensor_file(call["values"]))
            kwargs = {
                "group_list": {"type": "torch.Tensor"},
                "group_type": {"type": "int", "value": call["group"]},
            }
            if not self.cumulative:
                kwargs["group_list_type"] = {"type": "int", "value": 1}
            args = [[{"shape": call["x"]}], [{"shape": call["weight"]}]]
            data[api] = {"input_args": args, "input_kwargs": kwargs}
            stacks.setdefault(json.dumps(call["frames"]), []).append(api)
        if dump:
            (folder / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))
        if stack:
            numbered = {
                str(n): [names, json.loads(frames)]
                for n, (frames, names) in enumerate(stacks.items())
            }
            (folder / "stack.json").write_text(json.dumps(numbered))


def _loads(rng, layers, experts, tokens):
    out = []
    for _ in range(layers):
        cuts = sorted(rng.randrange(tokens + 1) for _ in range(experts - 1))
        out.append([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)])
    return out


def _play(rng, *, layers, gmms, cumulative, micro_batches, unit, schedule, tokens=None):
    run = Run(layers=layers, gmms=gmms, experts=4, cumulative=cumulative)
    batches = [_loads(rng, layers, 4, tokens or 40 + 7 * number) for number in range(micro_batches)]
    order = list(range(micro_batches))
    if schedule == "one by one":
        for loads in batches:
            for number in range(layers):
                run.layer(number, loads[number], recompute=False)
            run.micro_batch_backward(loads, unit)
        return run
    for loads in batches:
        for number in range(layers):
            run.layer(number, loads[number], recompute=False)
    if schedule == "forward only":
        return run
    for batch in reversed(order) if schedule == "last first" else order:
        run.micro_batch_backward(batches[batch], unit)
    return run


def _counts_by_layer(table, phase="forward"):
    wanted = table.phases.index(phase)
    return {
        int(table.layer_N[row]): table.counts_NE[row].tolist()
        for row in np.flatnonzero(table.phase_N == wanted).tolist()
    }


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("gmms", [2, 3])
@pytest.mark.parametrize("unit", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["one by one", "first first", "last first"])
@pytest.mark.parametrize("files", ["both", "dump", "stack"])
def test_simulated_update(tmp_path, cumulative, gmms, unit, schedule, files):
    if files == "stack" and cumulative:
        pass  # without dump.json the type is told from the values: all lists rise
    rng = random.Random(f"{cumulative}{gmms}{unit}{schedule}{files}")
    run = _play(
        rng,
        layers=4,
        gmms=gmms,
        cumulative=cumulative,
        micro_batches=3,
        unit=unit,
        schedule=schedule,
    )
    folder = tmp_path / "step_1" / "actor_update" / "step0" / "rank0"
    run.write(folder, dump=files != "stack", stack=files != "dump")
    table = load(tmp_path)
    assert _counts_by_layer(table) == dict(enumerate(run.truth))
    assert set(table.num_passes_N.tolist()) == {3}
    for phase in (["recompute"] if unit else []) + ["dx", "dw"]:
        assert _counts_by_layer(table, phase) == dict(enumerate(run.truth))
    assert ("recompute" in table.phases) == bool(unit)
    assert [p for p in table.problems if p.severity == "error"] == []


@pytest.mark.parametrize("gmms", [2, 3])
@pytest.mark.parametrize("unit", [0, 1])
def test_simulated_update_of_tensors_alone(tmp_path, gmms, unit):
    rng = random.Random(gmms * 10 + unit)
    run = _play(
        rng,
        layers=4,
        gmms=gmms,
        cumulative=False,
        micro_batches=3,
        unit=unit,
        schedule="one by one",
    )
    run.write(tmp_path / "step_1" / "actor_update" / "step0" / "rank0", dump=False, stack=False)
    table = load(tmp_path)
    assert _counts_by_layer(table) == dict(enumerate(run.truth))
    assert any(
        f"{gmms} calls taken as one layer pass" in sentence for sentence in table.assumptions
    )


@pytest.mark.parametrize("files", ["both", "dump", "stack"])
def test_neighbouring_layers_with_equal_counts_stay_two(tmp_path, files):
    run = Run(layers=4, gmms=3, experts=4, cumulative=False)
    same = [5, 0, 2, 1]
    for number in range(4):
        run.layer(number, same, recompute=False)
    run.write(tmp_path / "step0" / "rank0", dump=files != "stack", stack=files != "dump")
    assert _counts_by_layer(load(tmp_path)) == dict.fromkeys(range(4), same)


@pytest.mark.parametrize("files", ["both", "dump", "stack", "none"])
@pytest.mark.parametrize("gmms", [2, 3])
def test_calls_from_one_line_are_one_pass(tmp_path, files, gmms):
    """All matmuls of a layer in one line of code: the stacks do not tell them apart."""
    rng = random.Random(gmms)
    run = _play(
        rng, layers=4, gmms=gmms, cumulative=True, micro_batches=2, unit=1, schedule="one by one"
    )
    for call in run.calls:
        call["frames"] = [
            frame.replace("line 1,", "line 0,").replace("line 2,", "line 0,")
            for frame in call["frames"]
        ]
    folder = tmp_path / "step_1" / "actor_update" / "step0" / "rank0"
    run.write(folder, dump=files in ("both", "dump"), stack=files in ("both", "stack"))
    assert _counts_by_layer(load(tmp_path)) == dict(enumerate(run.truth))


@pytest.mark.parametrize("files", ["both", "stack"])
def test_square_weights_need_the_places(tmp_path, files):
    run = Run(layers=3, gmms=3, experts=4, cumulative=False, hidden=8, inner=8)
    for number, counts in enumerate([[1, 2, 3, 4], [4, 3, 2, 1], [4, 3, 2, 1]]):
        run.layer(number, counts, recompute=False)
    run.write(tmp_path / "step0" / "rank0", dump=files == "both")
    assert _counts_by_layer(load(tmp_path)) == dict(enumerate(run.truth))


def test_a_possible_recompute_is_named_where_nothing_tells(tmp_path, by_rule):
    rng = random.Random(2)
    run = Run(layers=3, gmms=2, experts=4, cumulative=False)
    loads = _loads(rng, 3, 4, 30)
    for number in range(3):
        run.layer(number, loads[number], recompute=False)
    run.layer(2, loads[2], recompute=True)  # the dump ends here
    for name, dump, stack in (("a", True, False), ("b", False, False), ("c", True, True)):
        folder = tmp_path / name / "step_1" / "actor_update" / "step0" / "rank0"
        run.write(folder, dump=dump, stack=stack)
        found = by_rule(load(tmp_path / name))
        assert ("equal-neighbours" in found) == (not stack)
    assert _counts_by_layer(load(tmp_path / "c")) == dict(enumerate(run.truth))


def test_equal_layers_of_tensors_alone_need_gmm_per_layer(tmp_path):
    run = Run(layers=4, gmms=2, experts=4, cumulative=False)
    for number in range(4):
        run.layer(number, [5, 0, 2, 1], recompute=False)
    run.write(tmp_path / "step0" / "rank0", dump=False, stack=False)
    table = load(tmp_path, gmm_per_layer=2)
    assert _counts_by_layer(table) == {layer: [5, 0, 2, 1] for layer in range(4)}


def test_layers_of_forward_only_dumps_come_from_another_stage(tmp_path):
    rng = random.Random(8)
    shape = {"layers": 4, "gmms": 3, "cumulative": False, "tokens": 50}
    update = _play(rng, micro_batches=1, unit=1, schedule="one by one", **shape)
    log_prob = _play(rng, micro_batches=3, unit=0, schedule="forward only", **shape)
    update.write(tmp_path / "step_1" / "actor_update" / "step0" / "rank0")
    log_prob.write(tmp_path / "step_1" / "ref_compute_log_prob" / "step0" / "rank0")
    table = load(tmp_path, roles="ref_compute_log_prob,actor_update")
    mine = table.take(table.role_N == table.roles.index("ref_compute_log_prob"))
    assert _counts_by_layer(mine) == dict(enumerate(log_prob.truth))
    assert not any("MoE layers assumed" in sentence for sentence in table.assumptions)


def test_forward_only_dumps_alone_say_how_many_layers_were_assumed(tmp_path):
    rng = random.Random(9)
    run = _play(
        rng, layers=5, gmms=3, cumulative=False, micro_batches=1, unit=0, schedule="forward only"
    )
    run.write(tmp_path / "step_1" / "ref" / "step0" / "rank0")
    table = load(tmp_path)
    assert _counts_by_layer(table) == dict(enumerate(run.truth))
    assert any("5 MoE layers assumed" in sentence for sentence in table.assumptions)
    halved = load(tmp_path, num_moe_layers=1)
    assert _counts_by_layer(halved) == {0: [sum(c) for c in zip(*run.truth, strict=True)]}


def test_micro_batches_of_different_size_tell_the_number_of_layers(tmp_path):
    rng = random.Random(10)
    run = _play(
        rng, layers=4, gmms=3, cumulative=False, micro_batches=3, unit=0, schedule="forward only"
    )
    run.write(tmp_path / "step_1" / "ref" / "step0" / "rank0")
    assert _counts_by_layer(load(tmp_path)) == dict(enumerate(run.truth))


def test_sparse_pairs_become_counts(tmp_path):
    folder = tmp_path / "step0" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    torch = pytest.importorskip("torch")
    data = {}
    for index in range(2):
        api = f"NPU.npu_grouped_matmul.{index}.forward"
        pairs = torch.tensor([[2, 5], [0, 1], [3, 0], [0, 0]])
        torch.save(pairs, folder / "dump_tensor_data" / f"{api}.kwargs.group_list.pt")
        kwargs = {"group_type": {"value": 0}, "group_list_type": {"value": 2}}
        shapes = ([6, 8], [4, 8, 6]) if index == 0 else ([6, 6], [4, 6, 8])
        data[api] = {
            "input_args": [[{"shape": shapes[0]}], [{"shape": shapes[1]}]],
            "input_kwargs": kwargs,
        }
    (folder / "dump.json").write_text(json.dumps({"data": data}))
    assert _counts_by_layer(load(tmp_path)) == {0: [1, 0, 5, 0]}


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [(0, [5, 3, 9], "decreases"), (1, [5, -1, 2], "negative"), (7, [1, 2, 3], "unknown")],
)
def test_lists_that_contradict_their_type_are_named(tmp_path, by_rule, kind, values, word):
    folder = tmp_path / "step0" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    data = {}
    for index, (its_kind, its_values) in enumerate([(1, [1, 1, 1]), (kind, values)]):
        api = f"NPU.npu_grouped_matmul.{index}.forward"
        path = folder / "dump_tensor_data" / f"{api}.kwargs.group_list.pt"
        path.write_bytes(int_tensor_file(its_values))
        data[api] = {"input_kwargs": {"group_list_type": {"type": "int", "value": its_kind}}}
    (folder / "dump.json").write_text(json.dumps({"data": data}))
    table = load(tmp_path)
    assert _counts_by_layer(table) == {0: [1, 1, 1]}
    (problem,) = by_rule(table)["bad-counts"]
    assert word in problem.what


def test_statistics_dump_says_that_it_has_no_values(tmp_path, by_rule):
    folder = tmp_path / "step0" / "rank0"
    folder.mkdir(parents=True)
    info = {"input_kwargs": {"group_list": {"type": "torch.Tensor", "Max": 8}}}
    data = {"NPU.npu_grouped_matmul.0.forward": info}
    (folder / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
    assert "statistics-dump" in by_rule(load(tmp_path))


def test_a_level_l0_dump_says_which_settings_would_do(tmp_path, by_rule):
    for rank in (0, 1):
        folder = tmp_path / "actor_update" / "step0" / f"rank{rank}"
        folder.mkdir(parents=True)
        (folder / "dump.json").write_text(
            json.dumps({"task": "statistics", "level": "L0", "data": {}})
        )
    table = load(tmp_path)
    assert table.num_rows == 0
    assert [p.rule for p in table.problems] == ["no-calls", "no-calls"]
    assert '"level": "L1"' in table.problems[0].fix


def test_one_file_of_a_dump_may_be_named(tmp_path):
    run = Run(layers=1, gmms=2, experts=3, cumulative=True)
    run.layer(0, [1, 0, 4], recompute=False)
    folder = tmp_path / "step_3" / "ref" / "step0" / "rank2"
    run.write(folder)
    tensor = folder / "dump_tensor_data" / "NPU.npu_grouped_matmul.0.forward.kwargs.group_list.pt"
    for path in (folder, folder / "dump.json", folder / "dump_tensor_data", tensor):
        table = load(path)
        assert table.counts_NE.tolist() == [[1, 0, 4]], path
        assert table.step_N.tolist() == [3]


def test_weight_gradients_that_were_put_off_are_no_forward(tmp_path):
    run = Run(layers=1, gmms=2, experts=3, cumulative=False)
    run.layer(0, [1, 0, 4], recompute=False)
    frames = ["File /weight_grad_store.py, line 92, in pop, \n gmm("]
    run.call([1, 0, 4], "dw", [8, 5], [5, 6], frames, 2)
    run.write(tmp_path / "step_1" / "actor" / "step0" / "rank0")
    table = load(tmp_path, num_moe_layers=1)
    assert _counts_by_layer(table) == {0: [1, 0, 4]}
    assert _counts_by_layer(table, "dw") == {0: [1, 0, 4]}


@pytest.mark.parametrize("name", ["dump.json", "stack.json"])
def test_a_torn_json_is_named_and_the_tensors_still_read(tmp_path, by_rule, name):
    rng = random.Random(11)
    run = _play(
        rng, layers=3, gmms=3, cumulative=False, micro_batches=2, unit=1, schedule="one by one"
    )
    folder = tmp_path / "step_1" / "actor_update" / "step0" / "rank0"
    run.write(folder)
    path = folder / name
    path.write_text(path.read_text()[:-100])
    table = load(tmp_path)
    assert _counts_by_layer(table) == dict(enumerate(run.truth))
    assert f"torn-{name.replace('.', '-')}" in by_rule(table)


def test_unreadable_tensors_are_named_one_by_one(tmp_path, by_rule):
    rng = random.Random(12)
    run = _play(
        rng, layers=3, gmms=3, cumulative=False, micro_batches=1, unit=0, schedule="forward only"
    )
    folder = tmp_path / "step_1" / "ref" / "step0" / "rank0"
    run.write(folder)
    tensors = folder / "dump_tensor_data"
    (tensors / "NPU.npu_grouped_matmul.3.forward.kwargs.group_list.pt").write_bytes(b"")
    torn = tensors / "NPU.npu_grouped_matmul.7.forward.kwargs.group_list.pt"
    torn.write_bytes(torn.read_bytes()[:-50])
    table = load(tmp_path)
    rules = by_rule(table)
    assert rules["empty-file"][0].where.endswith("matmul.3.forward.kwargs.group_list.pt")
    assert rules["bad-tensor-file"][0].where == str(torn)
    assert "missing-tensor-file" not in rules
    assert _counts_by_layer(table) == dict(enumerate(run.truth))  # two calls of each layer are left


def test_expert_parallel_ranks_fall_into_place_with_ep_size(tmp_path):
    for rank, counts in ((0, [3, 1]), (1, [0, 4]), (2, [1, 1]), (3, [2, 2])):
        run = Run(layers=1, gmms=2, experts=2, cumulative=False)
        run.layer(0, counts, recompute=False)
        run.write(tmp_path / "step_1" / "actor" / "step0" / f"rank{rank}")
    table = load(tmp_path, merge_ranks=True, ep_size=2)
    assert table.counts_NE.tolist() == [[4, 2, 2, 6]]
    assumed = load(tmp_path, merge_ranks=True)
    assert assumed.counts_NE.tolist() == [[6, 8]]
    assert any("ep_size" in sentence for sentence in assumed.assumptions)


def test_every_command_reads_expert_parallel_dumps_with_ep_size(tmp_path, capsys, monkeypatch):
    """Two ranks of two experts each: four experts, and two devices where devices are judged."""
    from rl_insight_hooks.report.main import run

    monkeypatch.chdir(tmp_path)
    dump = tmp_path / "dump"
    for rank, counts in ((0, [1, 2]), (1, [30, 4])):
        one = Run(layers=1, gmms=2, experts=2, cumulative=True)
        one.layer(0, counts, recompute=False)
        one.write(dump / "step_1" / "actor" / "step0" / f"rank{rank}")

    def said(*arguments, code=0):
        assert run([*arguments, "--ep-size", "2"]) == code
        return json.loads(capsys.readouterr().out)

    (role,) = said("summary", "dump", "--json")["roles"]
    assert (role["num_experts"], role["num_devices"], role["assignments"]) == (4, 2, 37)
    assert role["device_max_over_mean"] == 34 / (37 / 2)
    (hot, *_) = said("heatmap", "dump", "--json")["hottest"]
    assert (hot["tokens"], hot["label"].split()[-1]) == (30, "2")
    said("html", "dump", "--json")
    page = (tmp_path / "moe_load.html").read_text()
    assert '"num_experts":4' in page
    assert said("compare", "dump", "dump", "--json")["layers"][0]["total_variation"] == 0
    assert said("check", "dump", "--json")["num_rows"] == 2
    said("rebalance", "dump", "--num-replicas", "4", "--num-npus", "2", "-o", "m.json", "--json")
    placed = json.loads((tmp_path / "m.json").read_text())["layer_list"][0]["device_list"]
    assert sorted(e for device in placed for e in device["device_expert"]) == [0, 1, 2, 3]


# --- where a dump lies -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "root", "place"),
    [
        ("/d/step3/rank1", "/d", Place(3, "msprobe", 1)),
        ("/d/step3/proc77", "/d", Place(3, "msprobe", 77, True)),
        ("/s/step_2/actor_update/step0/rank4", "/s", Place(2, "actor_update", 4)),
        ("/s/step_2/actor_update/step0/rank4", "/s/step_2", Place(2, "actor_update", 4)),
        (
            "/s/step_2/actor_update/step0/rank4",
            "/s/step_2/actor_update/step0/rank4",
            Place(2, "actor_update", 4),
        ),
        ("/d/actor_update/step5/rank2", "/d", Place(5, "actor_update", 2)),
        ("/d/my_stage/step5/rank2", "/d", Place(5, "my_stage", 2)),
        ("/d/actor_update/step5/rank2", "/d/actor_update", Place(5, "actor_update", 2)),
        # a run stored below folders with misleading names
        ("/data/rank3/step_7/x/step_1/ref/step0/rank0", "/data/rank3/step_7/x", Place(1, "ref", 0)),
        ("/data/rank3/x/step2/rank0", "/data/rank3/x", Place(2, "msprobe", 0)),
        ("/data/step_9/x/step2/rank0", "/data/step_9/x", Place(2, "msprobe", 0)),
        # rank before step, as rl-insight also takes it
        ("/x/rank3/step_1/actor", "/x", Place(1, "actor", 3)),
        ("/x/gmm_dump", "/x/gmm_dump", Place(-1, "msprobe", 0)),
    ],
)
def test_place_of_a_dump(folder, root, place):
    assert place_of(folder, [root]) == place


def _frame(function, file="/m.py", line=1):
    return f"File {file}, line {line}, in {function}, \n code"


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (["forward", "apply", "_call_impl", "forward", "<module>"], "forward"),
        (["backward", "apply"], "dx"),
        (["backward", "apply", "_engine_run_backward", "backward"], "dx"),
        (["forward", "apply", "_call_impl", "unpack_hook"], "recompute"),
        (["forward", "_call_impl", "run_function", "backward"], "recompute"),
        (["forward", "_call_impl", "_engine_run_backward"], "recompute"),
        # log_prob called by a trainer's method named "backward_pass" is forward
        (["forward", "_call_impl", "backward_pass"], "forward"),
    ],
)
def test_phase_of_a_call_stack(frames, phase):
    assert phase_of_frames([_frame(name) for name in frames]) == phase


def test_two_processes_without_ranks_become_ranks_and_that_is_said(tmp_path):
    for process, counts in ((4711, [1, 2]), (52, [3, 4])):
        run = Run(layers=1, gmms=2, experts=2, cumulative=False)
        run.layer(0, counts, recompute=False)
        run.write(tmp_path / "step0" / f"proc{process}")
    table = load(tmp_path)
    assert table.rank_N.tolist() == [0, 1]
    assert (
        sum("torch.distributed not initialised" in sentence for sentence in table.assumptions) == 2
    )
