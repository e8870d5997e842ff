# Everything a person or a CI runner does with this repository. `make help` lists the targets.
#
# Torch is installed first and by itself, at the version in constraints.txt, so that pip never
# resolves to another release of it: a release chosen freely may bring several gigabytes of CUDA
# libraries, which nobody needs to run the demo or the tests. To install another build, for example
# for an NVIDIA GPU or the small CPU build on Linux, name it (see pytorch.org for the indexes):
#
#   make demo TORCH="--index-url https://download.pytorch.org/whl/cu130 torch==2.13.0"
#   make demo TORCH="--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
#
# A build of the same version satisfies the constraint; for another version, change
# constraints.txt or give CONSTRAINTS=your-file.txt. After a change of either, run `make clean`.

PYTHON      ?= python3
VENV        ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH       ?= -r $(CONSTRAINTS)
BENCH       ?=
ARGS        ?=
# Tests of several processes mostly wait, so three workers pay on two cores. Files begin in the order
# that tests/conftest.py gives them, not those with most tests first: few tests of a file may take longest.
WORKERS     ?= -n 3 --dist loadfile --no-loadscope-reorder

BIN      := $(VENV)/bin
# Bytecode is written when something is imported first: a minute less, most of which nobody needs.
PIP      := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
INPUTS   := pyproject.toml $(CONSTRAINTS)
BASE     := $(VENV)/.installed-torch
RUNTIME  := $(VENV)/.installed
DEV      := $(VENV)/.installed-dev
CLUSTER  := $(VENV)/.installed-cluster
BROWSER  := $(VENV)/.installed-browser
XLA      := $(VENV)/.installed-xla
RELEASE  := $(VENV)/.installed-release
SYSTEM   := slurm-wlm munge openmpi-bin
BROWSERS := $(or $(GRISTMILL_BROWSER),chromium-headless-shell chromium google-chrome)
CODE     := src tests docs $(wildcard benchmarks)

.DEFAULT_GOAL := help
.PHONY: help demo test pytest test-browser test-cluster test-xla check docs release lock bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 21

demo: $(RUNTIME) ## train a small model on this machine, from text to report, in a few minutes
	$(BIN)/gristmill demo $(ARGS)

# Types take a minute of one core, while tests of several processes wait.
test: $(DEV) ## all checks, the documentation and all tests, side by side
	$(MAKE) --no-print-directory --jobs 2 check docs pytest

# Tests start hundreds of Python processes. Where the environment forbids bytecode, as many images
# of containers do, each would compile all that it imports anew.
pytest test-browser test-cluster test-xla: export PYTHONDONTWRITEBYTECODE =
pytest: $(DEV) ## all tests
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-browser: $(BROWSER) ## install a browser where none is (Debian, as root), then click through the pages
	$(BIN)/python -m pytest tests/browser -m browser $(ARGS)

test-cluster: $(CLUSTER) ## install Slurm and Open MPI (Debian, as root), then test on them
	$(BIN)/python -m pytest tests/cluster -m cluster $(ARGS)

test-xla: $(XLA) ## install JAX, then test runs on XLA devices, which it imitates on the CPU
	$(BIN)/python -m pytest tests/xla $(ARGS)

check: $(DEV) ## lint, formatting, types and the import floors
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEV) ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

release: $(RELEASE) ## build the wheel, try it in a new environment, list what is inside; no upload
	VENV=$(VENV) .ci/release

lock: $(RELEASE) ## write requirements.lock anew: every dependency with its version and checksum
	$(BIN)/uv pip compile pyproject.toml -c $(CONSTRAINTS) --universal --python-version 3.11 \
		--generate-hashes --quiet --custom-compile-command 'make lock' -o requirements.lock

bench: $(RUNTIME) ## run benchmarks/BENCH.py with ARGS; without BENCH, list them
ifeq ($(strip $(BENCH)),)
	@echo 'usage: make bench BENCH=name [ARGS="--help"]; there are:'
	@grep -l __main__ benchmarks/*.py | sed -E 's|benchmarks/(.*)\.py|  \1|'
else
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)
endif

clean: ## remove the virtual environment, the built pages and all caches; runs/ and tokens/ stay
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than its inputs once its packages are installed, so a second call installs
# nothing. The package itself is installed in place: edits of the source need no new install.

$(BASE): $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Gristmill needs Python \
	3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another: \
	make PYTHON=python3.12 ...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(RUNTIME): $(BASE) $(INPUTS)
	$(PIP) -c $(CONSTRAINTS) -e .
	@touch $@

$(DEV): $(BASE) $(INPUTS)
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(RUNTIME)

# JAX needs nothing that the rest does not have, so it shares the environment.
$(XLA): $(DEV)
	$(PIP) -c $(CONSTRAINTS) -e '.[xla]'
	@touch $@

$(RELEASE): $(BASE) $(INPUTS)
	$(PIP) -c $(CONSTRAINTS) -e '.[release]'
	@touch $@

# Playwright's own browsers are not needed: the tests look for one that is installed.
$(BROWSER): $(DEV)
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	command -v apt-get >/dev/null || { echo 'make test-browser needs a browser, one of $(BROWSERS): \
	install one, or name it by GRISTMILL_BROWSER'; exit 1; }; \
	test "$$(id -u)" = 0 || { echo 'make test-browser installs a browser, which needs root: run it \
	as root, in a container for example, or install one of $(BROWSERS) yourself'; exit 1; }; \
	apt-get update -q && { apt-get install -qy --no-install-recommends chromium-headless-shell \
	|| apt-get install -qy --no-install-recommends chromium; }
	$(PIP) -c $(CONSTRAINTS) -e '.[browser]'
	@touch $@

# No daemon of the system is started: the tests start their own, and stop them.
$(CLUSTER): $(DEV)
	@command -v apt-get >/dev/null || { echo 'make test-cluster installs $(SYSTEM) by apt-get, which \
	is not here; install them yourself, then run: $(BIN)/python -m pytest tests/cluster'; exit 1; }
	@test "$$(id -u)" = 0 || { echo 'make test-cluster installs $(SYSTEM), and starts a Slurm: \
	run it as root, in a container for example'; exit 1; }
	apt-get update -q
	RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qy $(SYSTEM)
	$(PIP) -c $(CONSTRAINTS) -e '.[cluster]'
	@touch $@
