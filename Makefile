# Each target sets up what it needs in .venv; `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# rewritten assertions are ten seconds of each worker, and commands that tests start compile what they import
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-exhaustive lint timm-contract clean

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/subquad compare --config digits --attention softmax linear focused inline agent pola soft \
		--output runs --experiment demo --seeds 0
	$(BIN)/subquad report runs/demo --output report.html

# every test, of many cases some
test: $(READY)
	$(BIN)/python -m pytest --quiet -n 2 --one-in 4 -m 'not long'
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --quiet -n 2 --one-in 8 tests/gpu

test-fast: $(READY)
	$(BIN)/python -m pytest --quiet -n 2 --one-in 10 -m 'not slow'

# all cases of all tests
test-exhaustive: $(READY)
	$(BIN)/python -m pytest --quiet -n 2 --exhaustive
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --quiet -n 2 --exhaustive tests/gpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

timm-contract: $(READY)
	$(BIN)/python scripts/timm_contract.py -n 2

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
