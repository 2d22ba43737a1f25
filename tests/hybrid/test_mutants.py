"""`make mutants` takes minutes; that it still can break what it means to break is seen at once."""

import pytest

from tests.hybrid.mutants import MUTANTS, ROOT, Mutant, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place(mutant: Mutant) -> None:
    path, text = mutated(mutant, ROOT)
    assert text != path.read_text()
