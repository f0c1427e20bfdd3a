# Everything a newcomer needs; each target makes its own .venv first.
PYTHON ?= python3
VENV := .venv
# Where an environment keeps its programs.
ifeq ($(OS),Windows_NT)
PROGRAMS := Scripts
else
PROGRAMS := bin
endif
BIN := $(VENV)/$(PROGRAMS)
STAMP := $(VENV)/.installed

.PHONY: help demo test test-all lint bench docs fuzz fuzz-files kill mutants coverage test-lowest wheel-check licences clean

help:
	@echo "make demo      prune and restore the network that ships with the package"
	@echo "make test      the fast tests (set-up included)"
	@echo "make test-all  every test, those on real models and data too"
	@echo "make lint      ruff, mypy and the order of imports"
	@echo "make bench     the benchmarks, small settings"
	@echo "make fuzz      random networks, each asked for every promise (COUNT=10000 SEED=0)"
	@echo "make fuzz-files  damaged files of every kind, with limits on memory and time (COUNT=500)"
	@echo "make kill      processes killed while they save, compress, fine-tune and sweep (COUNT=25)"
	@echo "make mutants   small changes to the mathematics that some test must notice (COUNT=150)"
	@echo "make coverage  the fast tests with the lines they run counted, 92 % at least"
	@echo "make test-lowest  the fast tests on the lowest torch and numpy that are supported"
	@echo "make wheel-check  the built wheel in an empty environment, and lbyl demo there"
	@echo "make licences  of everything that installing lbyl brings along"
	@echo "make docs      the documentation site, warnings are errors"

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/lbyl demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: COUNT ?= 10000
fuzz: SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python scripts/fuzz.py --count $(COUNT) --first $(SEED)

fuzz-files: COUNT ?= 500
fuzz-files: SEED ?= 0
fuzz-files: $(STAMP)
	$(BIN)/python scripts/fuzz_files.py --count $(COUNT) --seed $(SEED)

kill: COUNT ?= 25
kill: SEED ?= 0
kill: $(STAMP)
	$(BIN)/python scripts/kill.py --count $(COUNT) --seed $(SEED)

mutants: COUNT ?= 150
mutants: SEED ?= 0
mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py --count $(COUNT) --seed $(SEED)

coverage: $(STAMP)
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing:skip-covered

LOWEST := .venv-lowest
test-lowest:
	test -x $(LOWEST)/$(PROGRAMS)/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/$(PROGRAMS)/python -m pip install --quiet --disable-pip-version-check \
		--constraint lowest.txt --editable ".[demo,report,vision]" pytest pytest-timeout \
		pytest-xdist hypothesis
	$(LOWEST)/$(PROGRAMS)/python -m pytest -n 2 $(TESTS)

FRESH := .venv-wheel
wheel-check:
	rm -rf $(FRESH) dist
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/$(PROGRAMS)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(FRESH)/$(PROGRAMS)/python -m pip install --quiet "$$(ls dist/lbyl-*.whl)[demo]"
	cd $(FRESH) && $(PROGRAMS)/lbyl demo
	rm -rf $(FRESH)

licences: $(STAMP)
	$(BIN)/python scripts/licences.py --check

bench: $(STAMP)
	$(BIN)/python -m benchmarks.lenet_fashionmnist

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-lowest .venv-wheel site dist build
