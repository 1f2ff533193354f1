# `make demo` and `make test` need nothing but Debian and Python 3.11: both make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Processes that share the tests: one more than there are cores, since one mostly waits for the Slurm of tests/lab.
JOBS = $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))

.PHONY: demo test test-long lint bench clean

demo: $(INSTALLED)
	$(BIN)/hpc-det experiment create conf/experiment/digits.yaml docs/examples/digits --cluster local --follow

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m long

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m tests.bench

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
