"""`make mutants` takes minutes; that it still can break what it means to break is seen at once."""

import pytest

from tests.hybrid.mutants import MUTANTS, ROOT, Mutant, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies(mutant: Mutant) -> None:
    """The text that a mutant replaces occurs once in its file."""
    path, text = mutated(mutant, ROOT)
    assert text != path.read_text()
