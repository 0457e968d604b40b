# Everything a newcomer needs: `make demo` and `make test`. Both install what they need into .venv, once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SLOW := slow or airflow or postgres or browser or ray
# The fast tests run in so many processes.
JOBS ?= 4
# The slow ones: every second process runs what trains and needs the cores, the others what mostly waits
# (tests/conftest.py).
SYSTEM_JOBS ?= 4
# Those that take many minutes mostly wait, for workers that come, leave and die.
SOAK_JOBS ?= 4

# Byte code is cached on purpose: importing torch and Airflow without it takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Say which with: make PYTHON=python3.12")'
	@echo "Installing the locked requirements into $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off -r requirements/lock.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: install
install: $(STAMP) ## install into .venv

.PHONY: demo
demo: $(STAMP) ## fine-tune BERT under deadlines: a DAG, two days, on this machine
	@$(BIN)/python dags/demo.py

.PHONY: demo-cluster
demo-cluster: $(STAMP) ## the same on a Ray cluster of two nodes; a node is killed, and the service's leader
	@$(BIN)/python dags/demo.py --cluster

.PHONY: test
test: $(STAMP) ## the fast tests
	$(BIN)/pytest -m "not ($(SLOW) or soak or gpu)" -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

.PHONY: system
system: $(STAMP) ## the slow tests: PostgreSQL, real Airflow components, many kills
	$(BIN)/pytest -m "($(SLOW)) and not soak and not gpu" -n $(SYSTEM_JOBS) --dist loadscope --no-loadscope-reorder --timeout=1200 --durations=30 --durations-min=10 $(PYTEST_ARGS)

.PHONY: soak
soak: $(STAMP) ## the tests that take many minutes: more than an hour
	$(BIN)/pytest -m soak -n $(SOAK_JOBS) --dist loadgroup --timeout=7200 $(PYTEST_ARGS)

GPU_PYTHON ?= $(BIN)/python

.PHONY: gpu
gpu: $(STAMP) ## the tests on a GPU: make gpu GPU_PYTHON=<a python whose torch has CUDA>
	$(GPU_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tests:. $(BIN)/mypy --config-file= --ignore-missing-imports --follow-imports=silent benchmarks/*.py

.PHONY: docs
docs: $(STAMP) ## build the documentation into build/docs; a warning is an error
	$(BIN)/python -m sphinx -W -n -q -b html docs build/docs
	@echo "Open build/docs/index.html"

.PHONY: reference
reference: $(STAMP) ## write the generated parts of docs/reference anew, and what Airflow's parser knows of the commands
	$(BIN)/python docs/generate.py

# Each as benchmarks/results/ names it, so that its tables come out again.
BENCHES := $(sort $(wildcard benchmarks/bench_*.py)) "benchmarks/bench_policies.py --full" "benchmarks/bench_rescale.py --model base --changes 1-2"

.PHONY: bench
bench: $(STAMP) ## measure, and write benchmarks/results/
	@set -e; for command in $(BENCHES); do echo "== $$command"; $(BIN)/python $$command --write; done
	@$(BIN)/python benchmarks/chart.py

.PHONY: lock
lock: $(STAMP) ## resolve the requirements anew
	@requirements/lock.sh

.PHONY: pictures
pictures: $(STAMP) ## the pictures of the page in README and docs; needs Chromium
	$(BIN)/python docs/pictures.py

.PHONY: wheel
wheel: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist .

.PHONY: clean
clean: ## remove the environment, caches and the demo's output
	rm -rf $(VENV) .cache build dist demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
