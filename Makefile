# make bench      the tour, into reports/          make test       lint, types, tests
# make test-gpu   the CUDA tests, as installed     make clean      remove what was built, but not the environment
#
# bench and test make their environment first, once, and again when what it is made from changes.
# PYTHON is the interpreter to begin with, VENV where the environment lies, WORKERS how many processes run the tests.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

.PHONY: bench test lint types tests test-gpu clean
.DEFAULT_GOAL := test

bench: $(VENV)/.made
	mkdir -p reports
	"$(VENV)/bin/attn-bench" --output reports/tour.md --output reports/tour.json

test: lint types tests

lint: $(VENV)/.made
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .

types: $(VENV)/.made
	"$(VENV)/bin/mypy"

tests: $(VENV)/.made
	"$(VENV)/bin/python" -m pytest -n $(WORKERS) --dist worksteal

# tests/checkpoints is left out: files are read alike on every device, by packages that a GPU machine may not have.
test-gpu:
	$(PYTHON) -c "import sys, torch; torch.cuda.is_available() or sys.exit('no CUDA device for torch ' + torch.__version__)"
	$(PYTHON) -m pytest -m cuda --ignore tests/checkpoints

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find attn_variants cache bench tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Python 3.11 or newer is needed; name one with PYTHON=')"
	$(PYTHON) -m venv "$(VENV)"
	"$(VENV)/bin/python" -m pip install --constraint constraints.txt setuptools
	"$(VENV)/bin/python" -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch "$@"
