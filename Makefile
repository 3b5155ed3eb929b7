# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test lint types fmt bench bench-peers chaos docs package clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv (the first time this downloads torch)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@touch $(READY)

demo: setup
	$(BIN)/everstep demo $(ARGS)

# Most tests wait for processes of theirs, so several at a time cost little.
test: setup
	$(BIN)/python -m pytest -n logical --maxprocesses=4 --dist=worksteal $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/deptry .

types: setup
	$(BIN)/mypy

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python tests/bench/run_all.py $(ARGS)

# Installs the products that the benchmarks compare with, each in a venv of its own.
bench-peers: setup
	$(BIN)/python tests/bench/peers/install.py $(ARGS)

chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

# Rewrites what is generated in the pages, then checks that they match the code.
docs: setup
	$(BIN)/python tests/plugins/test_built_in.py
	$(BIN)/python -m pytest tests/test_docs.py tests/test_layout.py

# The wheel is built from the sdist and tried in a venv that has nothing else.
package: setup
	rm -rf dist build/package
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/package
	build/package/bin/python -m pip install --quiet --disable-pip-version-check dist/everstep-*.whl
	cd build/package && bin/everstep --version

clean:
	rm -rf .venv dist build everstep-demo
