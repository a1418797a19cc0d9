# Thin: every target is one script in scripts/. `make help` lists them.
#
#   CUDA=auto      use a CUDA toolkit found here, else fetch nvcc from PyPI into build/, else emulated only (default)
#   CUDA=0         the emulated backend alone
#   CUDA=required  no nvcc is a failure
#   AR_CUDA_ARCHS="90"   build kernels for these compute capabilities only (quick work)

CUDA ?= auto
PREFIX ?= /usr/local
export CUDA AR_CUDA_ARCHS GO_TEST_FLAGS
MAKEFLAGS += --no-print-directory

.PHONY: all run test test-cpp test-go sanitize fuzz lint format install gpu-bundle clean distclean help

all: ## build/allreduce, the command (default)
	@scripts/build.sh

run: all ## build and run checked reductions on this machine's GPUs, or on emulated ones
	@build/allreduce run

test: ## all tests that run on this machine (GO_TEST_FLAGS="-run X -count 1" reaches go test)
	@scripts/test.sh
test-cpp: ## the C++ tests alone
	@scripts/test.sh cpp
test-go: ## go vet and the Go tests alone
	@scripts/test.sh go

sanitize: ## the C++ tests under ASan + UBSan and TSan, the Go tests under the race detector
	@scripts/sanitize.sh
fuzz: ## every fuzz test for FUZZTIME (default 20s) each
	@scripts/fuzz.sh

lint: ## gofmt, golangci-lint, clang-format, shellcheck
	@scripts/lint.sh
format: ## gofmt and clang-format, in place
	@scripts/lint.sh --fix

install: ## libraries, headers, pkg-config file and the command into PREFIX (default /usr/local)
	@scripts/install.sh "$(PREFIX)"

gpu-bundle: ## build/gpu-bundle: runs all tests on a machine with only a GPU driver
	@scripts/gpu-bundle.sh

clean: ## remove what was built, keep the fetched toolchain
	@[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name toolchain -exec rm -rf {} +
distclean: ## remove build/ altogether
	@rm -rf build

help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20
