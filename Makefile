# Two commands matter: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
CODE := $(shell find tacit -name '*.py')
NOTEBOOKS := $(patsubst docs/tutorials/%.py,build/notebooks/%.ipynb,$(wildcard docs/tutorials/*.py))

.PHONY: demo test test-slow test-gpu test-docs coverage docs lint types types-standard types-strict check clean

demo: $(READY)
	$(BIN)/tacit demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q  # two processes with one thread each

test-slow: $(READY)
	$(BIN)/pytest -q -m 'slow and not gpu'

coverage: $(READY) # the floor stands in pyproject.toml
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -q --cov --cov-report=term:skip-covered

test-gpu: # with the torch of the GPU machine, not that of .venv
	$(PYTHON) benchmarks/gpu_tests.py

gpu-%: # one call on a GPU machine of at most ten minutes: gpu-tests, gpu-steps, gpu-large, ...
	$(PYTHON) benchmarks/gpu_session.py $*

test-docs: docs $(READY) # links, anchors, public names, search and notebooks of the built site
	$(BIN)/pytest -q -n 0 -m slow tests/test_site.py

docs: $(DOCS)/.ready # the site, into site/; a warning is an error
	@$(MAKE) --no-print-directory -j2 $(NOTEBOOKS)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

build/notebooks/%.ipynb: docs/tutorials/%.py $(CODE)
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(DOCS)/bin/jupytext --quiet --to ipynb --set-kernel python3 --execute --output $@ $<

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(MAKE) --no-print-directory -j2 types-standard types-strict

types-standard: # all of tacit
	$(BIN)/pyright --warnings

types-strict: # the parts that prices and noise depend on
	$(BIN)/pyright --warnings -p pyright-strict.json

check: lint types

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS)/.ready: docs/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-r docs/requirements.txt -e '.[all]'
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) site build dist .pytest_cache .ruff_cache
