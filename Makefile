# `make demo` and `make test` need nothing but Debian and Python 3.11: both make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests of what a machine has one of run one after the other. The rest is shared by as many processes as there are cores.
ONE_BY_ONE := slurm or gpu
# `make chaos` runs their tests of random examples with more of them, and others each time.
FUZZED := tests/schedulers/test_odd_answers.py tests/store/test_damage.py
WHICH = not long and not chaos
# Without any of these marks a test starts no process: see tests/tiers.py.
UNIT = not integration and not slurm and not gpu and $(WHICH)
CORES = $(shell nproc)
# Tests wait for their processes part of the time.
JOBS = $(shell expr $(CORES) + 1)
# The processes of tests start faster from what the ones before them have compiled, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-unit test-one-by-one test-the-rest test-long test-slurm-as-user chaos lint docs pictures bench clean

demo: $(INSTALLED)
	$(BIN)/hpc-det experiment create conf/experiment/digits.yaml docs/examples/digits --cluster local --follow

test: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=3 --output-sync=target lint test-one-by-one test-the-rest

# In less than a minute on two cores.
test-unit: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(UNIT)" --numprocesses $(CORES) --dist worksteal

# It takes about an hour on two cores, and shows each test as it ends.
test-long: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs=2 test-one-by-one test-the-rest WHICH=long SHOWN=--verbose

test-one-by-one: $(INSTALLED)
	$(BIN)/python -m pytest $(SHOWN) -m "$(WHICH) and ($(ONE_BY_ONE))"

test-the-rest: $(INSTALLED)
	$(BIN)/python -m pytest $(SHOWN) -m "$(WHICH) and not ($(ONE_BY_ONE))" --numprocesses $(JOBS) --dist worksteal

# The same tests of the lab as an ordinary user, on a login host whose default route does not lead to the nodes.
test-slurm-as-user: $(INSTALLED)
	$(BIN)/python -m tests.labs.as_user $(BIN)/python -m pytest -m "slurm and not long and not chaos"

chaos: $(INSTALLED)
	$(BIN)/python -m pytest tests/chaos $(FUZZED) $(SHOWN) -m chaos --numprocesses $(CORES) --dist loadgroup

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/docs. A broken link, a page outside the navigation or any other warning is an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open build/docs/index.html. Its search needs a web server:"
	@echo "python3 -m http.server --bind 127.0.0.1 --directory build/docs"
	@for kind in tutorials how-to explanation reference; do \
	    echo "$$kind: $$(find docs/$$kind -name '*.md' -exec cat {} + | wc -w) words"; \
	done

# docs/images, from a real run on the Slurm of tests/labs: as root on Debian, with its package chromium. Two minutes.
pictures: $(INSTALLED)
	$(BIN)/python -m tests.docs.pictures

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m tests.benchmarks

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV). With torch's CUDA build, which PyPI has for Linux, pip downloads about 3 GB and"
	@echo "installs 5.3 GB; with a CPU build 0.5 GB and 1.5 GB: see \"Install\" in README.md."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
