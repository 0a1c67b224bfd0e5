"""What notebooks show: source, pictures, and a mistake before the properties."""

import base64
import json
import re
from html.parser import HTMLParser

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


def test_a_slider_carries_every_picture_in_the_order_of_its_labels():
    def figure(width):
        return Figure(figsize=(width, 1))

    frames = {(a, b): figure(1 + i + 2 * j) for i, a in enumerate("xy") for j, b in enumerate("12")}
    slider = pages.Slider(["first", "second"], frames, 'of "widths" < 5', dpi=10)
    text = slider._repr_html_()
    pictures = json.loads(re.search(r"pictures = (\[.*?\])", text)[1])
    # bytes 16 to 20 of a PNG are its width
    widths = [int.from_bytes(base64.b64decode(p)[16:20], "big") for p in pictures]
    assert widths == [10, 30, 20, 40]
    assert json.loads(re.search(r"labels = (\[\[.*?\]\])", text)[1]) == [["x", "y"], ["1", "2"]]
    assert repr(slider) == 'Slider over first and second: of "widths" < 5'
    assert (
        text == pages.Slider(["first", "second"], frames, 'of "widths" < 5', dpi=10)._repr_html_()
    )


def test_a_slider_is_well_formed_and_asks_for_nothing_from_outside():
    slider = pages.Slider(
        ["<s>"], {("</script>",): Figure(), ("b",): Figure()}, "a picture", dpi=10
    )
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            seen.append((tag, dict(attributes)))

    Reader().feed(slider._repr_html_())
    tags = [tag for tag, _ in seen]
    assert tags == ["div", "label", "input", "output", "img", "script"]
    assert seen[4][1]["alt"] == "a picture"
    assert seen[4][1]["src"].startswith("data:image/png;base64,")
    assert "http" not in slider._repr_html_()


def test_a_slider_without_one_of_its_pictures_is_refused():
    frames = {("a", "1"): Figure(), ("b", "2"): Figure()}
    with pytest.raises(ValueError, match=r"frames has no picture for \('a', '2'\)"):
        pages.Slider(["first", "second"], frames, "a hole")
