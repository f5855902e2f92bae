# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SPHINX := $(VENV)/.sphinx
BUILD  := $(BIN)/python -m sphinx -W --keep-going -q

.PHONY: demo test test-all coverage parity versions minimal lint docs docs-links clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Many tests start processes of their own, which wait for each other: four at a time keep two cores at work.
test: $(READY)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -m "not slow" -p tests.fork_workers --workers 4

test-all: $(READY)
	AUTOSYNC_ALL_TESTS=1 $(BIN)/python -m pytest -q

# The tests of `make test`, then a table of the share of lines that ran in each file.
coverage: $(READY)
	rm -rf build/coverage
	mkdir -p build/coverage
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m coverage run -m pytest -q -m "not slow" -p tests.fork_workers --workers 4
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --sort=cover

# Pairs of jobs under DDP and under AutoSync, with a table of how they ended.
parity: $(READY)
	$(BIN)/python -m tests.parity

# A short selection of tests on each supported Python, and with the lowest versions of all packages.
versions:
	$(PYTHON) tests/versions.py

# A job in a new environment with the package alone, without extras.
minimal:
	$(PYTHON) tests/versions.py 3.11-minimal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in build/docs/index.html. A warning, such as a link that leads nowhere, is an error.
docs: $(SPHINX)
	$(BUILD) -b html -d build/doctrees docs build/docs

# Links to other sites; needs the network.
docs-links: $(SPHINX)
	$(BUILD) -b linkcheck -d build/doctrees docs build/links

$(SPHINX): $(READY) pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# torch comes first and alone, so that the pinned build is there before anything else asks for it. The replay is compiled
# here, so that neither the demo nor the tests have to wait for it.
$(READY): pyproject.toml constraints.txt
	@echo "installing into $(VENV); this takes some minutes"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'from lightning_autosync.replay import warm_up; warm_up()'
	touch $@

clean:
	rm -rf $(VENV) .versions build dist docs/generated *.egg-info .pytest_cache .mypy_cache .ruff_cache
