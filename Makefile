# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-all lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/gradfit demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow' --timeout 3600

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	set -e; for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(BIN)/python $$script; done

docs: setup
	$(BIN)/python docs/figures.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
