# SPDX-License-Identifier: Apache-2.0
"""What the routers really chose: forward hooks on the gates, counted by a plain loop."""

from __future__ import annotations

import contextlib

import torch
from tiny_model import TOP_K


class RouterTruth:
    def __init__(self, model):
        self.counts = {}
        self._stage = None
        self._in_backward = False
        gates = [m for name, m in model.named_modules() if name.endswith(".gate")]
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(self._hook(layer))
        backward = torch.Tensor.backward

        def watched(tensor, *args, **kwargs):
            self._in_backward = True
            try:
                return backward(tensor, *args, **kwargs)
            finally:
                self._in_backward = False

        torch.Tensor.backward = watched

    def _hook(self, layer):
        def count(gate, args, output):
            if self._stage is None:
                return
            if torch.is_tensor(output):  # transformers 4: the gate is a Linear that gives logits
                chosen = output.float().softmax(-1).topk(TOP_K, dim=-1).indices
            else:
                _, _, chosen = output
            phase = "recompute" if self._in_backward else "forward"
            row = self.counts.setdefault((*self._stage, layer, phase), {})
            for token in chosen.tolist():
                for expert in token:
                    row[expert] = row.get(expert, 0) + 1

        return count

    @contextlib.contextmanager
    def stage(self, step, role):
        self._stage = (step, role)
        yield
        self._stage = None

    def as_json(self):
        return [[*key, sorted(row.items())] for key, row in self.counts.items()]
