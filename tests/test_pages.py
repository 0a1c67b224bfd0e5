"""What notebooks show: source, pictures, and a mistake before the properties."""

import pytest
from matplotlib.figure import Figure

from minitransformer import pages
from minitransformer.attention.softmax import softmax_backward


def test_source_is_the_librarys_own_with_its_place():
    shown = pages.source(softmax_backward)
    assert shown.text.startswith("`minitransformer/attention/softmax.py`\n```python\ndef softmax_b")
    assert repr(shown) == shown._repr_markdown_() == shown.text


def test_a_trial_says_who_notices_and_who_does_not_the_same_every_time():
    text = pages.trial("attention.softmax", "dead row not guarded").text
    assert "| `weights_sum_to_one_or_to_zero` | **caught**: a dead row" in text
    assert "| `a_common_shift_changes_nothing` | passes |" in text
    assert text == pages.trial("attention.softmax", "dead row not guarded").text


def test_a_mutant_that_crashes_is_caught_and_the_page_goes_on():
    text = pages.trial("attention.dense", "key heads tiled instead of repeated").text
    assert "**caught**: it crashes, IndexError" in text


def test_an_unknown_mutant_is_told_the_known_ones():
    with pytest.raises(KeyError, match=r"no mutant 'axis forgotten', but: .*axis ignored"):
        pages.mutant("attention.softmax", "axis forgotten")


def test_a_picture_is_a_png_with_a_sentence():
    picture = pages.Picture(Figure(), "nothing yet")
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert repr(picture) == "Picture: nothing yet"


def test_a_peer_that_is_not_there_says_so(capsys):
    assert pages.peer("no_such_library") is None
    assert "no_such_library is not installed: make verify-peers" in capsys.readouterr().out
