# Two commands do everything, set-up included: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

# `make test-torch TORCH=2.15.0`: the whole suite with another torch, in a venv of its own.
TORCH ?= 2.10.0
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_STAMP := $(TORCH_VENV)/.installed

.PHONY: setup demo test test-all test-cpu test-device test-native test-torch lint bench docs figures clean

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
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow' --timeout 3600

test-cpu: setup
	$(BIN)/python tests/every_cpu.py

# The suite on the simulated device of tests/device, which is built first (about a minute, then cached). With delays:
# `make test-device DELAYS=--delays=1`.
DEVICE_ROOMS := tests/device tests/tape tests/recompute tests/batches tests/profiling tests/planning tests/accumulate \
	tests/fitting tests/toolbox tests/tiling

test-device: setup
	$(BIN)/python tests/device/simulated.py
	$(BIN)/python -m pytest -n 2 --dist worksteal --device sim $(DELAYS) $(DEVICE_ROOMS)

# The rooms that record, with the native core in the place of Python's. `make test` runs a sample of them.
NATIVE_ROOMS := tests/tape tests/recompute tests/lifetimes tests/batches tests/profiling tests/accumulate tests/fitting \
	tests/tiling tests/toolbox tests/safety

test-native: setup
	$(BIN)/gradfit build-native
	GRADFIT_NATIVE=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(NATIVE_ROOMS)

test-torch: $(TORCH_STAMP)
	$(TORCH_VENV)/bin/python -m pytest -n 2 --dist worksteal

$(TORCH_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch
	$(TORCH_VENV)/bin/pip install --quiet --constraint $(TORCH_VENV)/constraints.txt --editable '.[test]'
	touch $(TORCH_STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

bench: setup
	set -e; for script in $$(grep -l __main__ benchmarks/*.py); do echo "== $$script"; $(BIN)/python $$script; done

# The site, into out/site; a warning is an error. Readable from the disk: open out/site/index.html.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

# Measures, and draws the pictures of README and the site anew.
figures: setup
	$(BIN)/python docs/figures.py

clean:
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache
