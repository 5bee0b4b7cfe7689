# The two commands: `make lab` opens the workshop, `make test` proves it. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOROVOD := $(VENV)/.horovod

# `make test` compares all notebooks on one core each. `make test-long` runs them on several workers, too: some on several
# hosts, some on a bare Debian, the rest on all cores here.
ON_HOSTS := 04 06 10
ON_DEBIAN := 01 03 05
ALL = $(foreach path,$(notdir $(wildcard notebook_output/[0-9]*.ipynb)),$(firstword $(subst -, ,$(path))))

# The stored outputs were made with the sketches and their weights, whatever this machine's user has set or downloaded.
OFFLINE := WORKSHOP_DATA= WORKSHOP_WEIGHTS= WORKSHOP_NAMES= WORKSHOP_SHARED= WORKSHOP_ROOM= DASK_SCHEDULER_ADDRESS= WORKSHOP_CACHE=$(CURDIR)/$(VENV)/cache
COMPARE := $(OFFLINE) $(BIN)/python tests/notebooks/compare.py

.PHONY: lab run book links test unit test-notebooks test-clusters test-long newest gpu setup horovod pins clean

lab: setup
	$(BIN)/workshop lab

run: setup
	$(BIN)/workshop run

book: setup  # the site, and in slides/ the slides with their PDF
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/book
	$(BIN)/sphinx-build -q -W --keep-going -b revealjs docs/slides build/book/slides
	@echo "The book is build/book/index.html, the slides are build/book/slides/index.html and slides.pdf."

links: setup  # asks every external address that the book names; needs the network
	$(BIN)/sphinx-build -q -c docs -b linkcheck . build/links

test: setup
	@$(MAKE) --no-print-directory horovod || echo "The tests of Horovod are skipped; notebook 09 shows stored outputs."
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(MAKE) --no-print-directory unit
	@! command -v nvidia-smi >/dev/null || $(BIN)/pytest -m gpu
	$(COMPARE) --each-on-one-core

unit: setup  # in two halves side by side, as either leaves a core idle half of the time
	@mkdir -p build
	@$(BIN)/pytest tests/test_[a-i]*.py workshop_utils > build/first-half.log 2>&1 & first=$$!; \
	  $(BIN)/pytest tests docs/_ext --ignore-glob='tests/test_[a-i]*.py'; second=$$?; \
	  wait $$first || { cat build/first-half.log; exit 1; }; tail -n 1 build/first-half.log; exit $$second

test-notebooks: setup  # all of them, or ONLY="01 06"
	$(COMPARE) $(ONLY)

test-clusters: setup  # several hosts, SSH and Slurm on this machine; what cannot be had here is skipped with its reason
	bash tests/clusters/install.sh $(BIN)
	$(BIN)/pytest -m clusters tests/clusters

test-long: test-clusters  # what takes long or needs root
	$(BIN)/pytest -m long
	$(COMPARE) $(filter-out $(ON_HOSTS) $(ON_DEBIAN),$(ALL))

newest: setup  # the lessons with the newest versions that the ranges allow; the report is build/newest/report.md
	$(OFFLINE) $(BIN)/python tools/try_newest.py

gpu:  # proves the GPU paths, on a machine with a GPU; all steps, or STEPS="environment tests"
	@$(PYTHON) tools/prove_gpu.py $(STEPS)

setup: $(READY)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Python 3.11 to 3.14 is needed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python cannot make a virtual environment. On Debian: apt install python3-venv"; exit 1; }
	@echo "Fetching and installing packages, about 6 GB on Linux: minutes on a fast network, longer on a slow one."
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --require-hashes --compile-bytecode -r requirements.txt  # for all who share it
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --editable .
	@touch $@

horovod: $(HOROVOD)

$(HOROVOD): requirements.txt tools/build_horovod.sh | $(READY)  # again after new pins: it fits one version of PyTorch
	bash tools/build_horovod.sh $(VENV)
	@touch $@

pins:  # after changing a range in pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra test --extra book --extra clusters --extra frameworks --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-emit-index-url --no-annotate --quiet --output-file requirements.txt

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
