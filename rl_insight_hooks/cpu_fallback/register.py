# SPDX-License-Identifier: Apache-2.0
"""Registers the CPU kernels: under the real operators of torch_npu, or under a stand-in of the same schemas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from rl_insight_hooks.cpu_fallback import moe_ops
from rl_insight_hooks.cpu_fallback.grouped_matmul import grouped_matmul, grouped_matmul_shapes

# Schemas of torch_npu 2.13.0; the stand-in defines them, the real package has them.
_SCHEMAS = {
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
        "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
        "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
        "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None)"
        " -> Tensor[]"
    ),
    "npu_grouped_matmul.List": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, "
        "Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "int[]? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
        "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
        "int? group_list_type=0, int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]"
    ),
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward": "(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": (
        '(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor'
    ),
    "npu_moe_token_permute": (
        "(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)"
    ),
    "npu_moe_token_unpermute": (
        "(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> Tensor"
    ),
    "npu_moe_gating_top_k_softmax": (
        "(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)"
    ),
}

# Arguments of the grouped matmul that CPU cannot honour: quantisation.
_QUANTISED = (
    "scale",
    "offset",
    "antiquant_scale",
    "antiquant_offset",
    "per_token_scale",
    "activation_input",
    "activation_quant_scale",
    "activation_quant_offset",
)

_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "npu_swiglu": moe_ops.swiglu,
    "npu_swiglu_backward": moe_ops.swiglu_backward,
    "npu_rms_norm": moe_ops.rms_norm,
    "npu_rotary_mul": moe_ops.rotary_mul,
    "npu_moe_token_permute": moe_ops.token_permute,
    "npu_moe_token_unpermute": moe_ops.token_unpermute,
    "npu_moe_gating_top_k_softmax": moe_ops.gating_top_k_softmax,
}

_kernels: torch.library.Library | None = None
_definitions: torch.library.Library | None = None
_stand_in: ModuleType | None = None


def _cpu_grouped_matmul(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], **kwargs: Any
) -> Any:
    for name in _QUANTISED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"npu_grouped_matmul on CPU knows no {name}: quantised calls need a device"
            )
    if kwargs.get("act_type"):
        raise ValueError(
            f"npu_grouped_matmul on CPU knows act_type 0 only, not {kwargs['act_type']}"
        )
    names = ("bias", "group_list", "split_item", "group_type", "group_list_type")
    return grouped_matmul(x, weight, **{name: kwargs[name] for name in names if name in kwargs})


def _meta_grouped_matmul(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], **kwargs: Any
) -> Any:
    group_list = kwargs.get("group_list")
    return grouped_matmul_shapes(
        x,
        weight,
        group_list_len=None if group_list is None else len(group_list),
        split_item=kwargs.get("split_item", 0),
        group_type=kwargs.get("group_type"),
    )


class _GroupedMatmul(torch.autograd.Function):
    """Autograd of a grouped call (group_type 0, one x): dX and dW are grouped matmuls themselves."""

    @staticmethod
    def forward(
        ctx: Any, op: Any, options: dict[str, Any], x: torch.Tensor, *weight: torch.Tensor
    ) -> Any:
        ctx.save_for_backward(x, *weight)
        ctx.op, ctx.options = op, options
        return op([x], list(weight), **options)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weight = ctx.saved_tensors
        (grad,) = grads
        options = {
            name: ctx.options[name]
            for name in ("group_list", "group_list_type")
            if name in ctx.options
        }
        turned = [w.transpose(-1, -2) for w in weight]
        dx = ctx.op([grad], turned, **options, split_item=2, group_type=0)[0]
        dw = ctx.op([x.t()], [grad], **options, split_item=3, group_type=2)[0]
        stacked = len(weight) == 1 and weight[0].dim() == 3
        parts = [dw] if stacked else list(dw.unbind(0))
        return None, None, dx, *parts


def _autograd_grouped_matmul(overload: str) -> Callable[..., Any]:
    # looked up now: hooks may stand on the packet's attribute later
    op = getattr(torch.ops.npu.npu_grouped_matmul, overload)

    def kernel(x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*x, *weight))
        grouped = (
            len(x) == 1
            and kwargs.get("group_list") is not None
            and kwargs.get("group_type") in (None, 0)
            and kwargs.get("split_item") in (2, 3)
            and kwargs.get("bias") is None
        )
        if needs_grad and grouped:
            return [_GroupedMatmul.apply(op, kwargs, x[0], *weight)]
        if needs_grad:
            return _cpu_grouped_matmul(x, weight, **kwargs)  # differentiable as it is
        with torch._C._AutoDispatchBelowAutograd():
            return op(x, weight, **kwargs)

    return kernel


def register_cpu_kernels() -> None:
    """Give the operators of the imported torch_npu (or of the stand-in) CPU kernels; twice is fine.

    Raises:
        ImportError: neither torch_npu nor the stand-in is there.
    """
    global _kernels
    if _kernels is not None:
        return
    if not hasattr(torch.ops.npu, "npu_grouped_matmul"):
        raise ImportError(
            "import torch_npu, or call install_stand_in(), before register_cpu_kernels()"
        )
    library = torch.library.Library("npu", "IMPL")
    for overload in ("default", "List"):
        name = "npu_grouped_matmul" if overload == "default" else "npu_grouped_matmul.List"
        library.impl(name, _cpu_grouped_matmul, "CPU")
        library.impl(name, _autograd_grouped_matmul(overload), "AutogradCPU")
    for name, function in _DIFFERENTIABLE.items():
        if hasattr(torch.ops.npu, name):
            library.impl(name, function, "CPU")
            library.impl(name, function, "AutogradCPU")
    _kernels = library


def unregister_cpu_kernels() -> None:
    """Take the CPU kernels out again."""
    global _kernels
    if _kernels is not None:
        _kernels._destroy()
        _kernels = None


def stand_in() -> ModuleType:
    """Return a module with torch_npu's operators on CPU, of the same schemas; it is not in sys.modules."""
    global _stand_in, _definitions
    if _stand_in is None:
        if "torch_npu" in sys.modules:
            raise ImportError(
                "torch_npu is imported: call register_cpu_kernels() instead of stand_in()"
            )
        definitions = torch.library.Library("npu", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            definitions.define(name + schema)
        definitions.impl("npu_grouped_matmul", _meta_grouped_matmul, "Meta")
        definitions.impl("npu_grouped_matmul.List", _meta_grouped_matmul, "Meta")
        for name, function in _DIFFERENTIABLE.items():
            definitions.impl(name, function, "Meta")
        _definitions = definitions
        module = ModuleType(
            "torch_npu", "Stand-in of rl_insight_hooks: the grouped-matmul family on CPU."
        )
        module.__spec__ = ModuleSpec("torch_npu", None)  # importlib.util.find_spec asks for it
        module.__dict__["__version__"] = "0+rl_insight_hooks.stand_in"
        for name in _SCHEMAS:
            if "." not in name:
                setattr(module, name, getattr(torch.ops.npu, name))
        _stand_in = module
        register_cpu_kernels()
    return _stand_in


def install_stand_in() -> ModuleType:
    """Put :func:`stand_in` into ``sys.modules`` as torch_npu, unless torch_npu is there; return torch_npu."""
    if "torch_npu" not in sys.modules:
        import wrapt

        sys.modules["torch_npu"] = module = stand_in()
        wrapt.notify_module_loaded(module)  # who waits for the import of torch_npu hears of it
    return sys.modules["torch_npu"]


def uninstall_stand_in() -> None:
    """Take the stand-in out of ``sys.modules``."""
    if _stand_in is not None and sys.modules.get("torch_npu") is _stand_in:
        del sys.modules["torch_npu"]
