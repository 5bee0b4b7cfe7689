# The two commands: `make lab` opens the workshop, `make test` proves it. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.test-ready
HOROVOD := $(VENV)/.horovod
INSTALLING := $(VENV)/.installing
INSTALLING_TESTS := $(VENV)/.installing-tests
ASKED_FOR := $(or $(MAKECMDGOALS),lab)
REMOVE_VENV = [ ! -e $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)

# What is set for other environments must not lead the installation elsewhere, or end it.
unexport PIP_USER PIP_REQUIRE_HASHES PIP_TARGET PIP_PREFIX UV_SYSTEM_PYTHON UV_PYTHON UV_TARGET UV_PREFIX
unexport PYTHONPATH PYTHONHOME

# CPU=1 forces PyTorch's wheels for CPUs, CPU=0 the pins. Else an environment keeps to the kind that it has, and a new one
# takes what suits this machine: see tools/install.sh. Some systems set CPU to the processor's name, which means nothing here.
ifeq ($(origin CPU)$(filter 0 1,$(CPU)),command line)
$(error CPU is '$(CPU)': write CPU=1 for PyTorch's wheels for CPUs, CPU=0 for those from PyPI)
endif
ifeq ($(filter clean,$(MAKECMDGOALS)),)
FOR_CPU := $(if $(wildcard $(INSTALLING)),,$(wildcard $(VENV)/.cpu))
INSTALLED := $(wildcard $(READY))
endif
WHEELS := $(or $(filter 0 1,$(CPU)),$(if $(FOR_CPU),keep,$(if $(INSTALLED),0)))
ifneq ($(and $(INSTALLED),$(filter Linux,$(shell uname)),$(filter 0,$(MAKELEVEL)),$(filter $(if $(FOR_CPU),0,1),$(CPU))),)
$(info $(VENV) has other wheels of PyTorch than CPU=$(CPU) asks for. To change that: make clean setup CPU=$(CPU))
endif

# The stored outputs were made with the sketches and their weights, whatever this machine's user has set or downloaded.
OFFLINE := WORKSHOP_DATA= WORKSHOP_WEIGHTS= WORKSHOP_NAMES= WORKSHOP_SHARED= WORKSHOP_ROOM= DASK_SCHEDULER_ADDRESS= WORKSHOP_CACHE="$(CURDIR)/$(VENV)/cache"
COMPARE := $(OFFLINE) $(BIN)/python tests/notebooks/compare.py
# Two tests at a time: threads that spin while they wait would keep the other test's from working.
SIDE_BY_SIDE := env OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadfile

.PHONY: always lab run bench faults figures book links test test-parts style lint all-tests test-notebooks hosts test-weekly newest oldest film setup setup-test horovod pins clean

lab: setup
	$(BIN)/workshop lab

run: setup
	$(BIN)/python tools/render.py

bench: setup  # all benchmarks of the table, and the table; takes hours, fetches 12 GB; peers: pip install -e '.[peers]'
	$(BIN)/workshop bench --all

faults: hosts  # breaks the workshop in all the ways of tests/faults, and keeps what came of it for the book
	WORKSHOP_FAULTS_TABLE=benchmarks/results/cpu2-robustness.json $(BIN)/pytest -m "weekly or not weekly" tests/faults
	$(BIN)/python benchmarks/figures.py

figures: setup  # writes what was measured into README.md and docs/figures.md
	$(BIN)/python benchmarks/figures.py

book: setup-test  # the site, and in slides/ the slides with their PDF
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/book
	$(BIN)/sphinx-build -q -W --keep-going -b revealjs docs/slides build/book/slides
	@echo "The book is build/book/index.html, the slides are build/book/slides/index.html."
	@test -e build/book/slides/slides.pdf || echo "There is no slides.pdf: it needs Chromium, on Debian: apt install chromium"

links: setup-test  # asks every external address that the book names; needs the network
	$(BIN)/sphinx-build -q -c docs -b linkcheck . build/links

test:  # does the workshop work on this machine? Prints the minutes of its parts at the end, or where one failed
	@rm -f build/minutes
	@$(MAKE) --no-print-directory test-parts; code=$$?; tools/timed.sh; exit $$code

test-parts:
	@tools/timed.sh set-up $(MAKE) --no-print-directory setup-test ASKED_FOR=test
	@tools/timed.sh style $(MAKE) --no-print-directory style
	tools/timed.sh tests $(SIDE_BY_SIDE) -m smoke
	@! command -v nvidia-smi >/dev/null || tools/timed.sh "GPU tests" $(BIN)/pytest -m gpu
	tools/timed.sh "notebooks 01, 02, 04, 07 and 12" env $(COMPARE) 01 02 04 07 12

style: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

lint: style
	$(BIN)/mypy

all-tests: hosts  # but the weekly ones; three files at a time, as many wait
	$(SIDE_BY_SIDE) -n 3 -m "not weekly" --junitxml=build/tests.xml

test-notebooks: setup-test  # all of them, or ONLY="01 06"
	$(COMPARE) --side-by-side $(ONLY)

hosts: setup-test  # what tests/clusters starts for real, such as Slurm and sshd, if this user may install it
	bash tests/clusters/install.sh $(BIN)

test-weekly: hosts oldest links  # what takes longest: a bare Debian, every fault, one core, every cell twice
	$(BIN)/pytest -m weekly
	env $(OFFLINE) taskset --cpu-list 0 $(BIN)/python tests/notebooks/compare.py 01 03 04 08
	$(COMPARE) --every-cell-twice 08

# Environments of their own: the pins are not in them. A range that names a candidate of PyTorch lets uv take one.
INTO = $(BIN)/uv pip install --quiet --compile-bytecode --python build/$@
NEWEST := --upgrade --extra lab --extra test --extra clusters 'torch>=2.11rc0' 'torchvision>=0.26rc0'
newest: setup-test  # the lessons with the newest versions that the ranges allow; what changed is printed first
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/$@
	$(INTO) -r pyproject.toml $(NEWEST)
	$(INTO) --no-deps --editable . --editable ./daskrun
	@$(BIN)/uv pip freeze --quiet --python $(BIN)/python >build/$@/pinned
	@$(BIN)/uv pip freeze --quiet --python build/$@ | diff build/$@/pinned - || true
	$(OFFLINE) build/$@/bin/python tests/notebooks/compare.py --side-by-side

oldest: setup-test  # some tests with the lowest versions that the ranges of the base allow
	$(BIN)/uv venv --quiet --clear --python 3.11 build/$@
	$(INTO) --resolution lowest-direct -r pyproject.toml
	$(INTO) hypothesis pytest pytest-timeout
	$(INTO) --no-deps --editable . --editable ./daskrun
	build/$@/bin/python -m pytest -m smoke daskrun/tests $(addprefix tests/test_,classify.py cluster.py precision.py results.py train.py)

film: setup-test  # img/kill.webm, its still and img/lab.png, from a real run; needs chromium and ffmpeg
	$(BIN)/python tools/film.py

# Proves the GPU paths, on a machine with a GPU: `make -k gpu` goes on after a step that failed. Each step runs alone, too,
# and with a PyTorch that is there already: make gpu-tests GPU_PYTHON=python3.
GPU_PYTHON := $(BIN)/python
ON_GPU = PYTHONPATH="$(CURDIR):$(CURDIR)/daskrun/src:$(PYTHONPATH)" $(GPU_PYTHON)
GPU_NOTEBOOKS := $(addprefix gpu-notebook-,01 02 03 04 06 07 08 09 11 12)  # 05 needs an S3 server beside it
GPU_BENCHMARKS := $(addprefix gpu-bench-,decode inference ddp runs)
.PHONY: gpu gpu-is-there gpu-environment gpu-tests $(GPU_NOTEBOOKS) $(GPU_BENCHMARKS)
gpu: gpu-environment gpu-tests $(GPU_NOTEBOOKS) $(GPU_BENCHMARKS)

gpu-is-there: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup-test)
	@$(ON_GPU) -c "import sys, torch; torch.cuda.is_available() or sys.exit(f'PyTorch {torch.__version__} sees no GPU here')"

gpu-environment: gpu-is-there
	$(ON_GPU) tools/gpu_environment.py

gpu-tests: gpu-is-there
	$(OFFLINE) $(ON_GPU) -m pytest -p no:cacheprovider -m gpu daskrun/tests tests

$(GPU_NOTEBOOKS): gpu-notebook-%: gpu-is-there
	$(OFFLINE) $(ON_GPU) tests/notebooks/compare.py --on-gpu $*

$(GPU_BENCHMARKS): gpu-bench-%: gpu-is-there
	$(ON_GPU) benchmarks/$*.py

# An environment that was moved, lost its Python, or was interrupted while it was installed is made anew.
ifneq ($(shell tools/why_broken.sh $(VENV)),)
$(READY): always
endif

setup: $(READY)  # what the notebooks need

setup-test: $(TEST_READY)  # and what the tests and the book add

$(READY): requirements.txt pyproject.toml daskrun/pyproject.toml
	@test -x $(BIN)/pip -a -z "$$(tools/why_broken.sh $(VENV))" || \
	  $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Python 3.11 to 3.14 is needed: make $(ASKED_FOR) PYTHON=python3.12. Where there is only another one: python3 -m venv ~/uv && ~/uv/bin/pip install uv && ~/uv/bin/uv python install 3.12, then make $(ASKED_FOR) PYTHON=~/.local/bin/python3.12"; exit 1; }
	@tools/why_broken.sh $(VENV) remove
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { $(REMOVE_VENV); echo "Python cannot make a virtual environment, as it says above. Where ensurepip is missing, on Debian: apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 1; }
	@echo $$PPID >$(INSTALLING)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-user uv || \
	  { echo "uv was not installed: pip says above why. See docs/troubleshooting.md"; exit 1; }
	@tools/install.sh $(VENV) $(WHEELS)
	$(UV_INSTALL) --no-deps --editable . --editable ./daskrun
	@rm $(INSTALLING)
	@$(BIN)/workshop data sketches || echo "No sketches were drawn; notebook 01 will try again."
	@touch $@

UV_INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python

# Without dependencies, as requirements.txt has those that this file lacks. What an end before the end leaves of them, the
# next time replaces; the lessons go on without them.
$(TEST_READY): requirements-test.txt $(READY)
	@again=$$([ ! -e $(INSTALLING_TESTS) ] || echo --reinstall); touch $(INSTALLING_TESTS); \
	  $(UV_INSTALL) $$again --require-hashes --no-deps --compile-bytecode -r requirements-test.txt || \
	  { echo "What the tests and the book need was not installed: see above. The lessons go on without it: make lab"; exit 1; }
	@rm $(INSTALLING_TESTS)
	@touch $@

horovod: $(HOROVOD)

$(HOROVOD): requirements.txt tools/build_horovod.sh | $(READY)  # again after new pins: it fits one version of PyTorch
	bash tools/build_horovod.sh $(VENV)
	@touch $@

pins:  # after changing a range in pyproject.toml
	$(BIN)/python tools/write_pins.py

clean:
	$(REMOVE_VENV)
	rm -rf build *.egg-info .pytest_cache .ruff_cache
