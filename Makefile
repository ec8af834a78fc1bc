# make demo       a 131,072-token text, one hidden fact, one question   (ARGS="--context 32768 --depth 0.3")
# make serve      the bundled model over the OpenAI API on port 8000    (ARGS="--port 9000")
# make test       the tests, without the minutes-long ones              (ARGS="-k scheduler")
# make test-all   the tests, with them
# make bench      a quick look at kernels and prefill on this machine   (ARGS="--plot roofline.png" for the first)
# make lint       ruff, mypy --strict, import floors
# make clean      removes the virtual environment and caches
#
# The virtual environment is made on first use. PYTHON names the interpreter, JOBS the test processes.

PYTHON ?= python3
JOBS   ?= 2
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# Each test process computes on one thread: JOBS processes share the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(JOBS)

# What an installation is made from: it holds compiled kernels, so a change of theirs installs anew.
BUILT  := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: help demo serve test test-all bench lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^Each test process/,$$d'

demo: $(VENV)/.run
	@$(BIN)/longfill demo $(ARGS)

serve: $(VENV)/.run
	@$(BIN)/longfill serve $(ARGS)

test: $(VENV)/.dev
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev
	@$(PYTEST) $(ARGS)

bench: $(VENV)/.dev
	@$(BIN)/longfill bench kernels --quick --repeats 3 $(ARGS)
	@$(BIN)/longfill bench prefill --preset toy --lengths 512,1024

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache

# The stamps make a second `make demo` or `make test` start at once.
$(VENV)/.run: $(BUILT) | $(BIN)/python
	@echo "installing longfill into $(VENV) (minutes the first time: PyTorch is large)"
	@$(PIP) -e '.[server]'
	@touch $@

$(VENV)/.dev: $(BUILT) | $(BIN)/python
	@echo "installing longfill and its development tools into $(VENV) (minutes the first time: PyTorch is large)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "longfill needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
