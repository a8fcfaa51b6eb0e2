# SPDX-License-Identifier: Apache-2.0
"""``torchair`` for vllm-ascend 0.11, which imports it and uses it on a device only."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types


class EmptyTorchair(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``torchair`` and everything below it: modules in which each name is an empty class."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchair":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self.name_of
        return module

    @staticmethod
    def name_of(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    def exec_module(self, module):
        pass
