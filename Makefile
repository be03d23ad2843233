# make train    trains a small language model, in runs/lm; make train JAX=cuda13 on NVIDIA GPUs
# make test     quick tests: minutes
# make test-all all tests: also processes, kills, full disks, and programs as users compile them;
#               what a TPU's compiler makes of a step, which needs no TPU, but a download of its compiler
# make lint     style and types
# make docs     the documentation, in site/; dead links and warnings fail
# make clean    remove the virtual environment (runs stay)

PYTHON ?= python3
# An extra of the jax package that brings another backend: cuda13, cuda12, tpu. Empty: CPU.
JAX ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Outside of the environment's packages, because JAX looks for TPUs wherever it finds libtpu.
AOT := $(abspath $(VENV))/aot
INSTALLED := $(VENV)/installed$(if $(JAX),-$(JAX))
CONFIG ?= configs/lm.py
WORKDIR ?= runs/lm

PYTHON_FILES := decjax launch configs examples experiments tests

.PHONY: train test test-all lint docs clean

train: $(INSTALLED)
	$(BIN)/python -m launch.train --config=$(CONFIG) --workdir=$(WORKDIR)

test: $(VENV)/installed-tests
	$(BIN)/python -m pytest -m "not slow"

# Without the compiler for TPUs this fails, where the suite would skip.
test-all: $(VENV)/installed-tests $(AOT)/installed
	@PYTHONPATH=$(AOT) $(BIN)/python -c 'import libtpu'
	PYTHONPATH=$(AOT) $(BIN)/python -m pytest --dist load tests/aot_test.py
	DECJAX_TEST_COMPILE=users $(BIN)/python -m pytest -m as_users
	@# One session, so that programs are compiled once and no core waits; slow tests that ran as users compile do not run again.
	$(BIN)/python -m pytest -m "not (slow and as_users)" --ignore tests/aot_test.py

lint: $(VENV)/installed-tests
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/installed-docs
	@# Warnings count only where they are printed (not with --quiet); only a failed build shows its output.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >$(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log; exit 1; }

$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: decjax needs Python 3.11 or newer, $(PYTHON) is older or not there; use make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@# The backend's wheels must match the pinned jax.
	$(if $(JAX),$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		"jax[$(JAX)]==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))')")
	@touch $@

$(VENV)/installed-tests: $(INSTALLED) tests/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@touch $@

$(VENV)/installed-docs: $(INSTALLED) docs/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

$(AOT)/installed: $(VENV)/installed-tests tests/requirements-aot.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(AOT) -r tests/requirements-aot.txt
	@touch $@

clean:
	rm -rf $(VENV)
