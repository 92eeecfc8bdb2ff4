.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
EXPERIMENT ?= conservative
DATA ?= cifar10
SWEEP ?=
RUNS ?= runs
RUN ?=
X ?= counted
ARGS ?=
KILLS ?= 50

.PHONY: run-is-missing help setup quickstart train data pareto table report dashboard export exits bench-deploy test browser test-slow test-processors test-data soak bench clean

comma := ,
space := $(subst ,, )

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/ready ## build .venv with everything pinned

.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true # on all cores, where pip would use one
	@touch $@

quickstart: setup ## train a short gated run on MNIST, compile what its gates settled, export and time it
	$(BIN)/python src/quickstart.py +experiment=quickstart $(ARGS)

train: setup ## train an experiment: make train EXPERIMENT=balanced ARGS='seed=1'
	$(BIN)/python src/train.py +experiment=$(EXPERIMENT) $(ARGS)

data: setup ## fetch and verify a data set ahead: make data DATA=cifar10
	$(BIN)/python -m cosinegate.data $(DATA) $(ARGS)

pareto: $(if $(filter $(X),counted executed mflops latency),,$(error X=$(X): must be counted, executed, mflops or latency))
pareto: setup ## draw the frontier of RUNS='runs ...'; SWEEP=quick trains what is missing first; X=executed
ifeq ($(SWEEP),)
	$(BIN)/python src/pareto.py 'runs=[$(subst $(space),$(comma),$(strip $(RUNS)))]' x=$(X) $(ARGS)
else
	@$(BIN)/python src/train.py -m +sweeps=$(SWEEP) $(ARGS); trained=$$?; [ $$trained -le 1 ] || exit $$trained; \
	$(BIN)/python src/pareto.py sweep=$(SWEEP) x=$(X) $(filter runs_dir=%,$(ARGS)) && exit $$trained
endif

table: setup ## every gate beside the others, of the runs of SWEEP=peers (or RUNS='runs ...'), into runs/figures
	$(BIN)/python src/table.py $(if $(SWEEP),sweep=$(SWEEP),$(if $(filter-out runs,$(RUNS)),sweep=null 'runs=[$(subst $(space),$(comma),$(strip $(RUNS)))]')) $(ARGS)

report: setup ## one HTML file about a run: make report RUN=runs/mnist/<run>, or RUNS='...' or SWEEP=quick
	$(BIN)/python src/report.py $(if $(SWEEP),sweep=$(SWEEP),'runs=[$(subst $(space),$(comma),$(strip $(or $(RUN),$(RUNS))))]') $(ARGS)

dashboard: setup ## save the W&B workspace of the project (needs an account)
	$(BIN)/python src/dashboard.py $(ARGS)

export: $(if $(RUN),setup,run-is-missing) ## ONNX, int8 and safetensors of a run: make export RUN=runs/balanced/<run>
	$(BIN)/python src/export.py run=$(RUN) $(ARGS)

exits: $(if $(RUN),setup,run-is-missing) ## give a trained run early exits: make exits RUN=runs/resnet20/<run> ARGS='budgets=[0.9]'
	$(BIN)/python src/exits.py run=$(RUN) $(ARGS)

bench-deploy: $(if $(RUN),setup,run-is-missing) ## time a run's deployed forms against the dense network: make bench-deploy RUN=...
	$(BIN)/python src/benchmark.py run=$(RUN) $(ARGS)

run-is-missing:
	@echo "RUN= is missing: name a run's folder, as in RUN=runs/balanced/<run>" >&2; exit 2

test: setup browser ## lint, and every test that needs no download
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/lint-imports --no-cache >/dev/null || { $(BIN)/lint-imports --no-cache; exit 1; }
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder $(ARGS)

browser: # Debian's chromium for the report's tests, where it can be installed
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
	>/dev/null 2>&1 || echo "no chromium and no apt-get to install it: the report is not tested in a browser"

test-slow: setup ## ten thousand records, the memory of a long run, variations that take long
	$(BIN)/python -m pytest -m slow $(ARGS)

test-processors: setup ## what computes, as other processors would: SSE4, AVX2, AVX-512, this one, four threads
	$(BIN)/python tests/processors.py $(ARGS)

test-data: setup ## the real CIFAR-10 and MNIST paths
	$(BIN)/python -m pytest -m data $(ARGS)

soak: setup ## kill a run KILLS times, anywhere, and compare what it ends with
	KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -s tests/training/test_soak.py $(ARGS)

bench: setup ## measure training speed as ratios, into runs/figures
	$(BIN)/python src/training_speed.py $(ARGS)

clean: ## remove .venv and caches; data and runs stay
	rm -rf .venv .pytest_cache .ruff_cache src/*.egg-info
