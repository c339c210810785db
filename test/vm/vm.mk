# SPDX-License-Identifier: Apache-2.0
# Included by the Makefile.

.PHONY: test-vm
test-vm: ## the RDMA tests, in a virtual machine (VM="NAME…" for some of them)
	@GO=$(GO) test/vm/run.sh $(VM)

.PHONY: vm-image
vm-image: ## build that machine's image, if it is not there
	@test/vm/build.sh
