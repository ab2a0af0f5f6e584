# `make demo` and `make test` create the environment on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per process is fastest for these sizes, and reproducible.
export OMP_NUM_THREADS ?= 1
# Tests that start real processes run one after another: several federations at once miss deadlines on a few cores.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
PARALLEL_PYTEST := $(PYTEST) -n $(WORKERS)

.PHONY: demo test test-all test-encoders test-long browser tools check bench docs tables sbom lock clean

demo: $(VENV)/.user
	$(BIN)/fedvlm demo

test: $(VENV)/.dev
	$(PARALLEL_PYTEST) -m 'not slow and not long and not deployed'
	$(PYTEST) -m 'deployed and not slow and not long'

# Tests with kills or real processes can time out on a busy machine: they are retried once, and pytest reports the retry.
test-all: $(VENV)/.dev browser tools page-tools
	$(PARALLEL_PYTEST) -m 'not long and not deployed' --reruns 1 --cov=fedvlm --cov-report=
	$(PYTEST) -m 'deployed and not long' --reruns 1 --cov=fedvlm --cov-append --cov-report=term:skip-covered

# open_clip and timm need torchvision, which has no build for the CPU-only torch of this environment: they get an
# environment of their own, which sees the packages of this one.
test-encoders: $(VENV)/.dev
	$(BIN)/python -m venv $(VENV)/encoders
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(VENV)/encoders/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	$(VENV)/encoders/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0 open_clip_torch==3.3.0 timm==1.0.31 ftfy wcwidth regex
	PYTHONPATH=$(CURDIR)/src $(VENV)/encoders/bin/python -m pytest tests/encoders/test_open_clip_timm.py

test-long: $(VENV)/.dev
	$(PYTEST) -m long

# The report page is tested in a real browser: install Debian's if it is missing and we are root.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver; } \
	|| echo "no chromium: install chromium and chromium-driver; without them the tests of the page are skipped"

# Programs that check the live page in tests; without npm or a network those tests are skipped.
page-tools: build/page-tools/.done
build/page-tools/.done: Makefile
	@command -v npm >/dev/null && npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/page-tools \
	axe-core@4.14.0 html-validate@10.9.0 && touch $@ \
	|| echo "no npm, or no network: the checks of the live page by html-validate and axe are skipped"

# Metrics and proxies are tested with the real programs; haproxy is in /usr/sbin.
tools:
	@PATH=$$PATH:/usr/sbin; command -v promtool >/dev/null && command -v tinyproxy >/dev/null && command -v haproxy >/dev/null \
	|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus tinyproxy-bin haproxy; } \
	|| echo "no promtool, tinyproxy or haproxy: without them their tests are skipped"

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Warnings, such as broken links, are errors. No network is needed.
docs: $(VENV)/.dev
	$(BIN)/python -m tools.prose
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs build/docs
	@echo "documentation: build/docs/index.html"

# Run the experiments whose tables are in the docs and write the tables (minutes to an hour).
tables: $(VENV)/.dev
	$(BIN)/python -m tools.tables

# Write benchmarks/results.json and docs/papers/benchmarks.md; QUICK=1 measures ratios only.
bench: $(VENV)/.dev
	$(BIN)/python -m tools.bench $(if $(QUICK),--quick)

# List all installed packages as CycloneDX in sbom.json.
sbom: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cyclonedx-bom
	$(BIN)/python -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

# Write the lock file with hashes for servers and sites, and the page of licences; needs a package index.
lock: $(VENV)/.dev test-encoders
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/python tools/lock.py
	$(VENV)/encoders/bin/python tools/licences.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "fedvlm needs Python 3.11 to 3.13, this is " + sys.version.split()[0] + "; call: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.user

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
