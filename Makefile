# Everything a person or CI runs. `make` alone lists the targets.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.9.0

# The oldest Triton that safetune supports, in its own environment.
OLDEST_VENV   ?= .venv36
OLDEST_TRITON ?= triton==3.6.0

# Three test processes, one file to each at a time: no two tests share a store, a compile cache or a
# child process. Three on two cores, as a test waits for other processes a quarter of its time. Not
# `auto`: every test process imports torch, and a machine may have 128 cores.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

DEMO ?= $(VENV)/bin/python docs/examples/demo.py

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Else each of the many processes of a run compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: env
env: $(VENV)/.made  ## Create the environment in .venv, once

.PHONY: demo
demo: env  ## Tune a few kernels, one of which crashes and one of which hangs, and reuse the choices
	$(DEMO)

.PHONY: test
test: env  ## Run the tests, with kernels in Triton's interpreter
	TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

.PHONY: test-full
test-full: env  ## Run all tests, also those marked full: about 18 minutes
	SAFETUNE_TEST_FULL=1 TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# `make test-tenth TENTH=3`; CI takes the digit from the commit.
.PHONY: test-tenth
test-tenth: env  ## Run a tenth of the tests marked full, TENTH=0 to 9
	$(if $(TENTH),,$(error which tenth? make test-tenth TENTH=0, or another digit))
	SAFETUNE_TEST_TENTH=$(TENTH) TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest -m full $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: env  ## Run the tests that need a GPU, one at a time
	$(VENV)/bin/python -m pytest -m gpu

.PHONY: faults
faults: env  ## Run every named fault and print the table; fails if a row fails or has no test
	$(VENV)/bin/python tests/faults/table.py $(FAULTS_ARGS)

.PHONY: store-faults
store-faults: env  ## Cause every fault of the store many times, and count lost rows
	TRITON_INTERPRET=1 $(VENV)/bin/python tests/store/local/faults/table.py $(STORE_FAULTS_ARGS)

# FUZZ_SEED=n FUZZ_LAUNCHES=m repeats a run; a failure prints the FUZZ_CASE that shows it.
.PHONY: fuzz
fuzz: env  ## Compare 100,000 random launches, hooks and changes with stock Triton's
	TRITON_INTERPRET=1 $(VENV)/bin/python -m tests.fuzz --jobs 2 $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) \
	    $(if $(FUZZ_LAUNCHES),--launches $(FUZZ_LAUNCHES)) $(if $(FUZZ_MODE),--mode $(FUZZ_MODE)) \
	    $(if $(FUZZ_CASE),--case '$(FUZZ_CASE)') $(FUZZ_ARGS)

.PHONY: ownership
ownership: env  ## Check which program writes each element of the norms, for every case of statement C6
	SAFETUNE_TEST_FULL=1 TRITON_INTERPRET=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/verify/test_shipped_kernels.py

.PHONY: judge
judge: env  ## Plant faults in the results of configs, and write what the judge sees to the docs
	TRITON_INTERPRET=1 $(VENV)/bin/python -m tests.tuning.planted docs/contracts/judge.md

.PHONY: sanitize
sanitize: env  ## Run the norm kernels under compute-sanitizer: out of bounds, races
	$(VENV)/bin/python benchmarks/sanitize.py $(SANITIZE_ARGS)

.PHONY: soak
soak: env  ## Tune 300 times in one process, a third of the configs faulty, and look for leaks
	$(VENV)/bin/python benchmarks/soak.py $(SOAK_ARGS)

.PHONY: test-internals
test-internals: $(OLDEST_VENV)/.made  ## Run the tests that depend on Triton's internals, on the oldest Triton
	TRITON_INTERPRET=1 $(OLDEST_VENV)/bin/python -m pytest -m internals $(PYTEST_ARGS)

# mypy cannot see through an editable install's package-dir, so it gets the packages as installed.
.PHONY: lint
lint: env  ## Check style, formatting, types, layers and the length of functions; count lines
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python tests/lint_structure.py
	$(VENV)/bin/python -m pytest -q tests/test_layering.py
	rm -rf build/types && mkdir -p build/types
	cp -R safetune build/types/ && cp -R kernels cache build/types/safetune/
	cd build/types && $(abspath $(VENV))/bin/mypy --config-file ../../pyproject.toml

.PHONY: docs
docs: env  ## Build the pages under docs/ as a site, in build/site, and count their words
	$(VENV)/bin/python -m sphinx -q -W -b html docs build/site
	@wc -w README.md CHANGELOG.md CONTRIBUTING.md docs/*.md docs/contracts/*.md | sort -n
	@echo "open build/site/index.html"

.PHONY: release
release: env  ## Set VERSION, date the changelog, build wheel and sdist, commit and tag
	$(VENV)/bin/python .ci/release.py $(VERSION)

.PHONY: session
session: env  ## Draw the terminal session that README shows, from a real run
	TRITON_INTERPRET=1 $(VENV)/bin/python benchmarks/session.py

.PHONY: bench
bench: env  ## Run the benchmarks that need a GPU; a second run continues where the last ended
	PYTHON=$(abspath $(VENV))/bin/python benchmarks/run_on_gpu.sh bench

.PHONY: figures
figures: env  ## Write the tables and draw the figures of README and docs from the committed results
	$(VENV)/bin/python -m pip install --quiet 'matplotlib>=3.8'
	$(VENV)/bin/python benchmarks/figures.py
	$(VENV)/bin/python benchmarks/pages.py

# BARS='--device NAME' looks at another device's results.
.PHONY: bars
bars: env  ## Compare results with their bars and aims; GROUP=tuning for one group
	$(VENV)/bin/python benchmarks/bars.py $(GROUP) $(BARS)

.PHONY: clean
clean:  ## Remove the environments and build files
	rm -rf .venv .venv36 build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Torch comes first, so that the Triton it asks for does not win. The last line puts Triton back
# where torch's own pin replaced it while the rest was resolved; elsewhere it does nothing.
define make-environment
	@$(PYTHON) -c 'import sys; sys.exit("safetune needs Python 3.10 or newer: make PYTHON=...") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet '$(TORCH)'
	$(@D)/bin/python -m pip install --quiet '$(1)'
	$(@D)/bin/python -m pip install --quiet --editable '.[dev]'
	$(@D)/bin/python -m pip install --quiet --no-deps '$(1)'
	touch $@
endef

$(VENV)/.made: pyproject.toml
	$(call make-environment,$(TRITON))

$(OLDEST_VENV)/.made: pyproject.toml
	$(call make-environment,$(OLDEST_TRITON))
