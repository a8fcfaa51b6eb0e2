# SPDX-License-Identifier: Apache-2.0
"""The hot path waits for nothing, allocates nothing once it is warm, and never moves a buffer."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_run import counts_by_layer, layer_pass, read

from rl_insight_hooks.layers import LayerRef


class NoSyncTensor(torch.Tensor):
    """Stands for a tensor on a device: whatever would bring a value to the host raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        to_host = name in {
            *("item", "cpu", "tolist", "numpy", "nonzero", "unique", "equal", "is_nonzero"),
            *("__bool__", "__int__", "__index__", "__float__", "__len__", "__array__", "__iter__"),
        }
        if name == "__len__":
            to_host = False  # the shape is on the host
        if name == "to" and any(str(a) == "cpu" for a in (*args[1:], *kwargs.values())):
            to_host = True
        if to_host:
            raise AssertionError(f"host sync in the hot path: {name}")
        return super().__torch_function__(func, types, args, kwargs)


def no_sync(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).as_subclass(NoSyncTensor)


@pytest.mark.parametrize(
    "sync",
    [
        lambda t: t[0].item(),
        lambda t: t.cpu(),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: bool(t[0]),
        lambda t: int(t[0]),
        lambda t: t.to("cpu"),
        lambda t: t.to(device=torch.device("cpu")),
    ],
)
def test_the_tensor_catches_syncs(sync):
    with pytest.raises(AssertionError, match="host sync"):
        sync(no_sync([3, 1]))


@pytest.fixture
def host(npu, monkeypatch):
    """A grouped matmul that never looks at its group_list: all looking is ours."""
    result = [torch.ones(1)]
    monkeypatch.setattr(npu, "npu_grouped_matmul", lambda *args, **kwargs: result)
    return npu


def call_gate_up_down(npu, group_list, list_type, num_experts, num_rows):
    x, mid = torch.ones(num_rows, 4), torch.ones(num_rows, 6)
    up, down = torch.ones(num_experts, 4, 6), torch.ones(num_experts, 6, 4)
    options = {"group_list": group_list, "group_list_type": list_type, "group_type": 0}
    npu.npu_grouped_matmul([x], [up], **options)
    npu.npu_grouped_matmul([x], [up], **options)
    npu.npu_grouped_matmul([mid], [down], **options)


FORMS = {
    "counts": (1, [2, 0, 5]),
    "cumulative": (0, [2, 2, 7]),
    "pairs": (2, [[0, 2], [2, 5], [0, 0]]),
}


@pytest.mark.parametrize("form", FORMS)
def test_group_list_without_sync(rih, host, tmp_path, form):
    list_type, values = FORMS[form]
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        for _ in range(3):
            call_gate_up_down(host, no_sync(values), list_type, 3, 7)
    rih.flush()
    load = read(tmp_path, 1, "r")
    assert not load.failed
    per_pass = torch.tensor(counts_by_layer(load)).sum(0)
    assert per_pass.tolist() == [6, 0, 15]


def test_dw_and_recompute_without_sync(session):
    recorder = session.recorder
    group_list = no_sync([1, 2, 4])
    for _ in range(2):
        recorder.on_group_list("seam", group_list, 1, 2, (), ())
    (slot,) = [s for s in recorder.pool.slots if s.phase == "dw"]
    assert slot.buf.tolist() == [1, 2, 4]
    assert (slot.num_calls, slot.num_passes) == (2, 1)


def test_counts_without_sync(session):
    recorder = session.recorder
    layer = recorder.layers.of_order(0)
    for _ in range(2):
        recorder.on_counts("seam", layer, no_sync([4, 0, 1]), num_rows=5)
    (slot,) = recorder.pool.slots
    assert slot.buf.tolist() == [8, 0, 2]
    assert (slot.num_calls, slot.num_rows) == (2, 10)


def ids_truth(ids, valid, num_experts, num_extra):
    """The row of on_expert_ids, worked out one id at a time."""
    rows = {True: [0] * (1 + num_experts + num_extra), False: [0] * (1 + num_experts + num_extra)}
    for t, chosen in enumerate(ids):
        row = rows[valid is None or valid[t]]
        for expert in chosen:
            row[0 if expert < 0 else 1 + min(expert, num_experts + num_extra - 1)] += 1
    return rows[True] + rows[False]


IDS = [[0, 3], [-1, 2], [4, 9], [2, 2], [5, -7], [1, 6]]
VALID = [True, True, True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("valid", [None, VALID], ids=["all valid", "masked"])
@pytest.mark.parametrize("num_extra", [1, 3])
def test_expert_ids(session, dtype, valid, num_extra):
    recorder, ref = session.recorder, LayerRef(3, "layers.3.mlp", "module")
    mask = None if valid is None else no_sync(valid, torch.bool)
    for _ in range(3):
        recorder.on_expert_ids(
            "seam", ref, no_sync(IDS, dtype), num_experts=4, valid=mask, num_extra=num_extra
        )
    (slot,) = recorder.pool.slots
    assert slot.buf.tolist() == [3 * n for n in ids_truth(IDS, valid, 4, num_extra)]
    assert (slot.num_calls, slot.layer.number) == (3, 3)


def test_ids_at_the_ends_of_int32(session):
    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    ids = torch.tensor([[2**31 - 1, -(2**31)]], dtype=torch.int32)
    recorder.on_expert_ids("seam", ref, ids, num_experts=2)
    assert recorder.pool.slots[0].buf.tolist() == [1, 0, 0, 1] + [0] * 4


def test_ids_of_the_host_stay_as_they_are(session):
    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    ids, valid = torch.tensor(IDS), torch.tensor(VALID)
    before = ids.clone()
    recorder.on_expert_ids("seam", ref, ids, num_experts=4, valid=valid)
    assert torch.equal(ids, before)


def test_enabled_flag_shuts_and_opens(session):
    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    ids = torch.tensor([[0, 1]])
    expected = [0] * 8
    flags = None
    for enabled in (True, False, True, False):
        recorder.set_enabled(enabled)
        recorder.on_expert_ids("seam", ref, ids, num_experts=2)
        flags = flags if flags is not None else recorder.enabled_flags(ids.device)
        # made by the first call, so they exist from the second round on
        assert recorder.enabled_flags(ids.device) is flags
        expected[1] += int(enabled)
        expected[2] += int(enabled)
        assert recorder.pool.slots[0].buf.tolist() == expected


@pytest.mark.parametrize("num_tokens", [1, 7, 32_768, 32_769, 50_000])
def test_enabled_flags_of_few_and_of_very_many_ids(session, num_tokens):
    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    ids = torch.arange(num_tokens, dtype=torch.int32).remainder(4).unsqueeze(-1)
    valid = torch.arange(num_tokens).remainder(3) != 0
    expected = [0] * 12
    for enabled, size in itertools.product((True, False, True), (num_tokens, 3, num_tokens)):
        recorder.set_enabled(enabled)
        recorder.on_expert_ids("seam", ref, ids[:size], num_experts=4, valid=valid[:size])
        if enabled:
            row = ids_truth(ids[:size].tolist(), valid[:size].tolist(), 4, 1)
            expected = [a + b for a, b in zip(expected, row, strict=True)]
        assert recorder.pool.slots[0].buf.tolist() == expected


def test_logical_and_physical_ids_of_a_layer_never_share_a_row(session):
    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    for id_space, times in ((None, 1), ("physical", 2), (None, 1)):
        for _ in range(times):
            recorder.on_expert_ids(
                "seam", ref, torch.tensor([[1]]), num_experts=2, id_space=id_space
            )
    assert {slot.id_space: slot.buf.tolist()[2] for slot in recorder.pool.slots} == {
        None: 2,
        "physical": 2,
    }


def test_nothing_is_allocated_in_the_steady_state(rih, session, npu, tmp_path):
    rih.install()
    with rih.record(tmp_path, step=1, role="r"):
        layer_pass([2, 3, 1])
        warm = len(session.recorder.pool.slots), session.recorder.pool.nbytes
        for _ in range(20):
            session.recorder.begin()  # each pass is the first layer of a new pass
            session.recorder._order = 0
            layer_pass([1, 0, 4])
        assert (len(session.recorder.pool.slots), session.recorder.pool.nbytes) == warm


def test_buffers_are_never_rebound(session):
    recorder = session.recorder
    layer = recorder.layers.of_order(0)
    recorder.on_counts("seam", layer, torch.tensor([1, 2]))
    (slot,) = recorder.pool.slots
    buf, where = slot.buf, slot.buf.data_ptr()
    for _ in range(5):
        (reading,) = recorder.drain().resolve()
        assert reading.values.tolist() == [1, 2]
        assert slot.buf is buf
        assert buf.data_ptr() == where
        assert buf.tolist() == [0, 0]
        recorder.on_counts("seam", layer, torch.tensor([1, 2]))


def test_many_layers_do_not_move_earlier_rows(session):
    recorder = session.recorder
    for order in range(200):  # several chunks
        recorder.on_counts("seam", recorder.layers.of_order(order), torch.tensor([order, 1]))
    before = [(slot.buf.data_ptr(), slot.buf.tolist()) for slot in recorder.pool.slots]
    assert [values for _, values in before] == [[order, 1] for order in range(200)]
    assert len({where for where, _ in before}) == 200
    recorder.drain()
    assert [s.buf.data_ptr() for s in recorder.pool.slots] == [where for where, _ in before]


def test_replay_of_a_traced_add_counts_over_drains(session):
    """A graph that holds the row keeps counting into it, drained or not (export, CUDA and NPU graphs)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    recorder, ref = session.recorder, LayerRef(0, "a", "module")
    slot = recorder.ids_slot("seam", recorder.layers.of_ref(ref), 4, torch.device("cpu"))

    def routed(ids):
        recorder.on_expert_ids("seam", ref, ids, num_experts=4)
        return ids + 0

    graph = make_fx(routed)(torch.zeros(2, 2, dtype=torch.int64))
    recorder.drain()
    ids = [[3, 0], [3, 2]]
    for num_replays in (1, 5, 100):
        for _ in range(num_replays):
            graph(torch.tensor(ids))
        (reading,) = recorder.drain().resolve()
        assert reading.slot is slot
        assert reading.values.tolist() == [num_replays * n for n in ids_truth(ids, None, 4, 1)]
    recorder.set_enabled(False)
    graph(torch.tensor(ids))
    assert recorder.drain().resolve() == []


def test_absent_when_off(rih, npu):
    original = npu.npu_grouped_matmul
    rih.install()
    assert npu.npu_grouped_matmul is not original
    rih.uninstall()
    assert npu.npu_grouped_matmul is original


def test_switched_off_by_the_environment(rih, npu, monkeypatch, tmp_path):
    monkeypatch.setenv("RL_INSIGHT_HOOKS", "0")
    original = npu.npu_grouped_matmul
    with rih.record(tmp_path, step=1, role="r"):
        assert npu.npu_grouped_matmul is original
        layer_pass([1, 1])
    assert list(tmp_path.iterdir()) == []
