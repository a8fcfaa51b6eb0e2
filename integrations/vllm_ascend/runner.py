# SPDX-License-Identifier: Apache-2.0
"""Steps of the model runner: dummy runs are shut out on the device, padding rows of a step as well.

Python inside a captured graph does not run again, so both are device scalars that the host fills before a
step, on the stream that replays: ``enabled`` (in the recorder) and ``num_valid``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl_insight_hooks import guard
from rl_insight_hooks.patching import Gate, Patcher

if TYPE_CHECKING:
    import torch

    from rl_insight_hooks.recorder import Recorder

RUNNERS = (
    ("vllm_ascend.worker.model_runner_v1", "NPUModelRunner"),
    ("vllm_ascend.worker.v2.model_runner", "NPUModelRunner"),
)

_ALL = 2**62
_MIN_ROWS = 1 << 16


class StepState:
    """What the step under way says about the rows of its calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.dummy = 0  # depth of dummy runs under way
        self.hooked = False  # a runner tells the tokens of each step
        self._num_tokens = _ALL
        self._num_valid: dict[Any, torch.Tensor] = {}
        self._row_numbers: dict[Any, list[torch.Tensor]] = {}

    def begin_dummy(self) -> None:
        """A dummy run begins: nothing counts, in replayed graphs neither."""
        self.dummy += 1
        self._recorder.set_enabled(False)

    def end_dummy(self) -> None:
        """The dummy run is over."""
        self.dummy = max(0, self.dummy - 1)
        if not self.dummy:
            self._recorder.set_enabled(True)

    def prepare(self, device: torch.device) -> None:
        """Make what steps fill on ``device``, before any capture; a flag made in a dummy run is shut."""
        self._recorder.enabled_flags(device)
        if self.dummy:
            self._recorder.set_enabled(False)
        self.real_rows(0, 1, device, capturing=False)

    def begin_step(self, num_tokens: int) -> None:
        """A step of ``num_tokens`` real tokens begins; further rows of its calls are padding."""
        self._num_tokens = num_tokens
        for scalar in self._num_valid.values():
            scalar.fill_(num_tokens)

    def real_rows(
        self, first_token: int, num_rows: int, device: torch.device, capturing: bool
    ) -> torch.Tensor | None:
        """Return bool [num_rows]: row ``i`` holds token ``first_token + i`` and is one of the step's tokens.

        None where no runner tells, or nothing may be allocated now.
        """
        if not self.hooked:
            return None
        import torch

        numbers = self._row_numbers.setdefault(device, [])
        stop = first_token + num_rows
        if not numbers or numbers[-1].shape[0] < stop:
            if capturing:
                return None
            with torch.inference_mode(False), torch.no_grad():
                # older ones stay: a captured graph reads them
                numbers.append(torch.arange(max(stop, _MIN_ROWS), device=device))
                if device not in self._num_valid:
                    self._num_valid[device] = torch.full(
                        (), self._num_tokens, dtype=torch.int64, device=device
                    )
        return numbers[-1][first_token:stop] < self._num_valid[device]


def install(patcher: Patcher, steps: StepState, look_again: Callable[[], object]) -> None:
    """Hook the model runners that are imported.

    ``look_again`` is called once a model is loaded, before any graph is captured: quantisation schemes are
    imported with the model, and a method that is hooked after the capture is not in the graph.
    """
    for module_name, class_name in RUNNERS:
        runner = getattr(sys.modules.get(module_name), class_name, None)
        if not isinstance(runner, type):
            continue
        for method in ("_dummy_run", "profile_run"):
            patcher.replace(runner, method, functools.partial(_dummy, steps))
        patcher.replace(runner, "load_model", functools.partial(_load, look_again))
        if patcher.replace(runner, "execute_model", functools.partial(_execute, steps)):
            steps.hooked = True


def is_capturing(x: Any) -> bool:
    """Return True while the stream of ``x`` captures a graph."""
    if getattr(x, "is_cpu", True):
        return False
    import torch

    device_module = getattr(torch, x.device.type, None)
    ask = getattr(device_module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def _load(look_again: Callable[[], object], original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if gate.live:
            with guard.failsafe("vllm_ascend.load_model"):
                look_again()
        return result

    return load_model


def _dummy(steps: StepState, original: Any, gate: Gate) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gate.live:
            return original(self, *args, **kwargs)
        with guard.failsafe("vllm_ascend.dummy_run"):
            steps.begin_dummy()
        try:
            return original(self, *args, **kwargs)
        finally:
            with guard.failsafe("vllm_ascend.dummy_run"):
                steps.end_dummy()

    return method


def _execute(steps: StepState, original: Any, gate: Gate) -> Any:
    dummy = _dummy(steps, original, gate)

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if gate.live:
            if kwargs.get("dummy_run"):  # the second model runner
                return dummy(self, scheduler_output, *args, **kwargs)
            with guard.failsafe("vllm_ascend.execute_model"):
                num_tokens = getattr(scheduler_output, "total_num_scheduled_tokens", None)
                if isinstance(num_tokens, int):
                    steps.begin_step(num_tokens)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model
