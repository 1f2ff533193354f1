"""The assertions about messages detect missing facts."""

from __future__ import annotations

import warnings

import pytest

from tests.facts import each_names, keys, refused, unnamed, warned

MESSAGE = "resources.slots_per_trial: 3 does not fill whole nodes of 2 slots on cluster 'lab'; use 2 or 4"


@pytest.mark.parametrize("fact", ["resources.slots_per_trial", 3, "lab", "'lab'", 4])
def test_what_a_message_names_is_found(fact: object) -> None:
    assert unnamed(MESSAGE, fact) == []


@pytest.mark.parametrize("fact", ["slots_per", 33, "la", 5])
def test_a_part_of_a_word_or_number_is_not_the_fact(fact: object) -> None:
    assert unnamed(MESSAGE, 3, fact) == [str(fact)]


def test_a_refusal_without_the_fact_fails() -> None:
    with pytest.raises(AssertionError), refused(ValueError, "lab", 7):
        raise ValueError(MESSAGE)


def test_problems_begin_with_their_keys() -> None:
    assert keys([MESSAGE, "searcher.metric: got None; expected a name"]) == [
        "resources.slots_per_trial",
        "searcher.metric",
    ]


def test_a_warning_is_told_from_others_by_its_facts() -> None:
    with warned(UserWarning, "lab", 3):
        warnings.warn(MESSAGE, UserWarning, stacklevel=1)
    with pytest.raises(pytest.fail.Exception), warned(UserWarning), warned(UserWarning, "lab", 33):
        warnings.warn(MESSAGE, UserWarning, stacklevel=1)


@pytest.mark.parametrize("facts", [[], [[3], [7]], [["'lab'"], [4]], [[3, 2]]])
def test_each_message_has_facts_of_its_own(facts: list[list[object]]) -> None:
    messages = [MESSAGE, "searcher.metric: got None; expected a name"]
    each_names(messages, [3, "'lab'"], ["None"])
    with pytest.raises(AssertionError):
        each_names(messages, *facts)
