# SPDX-License-Identifier: Apache-2.0
# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
NOX := $(BIN)/nox

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py --out demo_out

# All sessions that CI runs; `make test SESSIONS="lint unit"` runs some.
SESSIONS ?=
test: $(VENV)/.ready-nox
	$(NOX) $(if $(SESSIONS),--sessions $(SESSIONS))

lint: $(VENV)/.ready-nox
	$(NOX) --sessions lint

bench: $(VENV)/.ready-nox
	$(NOX) --sessions bench

docs: $(VENV)/.ready-nox
	$(NOX) --sessions docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.ready-nox: | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "nox>=2024.4.15"
	touch $@

clean:
	rm -rf $(VENV) .nox demo_out build dist *.egg-info
