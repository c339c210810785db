# SPDX-License-Identifier: Apache-2.0
#
# make demo   install what is missing, build, serve, mount, read, verify, measure, clean up
# make test   everything that this machine can test, with the race detector
# make help   the rest

SHELL   := /bin/bash
GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo 0.1.0-dev)

# The verbs provider is built in when the headers are there.
HAVE_VERBS := $(shell echo '\#include <rdma/rdma_cma.h>' | $${CC:-cc} -E - >/dev/null 2>&1 && echo yes)
TAGS       := $(if $(HAVE_VERBS),verbs)
GOFLAGS_   := $(if $(TAGS),-tags $(TAGS)) -trimpath
LDFLAGS    := -X rblk/internal/version.Version=$(VERSION)

.PHONY: build
build: ## build bin/rblkd and bin/rmount
	@mkdir -p bin
	$(GO) build $(GOFLAGS_) -ldflags '$(LDFLAGS)' -o bin/ ./cmd/rblkd ./cmd/rmount

.PHONY: install
install: build ## install the binaries (PREFIX=/usr/local)
	install -D -m 755 bin/rblkd  $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/rblkd
	install -D -m 755 bin/rmount $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/rmount

.PHONY: deps
deps: ## install the Debian packages that building and testing need
	@scripts/deps.sh

.PHONY: demo
demo: ## the whole thing on this machine, in about a minute
	@scripts/demo.sh

.PHONY: test
test: deps ## unit, conformance and end-to-end tests, with the race detector
	@$(MAKE) --no-print-directory lint test-only # anew: the headers may be there only now

.PHONY: test-only
test-only:
	RBLK_TAGS=$(TAGS) $(GO) test -race $(if $(TAGS),-tags $(TAGS)) -timeout 25m $(TESTFLAGS) ./...

.PHONY: lint
lint: ## gofmt, go vet, staticcheck, shell syntax
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "gofmt: $$out" >&2; exit 1; }
	$(GO) vet $(if $(TAGS),-tags $(TAGS)) ./...
	$(GO) tool staticcheck $(if $(TAGS),-tags $(TAGS)) ./...
	@for f in $$(git ls-files '*.sh' .ci/run); do bash -n $$f || exit 1; done

FUZZTIME ?= 10s
.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (default 10s)
	@scripts/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: build ## the figures of docs/performance.md (needs root)
	$(GO) run ./test/bench
	$(GO) test -run '^$$' -bench VersusNet -benchtime 80x ./rdma/tcp
	$(GO) test -run '^$$' -bench . ./initiator ./cache ./dataset ./wire ./target

-include test/vm/vm.mk

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14
