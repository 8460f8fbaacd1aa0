# Two commands for a fresh machine: `make reproduce` and `make test`. Both make .venv first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRESET ?= quick

.PHONY: reproduce test clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,notebooks]'
	touch $@

# The main job on a real model; the last line is the path of the report.
reproduce: $(VENV)/ready
	$(BIN)/python -m experiments.reproduce --preset $(PRESET)

# What CI runs: the default tier (tiny models), the tier on real weights, the notebooks. Plain `pytest` is the first alone.
test: $(VENV)/ready
	$(BIN)/python -m mechkv models pull smollm2-135m gemma3-270m
	$(BIN)/python -m pytest -m '' -n 2

clean:
	rm -rf $(VENV)
