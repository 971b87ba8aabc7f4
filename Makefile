# The two main commands are `make run` and `make test`. `make help` lists all.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Progress of a long, silent command: every five seconds, print the elapsed time and the size of .venv.
SHOWN = began=$$(date +%s); while sleep 5 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do \
  echo "  $$(($$(date +%s) - began)) s: $$(du -sm $(VENV) | cut -f1) MB in $(VENV)"; done & \
  ticker=$$!; trap "kill $$ticker 2>/dev/null" EXIT; trap "exit 130" INT TERM;

.DEFAULT_GOAL := help
.PHONY: help install run test lint unit unit-avx2 cross-compilers kernels e2e scale metrics faults hostile fleet cluster-check docs clients peers examples page fuzz gpu audit dist wheel-check release-check image-check image-audit sbom listen report-faults parity parity-digest step-load overload simulate-check clean mutants

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Create .venv with the dependencies of the server

run: install ## Serve speech on http://127.0.0.1:8000 until Ctrl-C (options: make run ARGS="--model ... --port ...")
	@$(BIN)/talkray serve $(ARGS)

test: $(VENV)/.installed-dev ## Lint, types, unit tests and end-to-end tests with real Ray Serve
	@$(MAKE) --no-print-directory --jobs=2 timed-lint timed-unit
	@$(MAKE) --no-print-directory timed-e2e

timed-%:
	@began=$$(date +%s); $(MAKE) --no-print-directory $* && echo "make $*: $$(($$(date +%s) - began)) s"

lint: $(VENV)/.installed-dev ## Check format, lint, types, import contracts, size budgets, generated references and public contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m tools.contracts --check

# Triton interprets kernels on a CPU. It is apart, because with it in .venv, tests of a simulated GPU are skipped.
TRITON := $(VENV)/triton
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -q -n logical --maxprocesses 4 -o faulthandler_timeout=0 tests/deployments/talker/kernels tests/deployments/talker/sampling/test_triton_sampler.py tests/deployments/codec/backends/test_triton.py tests/deployments/codec/backends/test_triton_slots.py
$(TRITON): $(VENV)/.installed-dev
	$(PIP) --no-deps --target $@ "triton==3.6.*"

unit: $(VENV)/.installed-dev $(TRITON) ## Tests without Ray, and of Triton kernels in its interpreter (only some: make unit ONLY=extensions/jobs)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist worksteal -m "not e2e and not gpu and not scale and not prometheus and not faults and not fleet and not docs and not fuzz and not clients and not page and not report" $(wildcard $(patsubst %,tests/%,$(ONLY)) $(patsubst %,tests/serve_app/%,$(ONLY)))
	$(if $(ONLY),,$(INTERPRETED) -m "not slow")

AVX2 := build/avx2
AS_AVX2 := cd $(AVX2) && PYTHONPATH=$(CURDIR)/$(AVX2) ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 \
  CFLAGS="-march=x86-64-v3 -DTALKRAY_ONE_CPU" $(CURDIR)/$(BIN)/python
unit-avx2: $(VENV)/.installed-dev ## Tests of codec and talker, and one server, limited to AVX2 instructions (two minutes)
	@rm -rf $(AVX2) && mkdir -p $(AVX2) && git ls-files -z | xargs -0 cp --parents --target-directory=$(AVX2)
	$(AS_AVX2) -c "import setuptools; setuptools.setup()" --quiet build_ext --inplace
	$(AS_AVX2) -m pytest -q -n logical --maxprocesses 4 -m "not gpu" tests/tools/test_bench_codec.py \
	  tests/deployments/codec/backends tests/deployments/codec/test_stress.py tests/deployments/talker/networks tests/deployments/talker/runner tests/deployments/talker/sampling
	$(AS_AVX2) -m pytest -q tests/e2e/commands/test_command_line.py::test_a_start_says_how_to_speak

cross-compilers: ## Install a cross-compiler for aarch64 (Debian, apt-get), with which unit tests build the C kernels
	@command -v aarch64-linux-gnu-gcc >/dev/null || { apt-get update && apt-get install -y --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross; } || { echo "gcc-aarch64-linux-gnu is missing: the C kernels are not built for aarch64"; exit 1; }

kernels: $(TRITON) ## Compare all Triton kernels with PyTorch in the interpreter, and compile them for GPUs without having one
	$(INTERPRETED)
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -q tests/deployments/gpu

e2e: $(VENV)/.installed-dev ## Tests with real Ray Serve on this machine
	$(BIN)/python -m pytest -q -m "e2e and not faults" tests/e2e

gpu: ## Tests that need a GPU, with the packages of PYTHON (nine minutes on one H200)
	$(PYTHON) -m pytest -q -p no:benchmark -n 8 -m "gpu and not whole_gpu" tests/deployments
	$(PYTHON) -m pytest -q -p no:benchmark -m whole_gpu tests/deployments

scale: $(VENV)/.installed-dev ## Autoscaling of pools under load, with real Ray Serve (minutes)
	$(BIN)/python -m pytest -q -o faulthandler_timeout=0 -m scale tests/scale

metrics: $(VENV)/.installed-dev ## Scrape the metrics with Prometheus (installed with apt-get)
	$(BIN)/python -m pytest -q -m prometheus tests/prometheus

faults: $(VENV)/.installed-dev ## Kill, cancel and update replicas and hosts under load, without audible effect (35 minutes; more kills of some: TALKRAY_KILLS=20 TALKRAY_KILLED="jobs|talker")
	$(BIN)/python -m pytest -q -o faulthandler_timeout=0 -m "faults and not hostile" tests/faults
	$(BIN)/python -m pytest -q -o faulthandler_timeout=0 -m faults tests/e2e

hostile: $(VENV)/.installed-dev ## Attacks by one client while four others listen (twelve minutes, eight cores; only some: TALKRAY_ATTACKS="tags|batch")
	$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -m hostile tests/faults

fleet: $(VENV)/.installed-dev ## Loss of nodes and of the head node in network namespaces, and simulated clouds (root; half an hour)
	$(PIP) --editable '.[fleet]'
	@command -v redis-server >/dev/null || apt-get install -y redis-server || { echo "redis-server is missing. It stores the state of Ray's head node"; exit 1; }
	$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -m fleet tests/fleet

cluster-check: $(VENV)/.installed-dev ## Validate all files in cluster/ offline (needs kubectl or kustomize)
	$(BIN)/python -m tools.cluster_check

docs: $(VENV)/.installed-dev ## Run the commands of README and docs unchanged in a fresh clone (a quarter of an hour; needs ports 6379, 8000 and 8265)
	$(BIN)/python -m pytest -v -o faulthandler_timeout=0 tests/test_docs_commands.py

clients: $(VENV)/.installed-dev ## The latest client libraries, unmodified, against a server (installed in .clients, with Node 22 from npm; 20 minutes)
	$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -m clients tests/clients

peers: $(VENV)/.installed-dev ## Test suites of other speech servers against a local server (make peers PEERS=FOLDER; without a folder, explains how to get them)
	@$(BIN)/python -m tools.experiments.peers $(PEERS)

examples: $(VENV)/.installed-dev ## Run docs/examples unchanged: agents, telephony, chat, a book, a batch (part of `make clients`; five minutes)
	$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 -m clients tests/clients/test_examples.py

page: $(VENV)/.installed-dev ## The page at `/` in Chromium and Firefox, against real servers (installed in .pages; ten minutes)
	@command -v chromium firefox-esr pulseaudio ffmpeg >/dev/null || apt-get install -y --no-install-recommends chromium firefox-esr pulseaudio ffmpeg || { echo "chromium, firefox-esr, pulseaudio or ffmpeg is missing"; exit 1; }
	npm install --silent --no-audit --no-fund --prefix .pages puppeteer-core@24.27.0 axe-core@4
	$(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/serve_app/extensions/page

fuzz: $(VENV)/.installed-dev ## At least 10,000 invalid requests of each kind (other requests: TALKRAY_FUZZ_SEED=1)
	TALKRAY_FUZZ_CASES=$${TALKRAY_FUZZ_CASES:-10000} $(BIN)/python -m pytest -q -s -o faulthandler_timeout=0 tests/fuzz

mutants: $(VENV)/.installed-dev ## Mutation testing: list random code changes that no unit test detects (make mutants SEED=1 COUNT=40: ten minutes on two cores)
	$(PIP) "cosmic-ray>=8.7,<9"
	nice $(BIN)/python -m tools.mutants --seed $(or $(SEED),1) --count $(or $(COUNT),40)

audit: $(BIN)/python ## Check the pinned versions for known vulnerabilities (needs the network)
	$(PIP) pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off

dist: $(VENV)/.installed-dev cross-compilers ## Build a release in dist/: sdist, wheels for x86-64 and aarch64, tested versions, checksums
	@rm -rf dist
	$(BIN)/python -m tools.dist dist

WHEEL := build/wheel
wheel-check: $(VENV)/.installed-dev ## Install this machine's wheel and synthesize speech (one minute)
	@rm -rf $(WHEEL)
	$(BIN)/python -m tools.dist $(WHEEL)/dist --machine $$(uname -m)
	$(BIN)/python -m venv --without-pip $(WHEEL)/venv
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >$$(echo $(WHEEL)/venv/lib/python*/site-packages)/development.pth
	$(BIN)/python -m pip --python $(WHEEL)/venv/bin/python install --quiet --disable-pip-version-check --no-index --no-deps --ignore-installed $(WHEEL)/dist/*.whl
	cd / && $(CURDIR)/$(WHEEL)/venv/bin/python -c "import serve_app; assert '$(WHEEL)' in serve_app.__file__, serve_app.__file__"
	TALKRAY_COMMAND=$(CURDIR)/$(WHEEL)/venv/bin/talkray $(BIN)/python -m pytest -q tests/e2e/commands/test_command_line.py::test_a_start_says_how_to_speak

release-check: dist ## Install the wheel and the sdist in empty environments and synthesize speech (PYTHONS="python3.13 python3.14"; needs the network)
	for python in $(or $(PYTHONS),$(PYTHON)); do for file in dist/*$$(uname -m).whl dist/*.tar.gz; do \
	  echo "$$($$python --version): $$file" && rm -rf build/release && $$python -m venv build/release && \
	  build/release/bin/pip install --quiet --disable-pip-version-check $$file --constraint constraints.txt && \
	  TALKRAY_COMMAND=$(CURDIR)/build/release/bin/talkray $(BIN)/python -m pytest -q tests/e2e/commands/test_command_line.py::test_a_start_says_how_to_speak \
	  || exit 1; done; done

IMAGE = talkray:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)-cpu
image-check: ## Run the cpu image (built as in cluster/check-image.sh) as any user on a read-only file system (root; two minutes)
	cluster/check-image.sh $(IMAGE)

image-audit: $(BIN)/python ## Check the cpu image's packages for known vulnerabilities, and list them in build/ as CycloneDX (root; needs the network)
	$(PIP) pip-audit
	@mkdir -p build
	container=$$(buildah from --pull-never $(IMAGE)); packages=$$(buildah mount $$container)/opt/talkray/lib/python3*/site-packages; \
	  $(BIN)/pip-audit --vulnerability-service osv --path $$packages --format cyclonedx-json --output build/image-sbom.json \
	  --progress-spinner off; status=$$?; buildah rm $$container >/dev/null; exit $$status

sbom: $(VENV)/.installed-dev ## Write a CycloneDX bill of materials to build/, and the licences to docs/licences.md (needs the network)
	$(PIP) "cyclonedx-bom>=7"
	@mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --gather-license-texts --output-reproducible --output-file build/sbom.json $(BIN)/python
	$(BIN)/python -m tools.licences build/sbom.json

report-faults: $(VENV)/.installed-dev ## Run `talkray report` with each of ten injected faults (hours on two cores; only some: TALKRAY_FAULTS="clipped|late"; options: TALKRAY_REPORT="--only speed")
	$(BIN)/pip install --quiet --no-deps Resemblyzer==0.1.4
	$(BIN)/python -m pytest -q -o faulthandler_timeout=0 -m report tests/tools/report

listen: $(VENV)/.installed-dev ## Transcribe the audio of every endpoint and format, of a book and of joints (hours; needs ffmpeg; options: make listen ARGS="--model DIR --language german")
	@command -v ffmpeg >/dev/null || apt-get install -y ffmpeg || { echo "ffmpeg is missing: it converts raw PCM for comparison"; exit 1; }
	nice -n 19 $(BIN)/python -m tools.listening $(ARGS)
	nice -n 19 $(BIN)/python -m tools.listening.joints --joints 50

PARITY_STAMP := tests/parity/passed
parity: $(VENV)/.installed-dev ## Compare with the official package in a separate environment (.parity). Commit the stamp file that it writes
	$(BIN)/python -m tools.experiments.parity.run
	@$(MAKE) --no-print-directory parity-digest >$(PARITY_STAMP)

parity-digest: ## Print a digest of the files that `make parity` depends on
	@git ls-files -z deployments tools/experiments/parity constraints.txt | xargs -0 sha256sum | sha256sum | cut -d' ' -f1

step-load: $(VENV)/.installed-dev ## Report on a load of 1x, 5x, 1x on a server that scales (four minutes)
	$(BIN)/python -m tools.experiments.load step step-load-$$(date +%Y%m%d-%H%M%S) 0.6

overload: $(VENV)/.installed-dev ## Report on a minute at twice the capacity, which is measured first (six minutes; known capacity: make overload RATE=3)
	$(BIN)/python -m tools.experiments.load overload overload-$$(date +%Y%m%d-%H%M%S) $(RATE)

simulate-check: $(VENV)/.installed-dev ## Compare the load test's simulator with a local server (ten minutes)
	$(BIN)/python -m tools.experiments.load simulate-check simulate-check-$$(date +%Y%m%d-%H%M%S)

clean: ## Remove environments, caches and build output
	rm -rf $(VENV) .parity .clients .peers .pages build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: Talkray needs Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Talkray needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

READ_BY_INSTALLS := pyproject.toml constraints.txt deployments/c_library.h deployments/codec/backends/c_kernels.c \
  deployments/embedded_voice/cpu_networks.c deployments/talker/sampling/c_sampler.c

$(VENV)/.installed: $(BIN)/python $(READ_BY_INSTALLS)
	@echo "installing 1.7 GB into $(VENV), most of it torch: takes two to four minutes"
	@$(SHOWN) $(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(READ_BY_INSTALLS)
	@echo "installing 2.8 GB into $(VENV), with the development tools: takes three to five minutes"
	@$(SHOWN) $(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@
