# The two commands: `make lab` opens the workshop, `make test` proves it. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOROVOD := $(VENV)/.horovod
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/sanitize.cfg --nbval-cell-timeout 180

# The notebook that takes longest, which `make test-long` compares, and the copies of all others or of all but SKIP.
LONGEST := 09
COPIES = $(patsubst notebook_output/%,.nbval/%,$(filter-out notebook_output/$(SKIP)-%,$(wildcard notebook_output/*.ipynb)))

# The stored outputs were made with the sketches and their weights, whatever this machine's user has set or downloaded.
OFFLINE := WORKSHOP_DATA= WORKSHOP_WEIGHTS= WORKSHOP_NAMES= DASK_SCHEDULER_ADDRESS= WORKSHOP_CACHE=$(CURDIR)/$(VENV)/cache

.PHONY: lab run test test-notebooks test-long gpu setup horovod pins clean

lab: setup
	$(BIN)/workshop lab

run: setup
	$(BIN)/workshop run

test: setup
	@$(MAKE) --no-print-directory horovod || echo "The tests of Horovod are skipped; notebook 09 shows stored outputs."
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest
	@! command -v nvidia-smi >/dev/null || $(BIN)/pytest -m gpu
	@$(MAKE) --no-print-directory test-notebooks SKIP=$(LONGEST)

test-notebooks: setup  # all of them, or ONLY="01 06"
	$(BIN)/python tests/notebooks/with_stubs.py
	$(OFFLINE) $(BIN)/pytest $(NBVAL) $(or $(ONLY:%=.nbval/%-*.ipynb),$(COPIES))

test-long: setup  # what takes long or needs root
	$(BIN)/pytest -m long
	@$(MAKE) --no-print-directory test-notebooks ONLY=$(LONGEST)

gpu:  # proves the GPU paths, on a machine with a GPU; all steps, or STEPS="environment tests"
	@$(PYTHON) tools/prove_gpu.py $(STEPS)

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Python 3.11 to 3.14 is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python cannot make a virtual environment. On Debian: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --require-hashes -r requirements.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $@

horovod: $(HOROVOD)

$(HOROVOD): requirements.txt tools/build_horovod.sh | $(READY)  # again after new pins: it fits one version of PyTorch
	bash tools/build_horovod.sh $(VENV)
	@touch $@

pins:  # after changing a range in pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra test --extra frameworks --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-emit-index-url --no-annotate --quiet --output-file requirements.txt

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
