"""The list of mutations fits the code; `scripts/mutate` runs the tests against each."""

from __future__ import annotations

import ast

import pytest

from scripts.mutations import MUTATIONS, Mutation, mutated
from tests.repository.project import PACKAGE


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_and_leaves_a_program(mutation: Mutation) -> None:
    """What it replaces is there once, and what comes out is Python."""
    ast.parse(mutated((PACKAGE / mutation.path).read_text(), mutation))
