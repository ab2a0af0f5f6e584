# `make demo` and `make test` do all the set-up; the second time they are fast.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per process is fastest for these sizes, and repeatable.
export OMP_NUM_THREADS ?= 1
# Tests of real processes go one after the other: several federations at once are slow on a few cores, and miss deadlines.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
TOGETHER := $(PYTEST) -n $(WORKERS)

.PHONY: demo test test-all test-long browser check bench docs tables sbom lock clean

demo: $(VENV)/.user
	$(BIN)/fedvlm demo

test: $(VENV)/.dev
	$(TOGETHER) -m 'not slow and not long and not deployed'
	$(PYTEST) -m 'deployed and not slow and not long'

# A test with kills or real processes can lose a race on a busy machine: it is tried once more, and the closing line says so.
test-all: $(VENV)/.dev browser
	$(TOGETHER) -m 'not long and not deployed' --reruns 1 --cov=fedvlm --cov-report=
	$(PYTEST) -m 'deployed and not long' --reruns 1 --cov=fedvlm --cov-append --cov-report=term:skip-covered

test-long: $(VENV)/.dev
	$(PYTEST) -m long

# The page of a run is tested in a real browser; Debian's, where it is missing and we may install it.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver; } \
	|| echo "no chromium: install chromium and chromium-driver; without them the tests of the page are skipped"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Warnings (a link to nowhere is one) are errors; nothing asks a network.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs build/docs
	@echo "the site is in build/docs/index.html"

# Runs the experiments whose tables are on the pages, and writes the tables again; minutes to an hour.
tables: $(VENV)/.dev
	$(BIN)/python -m tools.tables

# Figures go to benchmarks/results.json, and from there to docs/papers/benchmarks.md; QUICK=1: ratios only.
bench: $(VENV)/.dev
	$(BIN)/python -m tools.bench $(if $(QUICK),--quick)

# What is installed, for those who must list it: CycloneDX, in sbom.json.
sbom: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c packaging/constraints.txt cyclonedx-bom
	$(BIN)/python -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

# Hashes for servers and sites, and the licences of all that is brought; needs a package index.
lock: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c packaging/constraints.txt uv
	$(BIN)/python tools/lock.py
	$(BIN)/python tools/licences.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "fedvlm needs Python 3.11 to 3.13, this is " + sys.version.split()[0] + "; call: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: $(BIN)/python pyproject.toml packaging/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c packaging/constraints.txt -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml packaging/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c packaging/constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.user

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
