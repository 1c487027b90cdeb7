# Everything from nothing: `make run` and `make test` set up a virtual environment and the default model first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Write a haiku about a lighthouse.
# Packages of some clients bring pytest plugins that nothing here uses, and pytest rewrites all modules of such packages.
PLUGINS := PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=xdist.plugin,pytest_asyncio.plugin,_hypothesis_pytestplugin
unexport PYTHONDONTWRITEBYTECODE # what is not kept is compiled anew by every process, and the tests start many

.PHONY: help run chat serve test real ray gpu check sanitize format conformance fuzz soak bench clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.model  ## ask the default model something (PROMPT="…")
	@$(BIN)/unspool run --chat --stats "$(PROMPT)"

chat: $(VENV)/.model  ## talk with the default model
	@$(BIN)/unspool chat

serve: $(VENV)/.serve $(VENV)/.model  ## serve the default model at http://127.0.0.1:8000/v1 (PORT=)
	@$(BIN)/unspool serve --port $(or $(PORT),8000)

test: $(VENV)/.test $(VENV)/.model  ## run the tests, two processes at once (JOBS=, TESTS=)
	@echo "==> running the tests"
	@$(PLUGINS) $(BIN)/python -m pytest -n $(or $(JOBS),2) --dist worksteal $(TESTS)

real: $(VENV)/.test  ## fetch trained models (350 MB) and run the tests that need them
	@UNSPOOL_REAL_MODELS=1 $(BIN)/python -m pytest tests/real

ray: $(VENV)/.test $(VENV)/.ray  ## run the tests that start a Ray cluster on this machine; installs ray (several minutes)
	@$(BIN)/python -m pytest -m ray tests/ray

gpu:  ## run the tests that need a GPU, with the python at hand: its own torch and triton (JOBS=, TESTS=)
	@$(PYTHON) tools/gpu_tests.py $(if $(JOBS),--jobs $(JOBS)) $(TESTS)

check: $(VENV)/.check $(VENV)/.test  ## formatter, linter, strict types, import contracts
	@echo "==> ruff format" && $(BIN)/ruff format --check .
	@echo "==> ruff check" && $(BIN)/ruff check .
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> import contracts" && $(BIN)/lint-imports
	@echo "==> every test can be imported" && $(PLUGINS) $(BIN)/python -m pytest --collect-only -qq
	@echo "==> the C library under the sanitizers" && $(BIN)/python tools/check_cpu_library.py --sanitize --rounds 40

sanitize: $(VENV)/.created  ## the C library under the sanitizers, with random shapes
	@$(BIN)/python tools/check_cpu_library.py --sanitize

format: $(VENV)/.check  ## let the formatter and the linter mend what they can
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

conformance: $(VENV)/.test  ## the table of reference outputs: what runs, what is to come
	@$(BIN)/python -m tests.conformance.table

fuzz: $(VENV)/.test  ## hostile inputs of every kind, in processes with limits (MINUTES=, JOBS=, KIND=)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) --jobs $(or $(JOBS),2) $(if $(KIND),--kind $(KIND))

soak: $(VENV)/.test  ## the engine under random requests, cancellations and faults (MINUTES=, SEED=)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.engine.soak --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED))

bench: $(VENV)/.bench $(VENV)/.model  ## decoding speed beside transformers
	@$(BIN)/unspool bench --peer transformers

clean:  ## remove the virtual environment
	rm -rf $(VENV)

# --- set-up, each step once -------------------------------------------------------------------------
$(VENV)/.created:
	@echo "==> making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Modules are compiled when they are first imported: compiling all of them takes minutes, and few are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "==> installing unspool and what it needs (torch comes first and is the large one)"
	@$(PIP) -e .
	@touch $@

# The packages of an extra without the project itself, whose C library would be compiled again.
EXTRA = import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'], sep='\n')
$(addprefix $(VENV)/.,test serve ray bench check): $(VENV)/.%: $(VENV)/.installed
	@echo "==> installing the packages of the extra \"$*\""
	@$(BIN)/python -c "$(EXTRA)" > $(VENV)/$*.txt && $(PIP) -r $(VENV)/$*.txt
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	@echo "==> looking for the default model"
	@$(BIN)/unspool pull smollm2-135m
	@touch $@
