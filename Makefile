.PHONY: demo test test-all check fmt bench benchmarks
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests start many processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
# One worker per core; most files stay on one worker, for their fixtures, in an order of our own
# (tests/conftest.py).
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# Of make test-all, whose tests wait for other processes much of the time.
MATRICES := -n 4 --dist loadfile --no-loadscope-reorder
# Files with tests of a mark: collecting all of them takes longer than some of these tests.
files_with = $(shell grep -rlF --include='*.py' 'pytest.mark.$(1)' tests)
# Installs a peer that tests need, once, and sets the variable that names it.
peer = PD_TEST_$(1)="$$(sh scripts/peer_environment.sh $(2) .peers $(PYTHON))"
# What make test-all runs with elastic nodes, too: parity, reuse, load, faults and failover.
ELASTIC = $(addprefix tests/e2e/test_,parity.py serving.py load.py faults.py failover.py)
# What make test-all runs with two processes of every proxy, too, less what is marked one_process.
PROXIES = tests/proxy $(addprefix tests/security/test_,rids.py connections.py \
	proxy_requests_by_strangers.py workers_as_probes.py) \
	'tests/security/test_one_client.py::test_huge_bodies_hold_up_nobody[prompts]'
# What make bench compares with, and how often it measures both.
AGAINST ?= HEAD
PAIRS ?= 7
COMPARE = $(BIN)/pd-bench compare --against $(AGAINST) --pairs $(PAIRS) --

# Flags of pip, such as -c requirements/tested.txt for the versions that were tested.
PIP_FLAGS ?=
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

# Installed again whenever the project's requirements change.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.runs $@

# The demo needs neither the tests' libraries nor the linters.
$(VENV)/.runs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

demo: $(VENV)/.runs
	$(BIN)/pd-launch demo

test: $(VENV)/.installed
	@sh scripts/system_packages.sh
	$(BIN)/python -m pytest $(PARALLEL) -m "not full and not starved"

test-all: $(VENV)/.installed
	@sh scripts/system_packages.sh full
	$(BIN)/python -m pytest $(MATRICES) -m "not full and not starved"
	$(call peer,SGLANG,sglang) $(call peer,SGLANG_PROGRAMS,sglang-programs) \
		$(call peer,FRAMEWORKS,frameworks) $(call peer,LLAMA_INDEX,llama-index) \
		$(call peer,LM_EVAL,lm-eval) $(call peer,GUIDELLM,guidellm) \
		$(call peer,SCHEMATHESIS,schemathesis) $(call peer,HARMONY,harmony) \
		$(BIN)/python -m pytest $(MATRICES) -m "full and not starved and not alone"
	PD_TEST_ELASTIC=auto $(BIN)/python -m pytest $(MATRICES) -m "not full and not starved" $(ELASTIC)
	PD_TEST_PROXY_WORKERS=2 $(BIN)/python -m pytest $(MATRICES) -m "not full and not starved" $(PROXIES)
	$(call peer,AIPERF,aiperf) $(BIN)/python -m pytest -m alone $(call files_with,alone)
	$(BIN)/python -m pytest -m starved $(call files_with,starved)

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m pytest --noconftest tests/imports/test_circles.py
	$(BIN)/python scripts/check_class_names.py
	$(BIN)/python scripts/render_benchmarks.py --check
	$(BIN)/python scripts/render_fields.py --check
	$(BIN)/python scripts/render_models.py --check

fmt: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Is this tree faster than AGAINST? What fits a CPU, measured in turn.
bench: $(VENV)/.installed
	$(COMPARE) radix --rounds 3 --leaves 10000
	$(COMPARE) transfer --model embedded --tokens 4096 --repeats 5 --pattern nodes
	$(COMPARE) engine --model embedded --device cpu --work decode:1,16 prefill:512 --context 256
	$(COMPARE) proxy --work request stream --rounds 1 --requests 200

# The tables of docs/benchmarks.md, from the result files.
benchmarks: $(VENV)/.installed
	$(BIN)/python scripts/render_benchmarks.py
