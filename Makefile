# make train    the main job, in runs/lm       make train JAX=cuda13 on NVIDIA GPUs
# make test     what a change usually breaks: minutes
# make test-all the other tests: processes, kills, full disks, programs as users compile them, and from a warm compilation cache;
#               what a TPU's compiler makes of a step, which needs no TPU, but a download of its compiler
# make lint     style and types
# make docs     the documentation, in site/; dead links and warnings fail
# make clean    remove the virtual environment (runs stay)

PYTHON ?= python3
# An extra of the jax package that brings another backend: cuda13, cuda12, tpu. Empty: CPU.
JAX ?=
VENV ?= .venv
BIN := $(VENV)/bin
# Beside the environment, not in it: wherever JAX finds libtpu it looks for TPUs.
AOT := $(abspath $(VENV))/aot
INSTALLED := $(VENV)/installed$(if $(JAX),-$(JAX))
CONFIG ?= configs/lm.py
WORKDIR ?= runs/lm

# Trajectories, of which the suite's own quick compilation could hide something: all their tests, slow ones too, run as
# users compile; and those whose many collectives could meet in another order when their programs come from the compilation cache.
AS_USERS := $(addprefix tests/,$(addsuffix _test.py,engine pipeline_train train))
FROM_CACHE := $(addprefix tests/,$(addsuffix _test.py,engine pipeline_train))
# Files of few long tests that share nothing: one after the other they would leave a core idle.
APART := tests/audit_test.py tests/warm_cache_test.py
PYTHON_FILES := decjax launch configs experiments tests
KEPT := $(abspath $(VENV))/compiled

.PHONY: train test test-all lint docs clean

train: $(INSTALLED)
	$(BIN)/python -m launch.train --config=$(CONFIG) --workdir=$(WORKDIR)

test: $(VENV)/installed-tests
	$(BIN)/python -m pytest -m "not slow"

# Without the compiler for TPUs this fails, where the suite would skip.
test-all: $(VENV)/installed-tests $(AOT)/installed
	@PYTHONPATH=$(AOT) $(BIN)/python -c 'import libtpu'
	PYTHONPATH=$(AOT) $(BIN)/python -m pytest --dist load tests/aot_test.py
	$(BIN)/python -m pytest -m slow --dist load $(APART)
	$(BIN)/python -m pytest -m slow $(addprefix --ignore ,tests/aot_test.py $(APART) $(AS_USERS))
	rm -rf $(KEPT)
	DECJAX_TEST_COMPILE=users DECJAX_TEST_CACHE=$(KEPT) $(BIN)/python -m pytest $(AS_USERS)
	DECJAX_TEST_COMPILE=users DECJAX_TEST_CACHE=$(KEPT) $(BIN)/python -m pytest $(FROM_CACHE) -k "not reducers_average or fused"
	rm -rf $(KEPT)

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
