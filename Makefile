# make run    set up and start the agent on this machine
# make test   set up and run every test that needs no large download
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The newest suitable interpreter that really runs (version managers leave shims that do not).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
# An interpreter that was asked for gets an environment of its own.
VENV ?= .venv$(if $(filter command,$(firstword $(origin PYTHON))),-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))
BIN := $(VENV)/bin
ARGS ?=
# Without .pyc files every start costs most of a second and more memory.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.made: pyproject.toml constraints.txt sidecar/__init__.py
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found; install one or name it: make PYTHON=/path/to/python3.12"; exit 64; }
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . $(EXTRA)
	@$(BIN)/python -m compileall -q sidecar
	@touch $@

$(VENV)/.made-test: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		hypothesis jsonschema pytest pytest-asyncio pytest-timeout import-linter mypy ruff types-psutil
	@touch $@

.PHONY: run
run: $(VENV)/.made ## set up and start the agent (ARGS="--server-url http://127.0.0.1:30000")
	@exec $(BIN)/sglang-sidecar serve $(ARGS)

.PHONY: test
test: $(VENV)/.made-test lint ## set up, then all tests but those with large downloads (ARGS="-k driver")
	@tests/system-packages
	$(BIN)/python -m pytest $(ARGS)

.PHONY: lint
lint: $(VENV)/.made-test ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml --no-cache

.PHONY: test-real
test-real: $(VENV)/.made-test ## with real torch and FlashInfer packages, from scratch (about 1 GB)
	$(BIN)/python -m pytest -m real tests/real $(ARGS)

# Of its own, because the tests' tools would count: structlog, for one, imports rich where it finds it.
$(VENV)-bench/.made: pyproject.toml constraints.txt $(shell find sidecar -name '*.py')
	@rm -rf $(VENV)-bench && $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	@touch $@

.PHONY: bench
bench: $(VENV)-bench/.made ## start-up time, memory, idle CPU, scrape latency; the cost of a hanging GPU
	cd bench && ../$(VENV)-bench/bin/python agent.py $(ARGS)
	cd bench && ../$(VENV)-bench/bin/python hang.py

.PHONY: docs
docs: $(VENV)/.made ## write the generated pages under docs/
	$(BIN)/python -m sidecar.catalog --write docs

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
