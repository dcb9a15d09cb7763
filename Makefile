# The two commands: `make demo` and `make test`. Both set everything up on a fresh machine.
PY := .venv/bin/python
DOCS := .venv-docs
export NO_MKDOCS_2_WARNING := 1
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false
export RAY_DEDUP_LOGS := 0
# Set-up installs without compiling: what is used is compiled once, by whoever imports it first.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo demo-control ladder ladder-table ladder-controls test check lint quick fast models clean oracle matrices templates mutants random-graphs kills test-nvme docs docs-serve gpu-check gpu-check-cpu

setup:
	@.ci/setup

demo: setup
	$(PY) -m benchmarks.demo

demo-control: setup
	$(PY) -m benchmarks.demo --control

# Every graph on `tiny`, and the table in docs/ladder.md: half an hour on two quiet cores.
ladder-table: setup
	$(PY) -m benchmarks.training.ladder --page

# Each stage from the one before: SFT -> reward model -> PPO, and SFT -> DPO.
ladder: setup
	$(PY) -m benchmarks.training.ladder --chain

ladder-controls: setup
	$(PY) -m benchmarks.training.ladder_controls

check: setup
	@$(MAKE) --no-print-directory -j2 -Otarget lint quick

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy flowrl flowrl_setup.py graphs benchmarks

quick: setup
	$(PY) -m pytest -q -x -m "not slow and not thorough and not matrix" -n 2 --dist loadfile tests

fast: setup
	$(PY) -m pytest -q -x -m "not slow and not matrix" -n 2 --dist loadfile tests

# What most slow tests start from, made once on a machine; after `lint`, while `fast` has the other core.
models: setup lint
	$(PY) -c "from flowrl.models import Policy, resolve; from flowrl.tasks import Task; resolve(Policy('tiny', task=Task('arithmetic'))); resolve(Policy('tiny_agent', task=Task('arithmetic:min_value=30')))"

# The slow tests have processes of their own: as children of those that have run the fast ones they take longer.
test: setup
	@$(MAKE) --no-print-directory -j2 -Otarget models fast
	$(PY) -m pytest -q -m "slow and not nvme and not matrix" -n 2 --dist loadfile tests

# Offload to a disk: needs libaio with its headers, and compiles an extension for three minutes.
test-nvme: setup
	$(PY) -m pytest -q -m nvme tests

# Further cases of what `test` shows (tests/house/further_cases.py), and the rest of every grid, the oracle's included.
matrices: setup
	$(PY) -m pytest -q -m matrix -n 2 --dist loadfile tests

# Every case of the oracle of gradients in rows and in trees; some five minutes.
oracle: setup
	$(PY) -m pytest -q tests/oracle/test_oracle.py tests/oracle/test_oracle_episodes.py

# Random conversations with every chat template in TRL's wheel, a hundred for each; some twenty minutes.
templates: setup
	FLOWRL_TEMPLATE_EXAMPLES=100 $(PY) -m pytest -q -n 2 tests/agents/test_agents_conversation.py

# Faults put in one at a time, each to be caught by the test that it names.
mutants: setup
	$(PY) -m tests.mutants.run

# Thousands of random graphs with failures, crashes and resumes; a quarter of an hour on a core.
random-graphs: setup
	$(PY) -m tests.random_graphs --graphs 2000 --jobs 2

# SIGKILL of every kind of process, ten times each at random moments; an hour on two cores.
kills: setup
	$(PY) -m tests.faults.kills --times 10

# What a CPU cannot show, on a machine with GPUs: stages of under 8 minutes, results and table in gpu-check/.
gpu-check: setup
	$(PY) -m flowrl.cli gpu-check

# Its stages that mean something on a CPU; vLLM's second runner in the interpreter of Triton, whose wheel is 200 MB.
gpu-check-cpu: setup
	@[ -e .venv/triton/triton ] || $(PY) -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --target .venv/triton triton==3.7.1
	PYTHONPATH=.venv/triton $(PY) -m flowrl.cli gpu-check --device cpu --out gpu-check-cpu

# The site of the documents, into build/docs, in an environment of its own.
docs: $(DOCS)/installed
	$(DOCS)/bin/mkdocs build --strict --quiet
	@echo "docs: build/docs/index.html"

docs-serve: $(DOCS)/installed
	$(DOCS)/bin/mkdocs serve

$(DOCS)/installed: requirements/docs.txt
	$${PYTHON:-python3} -m venv --clear $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

clean:
	rm -rf .venv $(DOCS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
