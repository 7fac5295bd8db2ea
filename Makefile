# Each target does everything a fresh machine needs: it creates .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test exhaustive cpus oldest pythons changelog check format bench zoo pocket clean

# pip shows what it fetches, and how far it is: torch alone is hundreds of megabytes, and more where it brings CUDA.
PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -c constraints.txt

# One stamp per set of dependencies: a second call finds it and starts at once.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing torch, transformers and what they need into $(VENV): once, some minutes"
	@$(PIP) -e ".[transformers]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing pytest, hypothesis, mypy, ruff and Ray into $(VENV): about 120 MB"
	@$(PIP) -q -e ".[dev]"
	@touch $@

demo: $(VENV)/.run
	$(BIN)/interpose demo

# At most ten minutes on two cores; which tests these are: tests/selection.py.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m "not exhaustive"

# All the others: every type of model, every dtype, long fuzzing, the studies.
exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive

# Tests whose numbers depend on the CPU, under every set of instructions this CPU has: about half an hour.
cpus: $(VENV)/.dev
	$(BIN)/python scripts/cpus.py

# The tests at the lowest versions that pyproject.toml allows, and on each Python there is: in environments of their own.
oldest pythons:
	$(PYTHON) -m scripts.versions $@

# CHANGELOG.md from the fragments in changelog.d.
changelog:
	$(PYTHON) -m scripts.changelog

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/transformers_cost.py
	$(BIN)/python -m benchmarks.methods

# Every model type of transformers, as docs/models.md has it: minutes.
zoo: $(VENV)/.dev
	$(BIN)/python scripts/models_page.py --check

# Trains the pocket model anew into build/pocket and evaluates it: minutes on a GPU, a night without.
pocket: $(VENV)/.dev
	$(BIN)/python -m training.train --out build/pocket
	$(BIN)/python -m training.evaluate build/pocket/model
	$(BIN)/python -m training.circuit build/pocket/model

clean:
	rm -rf $(VENV) build/environments .pytest_cache .mypy_cache .ruff_cache .hypothesis
