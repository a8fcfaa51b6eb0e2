# SPDX-License-Identifier: Apache-2.0
"""torch.save files without torch: equal to torch's own reading, and nothing is ever run."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from rl_insight_hooks.report.load.torch_zip import (
    TensorReader,
    TorchFileError,
    load,
    load_int_tensor,
)
from rl_insight_hooks.report.torch_write import int_tensor_file


def _saved(value, **kwargs):
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    torch.save(value, out, **kwargs)
    return out.getvalue()


@pytest.mark.parametrize(
    "dtype",
    [
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
        "float64",
        "float32",
        "float16",
        "bfloat16",
    ],
)
def test_every_dtype_reads_as_torch_reads_it(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    found = load(_saved(tensor))
    assert found.shape == (2, 3, 4)
    assert (found.astype(np.float64) == tensor.double().numpy()).all()


def test_strides_offsets_and_shared_storages():
    torch = pytest.importorskip("torch")
    base = torch.arange(60).reshape(6, 10)
    stored = {
        "t": base.t(),
        "slice": base[1:5:2, 3:],
        "row": base[2],
        "expand": base[0, :1].expand(4),
        "empty": base[:0],
        "scalar": base[3, 3],
    }
    found = load(_saved(stored))
    for name, tensor in stored.items():
        assert found[name].tolist() == tensor.tolist(), name


def test_plain_data_and_nesting():
    torch = pytest.importorskip("torch")
    from collections import OrderedDict

    stored = {
        "rank": 3,
        "big": 2**70,
        "x": 0.5,
        "none": None,
        "flag": True,
        "list": [1, [torch.tensor([1, 2])], "text"],
        "tuple": (1, 2, 3, 4, 5),
        "ordered": OrderedDict(a=torch.tensor(1)),
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.tensor([1.5]), requires_grad=False),
    }
    found = load(_saved(stored))
    assert found["list"][1][0].tolist() == [1, 2]
    assert found["ordered"]["a"] == 1
    assert found["parameter"].tolist() == [1.5]
    for name in ("rank", "big", "x", "none", "flag", "tuple"):
        assert found[name] == stored[name]
    assert found["size"] == (2, 3)


def test_what_we_write_torch_reads_with_weights_only(tmp_path):
    torch = pytest.importorskip("torch")
    for length in (0, 1, 255, 256, 65_535, 65_536):
        path = tmp_path / f"{length}.pt"
        path.write_bytes(int_tensor_file(np.arange(length)))
        tensor = torch.load(path, weights_only=True)
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == list(range(length))
        assert load_int_tensor(path.read_bytes()).tolist() == list(range(length))


def test_short_way_equals_the_full_parse():
    torch = pytest.importorskip("torch")
    reader = TensorReader()
    rng = np.random.default_rng(0)
    for number in range(200):
        values = rng.integers(0, 2**40, size=int(rng.integers(1, 5)) * 8)
        tensor = torch.tensor(values)
        if number % 7 == 0:
            tensor = tensor.int()
        if number % 5 == 0:
            tensor = tensor.flip(0)
        if number % 3 == 0:
            tensor = tensor[::2]
        data = _saved(tensor)
        assert reader.read(data).tolist() == tensor.tolist()


def test_short_way_refuses_what_the_full_parse_refuses():
    reader = TensorReader()
    data = int_tensor_file(np.arange(100, 164))
    assert reader.read(data)[0] == 100
    num_refused = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        try:
            full = load_int_tensor(bytes(damaged)).tolist()
        except TorchFileError:
            full = None
            num_refused += 1
        try:
            short = reader.read(bytes(damaged)).tolist()
        except TorchFileError:
            short = None
        # whatever the damage, no other numbers come out than the true ones
        assert short in (None, list(range(100, 164)))
        assert full in (None, list(range(100, 164)))
    assert num_refused > 600


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_nothing_is_ever_run(tmp_path, protocol):
    made = tmp_path / "was_here"
    pickled = pickle.dumps(_Evil(str(made)), protocol=protocol)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(TorchFileError, match="mkdir"):
        load(out.getvalue())
    assert not made.exists()
    pickle.loads(pickled)  # it does run when it is unpickled
    assert made.exists()


def test_other_classes_are_refused_by_name():
    data = _saved({"x": np.float64(1.0)})
    with pytest.raises(TorchFileError, match="numpy"):
        load(data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "0 bytes"),
        (b"PK\x03\x04", "cut off"),
        (b"hello world", "no file of torch.save"),
        (pickle.dumps([1]), "never unpickled"),
        (int_tensor_file([1, 2])[:-30], "cut off"),
    ],
)
def test_what_is_no_torch_file_is_named(data, word):
    with pytest.raises(TorchFileError, match=word):
        load_int_tensor(data)


def test_the_old_format_is_refused_by_name():
    torch = pytest.importorskip("torch")
    data = _saved(torch.tensor([1, 2]), _use_new_zipfile_serialization=False)
    with pytest.raises(TorchFileError, match="non-zip format"):
        load(data)


def test_a_compressed_zip_is_refused():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N." * 20)
    with pytest.raises(TorchFileError, match="compressed"):
        load(out.getvalue())


def test_a_huge_expanded_tensor_takes_no_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(TorchFileError, match="does not fit"):
        load(_saved(torch.zeros(1, dtype=torch.int64).expand(10**12)))


def test_float_and_container_are_no_group_list():
    torch = pytest.importorskip("torch")
    with pytest.raises(TorchFileError, match="float32"):
        load_int_tensor(_saved(torch.tensor([1.0])))
    with pytest.raises(TorchFileError, match="dict"):
        load_int_tensor(_saved({"a": torch.tensor([1])}))
