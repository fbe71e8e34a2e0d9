# `make` lists the targets. ARGS is handed to the command behind a target.
.DEFAULT_GOAL := help
.PHONY: help serve say test docs clean
export TEXT

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: ## Install what is needed and start the server: make serve ARGS="--port 9000"
	@scripts/install serve
	@exec .venv/bin/stretto serve $(ARGS)

say: ## Turn text into a WAV file: make say TEXT="Good morning" ARGS="-o morning.wav"
	@test -n "$$TEXT" || { echo 'stretto: what shall it say? make say TEXT="Good morning"' >&2; exit 2; }
	@scripts/install serve
	@exec .venv/bin/stretto say $(ARGS) -- "$$TEXT"

test: ## Install what is needed, run all checks and all tests: make test ARGS="-k router"
	@scripts/check
	@scripts/test $(ARGS)

docs: ## Build the documentation into site/
	@scripts/docs

clean: ## Remove everything that these targets made
	rm -rf .venv site dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
