# make demo   set up .venv and run the main job       make test   set up .venv and run the tests
# make check  lint, types, import contracts            make docs   build the documentation
# make text, make paths  reports: how the code reads, which module has no test of its own
# make mirror  breaks each module and sees its test fail
# make faults  puts each fault that was once found back, and sees its test fail      make damage  200 damaged files of runs
# make test-engines  engines and training backends with pins of their own, in an environment of their own
# make test-fake  training backends on GPUs and ranks that are not there
# make test-gpu   what needs a GPU, on a machine that has one
# make test-browser  reports in Chromium      make test-trackers  services' trackers, offline      make healthy  20 runs without alarms
# make campaign [MINUTES=30] [SEED=0]  faults, kills and damage by a seed, until something is found (make campaign CASE=runs-0-17)
# make kills  20 kills of a run with a step ahead      make ahead  what it learns, five seeds
# make screenshots  pictures of the demo's report, for the docs
# make matrix  all tests, the engines' with every backend, engine and end of a run: test and test-engines run a slice
# make zoo  36 architectures with each rollout engine, and docs/zoo.md
# make curves  what each algorithm learns, three seeds      make environments  what a small model learns in environments and as agents
# make bench  every benchmark, beside its peers (one: make bench BENCH=bench/like_trl.py)        make clean  remove what these made
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SEED ?= 0
export OMP_NUM_THREADS ?= 1
# A tenth of a short process is compiling Python where a machine forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=

# $(call environment,FOLDER): an environment with torch and uv, which then installs in a fraction of pip's time.
# torch is pinned: newer releases bring gigabytes of CUDA packages to a CPU machine. pip installs it, since it may be told
# where a CPU build is; uv keeps what is there.
define environment
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0 uv==0.13.9
endef
uv = $(1)/bin/uv pip install -q --python $(1)/bin/python --compile-bytecode

$(VENV)/.done: pyproject.toml ci/constraints.txt
	$(call environment,$(VENV))
	$(call uv,$(VENV)) -c ci/constraints.txt -e '.[standard,gymnasium,reasoning-gym,test]'
	touch $@

demo: $(VENV)/.done
	$(VENV)/bin/hybridflow run examples/arithmetic.toml --overwrite run.seed=$(SEED) stages.warm-up.actor.model.init_seed=$(SEED)

test: $(VENV)/.done
	$(PY) -m pytest -n 2 --dist loadfile --durations=25

ENGINES := vllm sglang deepspeed megatron

# vLLM and SGLang pin their torch and need stubs on a CPU: an environment of their own, of what was seen to work together.
.venv-engines/.done: pyproject.toml $(wildcard ci/engines/*.txt)
	$(call environment,.venv-engines)
	$(call uv,.venv-engines) -r ci/engines/requirements.txt
	$(call uv,.venv-engines) --no-deps -r ci/engines/requirements-nodeps.txt
	touch $@

ENGINE_TESTS := tests/engines $(ENGINES:%=tests/backends/%)
test-engines: .venv-engines/.done
	.venv-engines/bin/python -m pytest -n 2 --dist loadfile --durations=40 $(ENGINE_TESTS)

# Backends on GPUs and ranks that are not there; they register a device for their processes, so they run apart.
test-fake: .venv-engines/.done
	HYBRIDFLOW_FAKE=1 .venv-engines/bin/python -m pytest -n 2 --dist loadfile tests/fake

test-gpu: $(VENV)/.done
	$(PY) -m pytest -n0 tests/gpu

# Reports in Chromium, which must be installed (Debian: apt-get install chromium).
test-browser: $(VENV)/.done
	$(call uv,$(VENV)) -c ci/constraints.txt -e '.[browser]'
	HYBRIDFLOW_BROWSER=1 $(PY) -m pytest -n0 tests/browser

# Trackers of services, offline, in an environment of their own.
.venv-trackers/.done: pyproject.toml ci/constraints.txt
	$(call environment,.venv-trackers)
	$(call uv,.venv-trackers) -c ci/constraints.txt -e '.[fsdp,tensorboard,test]'
	$(call uv,.venv-trackers) -r ci/trackers.txt
	touch $@

test-trackers: .venv-trackers/.done
	HYBRIDFLOW_TRACKERS=1 .venv-trackers/bin/python -m pytest -n0 tests/trackers

# Twenty healthy runs, none of which may raise an alarm in its report, and a run whose engine is killed, which must.
healthy: $(VENV)/.done
	HYBRIDFLOW_SEEDS=20 $(PY) -m pytest -n0 tests/report/test_broken_runs.py -k "healthy or started"

# A run with a step ahead whose trainer, engines and controller are killed at random, bit for bit (of the matrix: 3 kills).
kills: $(VENV)/.done
	HYBRIDFLOW_MATRIX=1 HYBRIDFLOW_KILLS=20 $(PY) -m pytest -n0 tests/run/test_ahead.py -k kills

# A quarter of an hour: the steps to 95% of held-out sums, with a step ahead and without.
ahead: $(VENV)/.done
	$(PY) bench/ahead_learning.py

# Pictures of the demo's report, for the docs and the README.
screenshots: $(VENV)/.done
	$(call uv,$(VENV)) -c ci/constraints.txt -e '.[browser]'
	$(PY) ci/screenshots.py

# Memory at full depth, on GPUs that are not there.
bench-fake: $(VENV)/.done
	$(PY) bench/fake.py

matrix: $(VENV)/.done .venv-engines/.done
	HYBRIDFLOW_MATRIX=1 $(PY) -m pytest -n 2 --dist loadfile
	HYBRIDFLOW_MATRIX=1 .venv-engines/bin/python -m pytest -v $(ENGINE_TESTS)

zoo: .venv-engines/.done
	.venv-engines/bin/python ci/zoo.py

# Types and import contracts are checked on an installed copy: tools do not follow the editable install's mapping.
check: $(VENV)/.done
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m ruff check --select E501 --config 'lint.pycodestyle.max-line-length=100' core settle kit planner inference report cli backends algorithms
	rm -rf .installed build && $(PIP) install -q --no-deps --no-build-isolation --target .installed .
	cd .installed && ../$(PY) -m mypy --config-file ../pyproject.toml -p hybridflow.core -p hybridflow.settle -p hybridflow.kit -p hybridflow.planner -p hybridflow.inference -p hybridflow.report -p hybridflow.cli -p hybridflow.backends -p hybridflow.algorithms
	cd .installed && PYTHONPATH=. ../$(VENV)/bin/lint-imports --config ../pyproject.toml
	$(PY) ci/rooms.py

# Reports, which never fail: counts of what makes code hard to read (of folders: make text TEXT='core/job kit'), and the
# modules without a test at the mirrored path.
text: $(VENV)/.done
	$(PY) ci/text.py $(TEXT)

paths: $(VENV)/.done
	$(PY) ci/mirror.py --paths

# Breaks each module in a copy, and sees the test at the mirrored path fail: some minutes.
mirror: $(VENV)/.done
	$(PY) ci/mirror.py $(MIRROR)

# Puts each fault that was once found back in a copy, and sees its test fail: some minutes (some: make faults FAULTS='f3 f5').
faults: $(VENV)/.done
	$(PY) ci/faults.py $(FAULTS)

# Goes on where the same seed ended; the folder `campaign` has what was done (docs/reliability.md).
campaign: $(VENV)/.done
	PYTHONPATH=tests $(PY) -m campaign $(if $(CASE),--case $(CASE),--minutes $(or $(MINUTES),30) --seed $(SEED))

# Resumes 200 runs, each with a damaged file.
damage: $(VENV)/.done
	HYBRIDFLOW_DAMAGES=$(or $(DAMAGES),200) $(PY) -m pytest -n 2 tests/faults/test_damage.py

# Runs 150 drawn configurations over every backend and engine, and shows 3,600 mutated ones: an hour.
configs: .venv-engines/.done
	HYBRIDFLOW_CONFIGS=$(or $(CONFIGS),150) .venv-engines/bin/python -m pytest -n 2 tests/faults/test_configs.py

docs: $(VENV)/.done
	$(call uv,$(VENV)) -c ci/constraints.txt -e '.[docs]'
	$(PY) -m sphinx -W -q -b html docs docs/_build/html

BENCH ?= $(filter-out %/common.py %/table.py,$(sort $(wildcard bench/*.py)))
bench: $(VENV)/.done .venv-engines/.done .bench/trl/.done .bench/verl/.done
	@status=0; for script in $(BENCH); do echo "# $$script" >&2; $(PY) $$script || status=1; done; exit $$status

.bench/trl/.done:
	$(call environment,.bench/trl)
	$(call uv,.bench/trl) numpy trl==1.16.0 transformers==5.23.0 accelerate datasets torch==2.13.0
	touch $@

.bench/verl/.done:
	$(call environment,.bench/verl)
	$(call uv,.bench/verl) verl==0.9.1 torch==2.13.0
	touch $@

# One seed of four: make curves CURVES='--seeds 0 --only rloo remax reinforce_pp dpo'
curves: $(VENV)/.done
	$(PY) ci/curves.py $(CURVES)

# A minute or two each.
environments: $(VENV)/.done
	$(PY) bench/environments.py

clean:
	rm -rf $(VENV) .venv-engines .venv-trackers .bench .installed docs/_build build *.egg-info

.PHONY: demo test test-browser test-trackers healthy kills ahead screenshots test-engines test-fake test-gpu bench-fake matrix zoo check text paths mirror faults campaign damage configs docs bench curves environments clean
