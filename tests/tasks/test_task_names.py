"""Names of tasks: parsed once, with whatever pivot."""

import pytest

from gradvac import tasks


def test_parts_of_a_direction() -> None:
    assert tasks.parse("en-fr") == ("en", "fr")
    assert tasks.parse("en-fr").turned.name == tasks.turned("en-fr") == "fr-en"
    assert tasks.languages_of("fr-en") == ("fr", "en")
    assert tasks.turned("parsing") == "parsing"
    assert tasks.languages_of("parsing") == ("parsing",)


@pytest.mark.parametrize("name", ["", "-", "fr", "fr-", "-fr", "fr-fr", "a-b-c"])
def test_other_names_are_no_directions(name: str) -> None:
    assert tasks.find_direction(name) is None
    assert tasks.direction_of(name) == ""
    with pytest.raises(ValueError, match="two different codes"):
        tasks.parse(name)


@pytest.mark.parametrize(
    ("names", "pivot"),
    [
        (["en-fr", "en-cs"], "en"),
        (["de-fr", "cs-de", "de-hi"], "de"),
        (["en-fr", "fr-en"], "en"),
        (["de-fr", "fr-de"], "de"),
        (["fr-de"], ""),  # either could be
        (["fr-en"], "en"),
        (["fr-cs", "cs-de", "de-fr"], "en"),  # no language is in all
        (["fr", "de"], "en"),
        ([], "en"),
    ],
)
def test_the_pivot_is_the_language_that_all_tasks_share(names: list[str], pivot: str) -> None:
    assert tasks.pivot_of(names) == pivot


@pytest.mark.parametrize("pivot", ["en", "de"])
def test_directions_are_those_of_the_pivot(pivot: str) -> None:
    out, back = [f"{pivot}-fr", f"{pivot}-cs"], [f"fr-{pivot}", f"cs-{pivot}"]
    assert tasks.by_direction([*back, *out]) == {f"xx-{pivot}": back, f"{pivot}-xx": out}
    assert tasks.both_ways([*out, *back]) == (pivot, back, out)
    assert tasks.both_ways([*out, back[0]]) is None
    assert tasks.labels(out) == tasks.labels(back) == ["fr", "cs"]
    assert tasks.labels([*out, *back]) == [*out, *back]
    assert tasks.other_languages([*out, *back]) == ["fr", "cs", "fr", "cs"]
    assert tasks.directions(out) == [("", out)]
    assert [tasks.is_into_pivot(name) for name, _ in tasks.directions([*back, *out])] == [
        True,
        False,
    ]


def test_tasks_that_are_no_directions_keep_their_names() -> None:
    assert tasks.labels(["tag", "parse"]) == ["tag", "parse"]
    assert tasks.labels(["en-fr", "fr-de", "de-cs"]) == ["en-fr", "fr-de", "de-cs"]
    assert not tasks.are_directions(["en-fr", "tag"])
