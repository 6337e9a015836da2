# `make serve` and `make test` are all that a fresh machine needs; `make help` lists the rest.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
MIN_PIP := 25.1

# On a machine without an NVIDIA driver torch is pinned to the release that the CPU path is tested with.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints/cpu.txt)
# A process of tests for each core, up to four; each file is one process's. ARGS="-n 0" runs all in one.
TEST_PROCESSES := $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$(( n < 4 ? n : 4 )))
PROTOS := $(wildcard protos/octavo/v1/*.proto)
INPUTS := pyproject.toml constraints/cpu.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help install serve test lint format protos bench wheel clean

help: ## Show the targets.
	@awk -F':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed-dev ## Make .venv with everything that serving, tests and checks need.

serve: $(VENV)/.installed ## Fetch the demo model if it is absent and serve it; ARGS="--grpc-port 50052" passes flags.
	@$(BIN)/octavo models fetch demo
	@exec $(BIN)/octavo serve demo $(ARGS)

test: $(VENV)/.installed-dev ## Run all tests that need no GPU; ARGS="tests/unit -k blocks" chooses some.
	@$(BIN)/python -m pytest -m "not gpu" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev ## Run the checks of format, style, types, imports, protos and stubs.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb
	@protos/generate.sh --check

format: $(VENV)/.installed-dev ## Format the code and mend what ruff can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(VENV)/.installed-dev ## Write the stubs of the .proto files anew.
	@protos/generate.sh

bench: $(VENV)/.installed-dev ## Run the benchmarks.
	@$(BIN)/python -m benchmarks $(ARGS)

wheel: $(VENV)/.installed-dev ## Build the wheel and the source distribution into dist/.
	@rm -rf build # what an earlier build left there would go into the wheel
	@$(BIN)/python -m build $(ARGS)

clean: ## Remove what was built; models stay.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The stamps make a second `make install` a no-op; pip speaks up itself when something does not fit.
$(VENV)/.installed: $(INPUTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable . $(CONSTRAINTS)
	@touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/bin/python
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=$(MIN_PIP)"
	$(BIN)/python -m pip install --quiet --editable . --group dev $(CONSTRAINTS)
	@touch $(VENV)/.installed $@

$(VENV)/bin/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$($$python --version) ($$(command -v $$python))"; \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with the modules venv and ensurepip was found. Install one (on Debian and" >&2; \
	echo "Ubuntu: python3 and python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	exit 1
