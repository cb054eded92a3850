"""Policies: the text form, and what is refused."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrmask.audio import constants
from asrmask.audio.constants import N_POSITIONS
from asrmask.errors import OptionError
from asrmask.model import policy
from asrmask.model.policy import KINDS, Policy

fills = st.one_of(
    st.sampled_from(["zero", "silence"]),
    st.integers(-120, 0).map(lambda level: f"noise:{level}"),
)


@st.composite
def policies(draw):
    kind = draw(st.sampled_from(KINDS))
    margin = 0.0 if kind == "full" else draw(st.floats(0, 30))
    if kind == "virtual":
        return Policy(kind, margin)
    positions = draw(st.sampled_from(["first", "last"]))
    sink = 0.0 if kind == "full" or positions == "last" else draw(st.floats(0, 30))
    return Policy(kind, margin, draw(fills), positions, sink)


def test_examples_in_the_docstrings():
    assert doctest.testmod(policy).failed == 0


@given(policies())
def test_the_text_form_is_read_back(one):
    assert Policy.parse(str(one)) == one


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("full", "full"),
        ("mask:both,margin=0", "mask:both"),
        ("trim, margin=1.280, positions=last", "trim,margin=1.28,positions=last"),
        ("virtual,margin=0.64", "virtual"),
        ("virtual,margin=0", "virtual,margin=0"),
        ("trim,sink=0.50,margin=1.28", "trim,margin=1.28,sink=0.5"),
        ("mask:cross,sink=1.0,fill=silence", "mask:cross,fill=silence,sink=1"),
        ("virtual,sink=0", "virtual"),
        ("full,fill=noise:-40", "full,fill=noise:-40"),
    ],
)
def test_one_policy_has_one_text(text, canonical):
    assert str(Policy.parse(text)) == canonical


def test_the_default_is_upstream():
    assert Policy() == Policy.parse("full") == Policy("full", 0.0, "zero", "first")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("masked", "full, mask:encoder, mask:cross, mask:both, trim, virtual"),
        ("", "full, mask:encoder"),
        ("trim,margin=-1", r"margin must be 0\.\.30 seconds, got -1"),
        ("trim,margin=31", r"margin must be 0\.\.30 seconds, got 31"),
        ("trim,margin=nan", r"margin must be 0\.\.30 seconds, got nan"),
        ("trim,margin=much", r"margin must be 0\.\.30 seconds, got 'much'"),
        ("trim,edge=1", r"margin=0\.\.30 .*got 'edge=1'"),
        ("trim,margin=1,margin=2", "got 'margin=2'"),
        ("trim,fill=ones", r"fill must be zero, silence or noise:DB with DB in -120\.\.0"),
        ("trim,fill=noise:loud", "noise:DB"),
        ("trim,fill=noise:3", "noise:DB"),
        ("trim,positions=middle", "positions must be first or last, got 'middle'"),
        ("full,margin=1", "margin is for mask:encoder, mask:cross, mask:both, trim, virtual"),
        ("virtual,fill=silence", "virtual padding must be fill=zero,positions=first"),
        ("virtual,positions=last", "virtual padding must be fill=zero,positions=first"),
        ("trim,sink=31", r"sink must be 0\.\.30 seconds, got 31"),
        ("trim,sink=much", r"sink must be 0\.\.30 seconds, got 'much'"),
        ("full,sink=1", "sink is for mask:encoder, mask:cross, mask:both, trim with positions=fir"),
        ("virtual,sink=1", r"positions=first, got sink=1\.0 with virtual,positions=first"),
        ("trim,sink=1,positions=last", r"got sink=1\.0 with trim,positions=last"),
    ],
)
def test_a_bad_value_gets_one_line_that_lists_what_is_allowed(text, told):
    with pytest.raises(OptionError, match=told) as caught:
        Policy.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("margin", ["1", True, float("inf")])
def test_a_margin_is_a_number(margin):
    with pytest.raises(OptionError, match=r"margin must be 0\.\.30 seconds"):
        Policy("trim", margin)


def test_units_are_those_of_the_front_end():
    frames = constants.FRAMES_PER_POSITION
    assert frames * constants.POSITIONS_PER_SECOND == constants.FRAMES_PER_SECOND
    assert frames * constants.N_POSITIONS == constants.N_FRAMES


def test_visible_positions():
    assert Policy("trim").visible(300) == 300
    assert Policy("trim", 0.16).visible(300) == 308
    assert Policy("trim", 30).visible(300) == N_POSITIONS
    assert [Policy("virtual", 0.0).visible(n) for n in (300, 320, 1490)] == [320, 320, N_POSITIONS]
    assert Policy("trim", sink=0.5).visible(300) == 300  # those behind the margin do not count
    assert Policy("trim", sink=0.5).sink_positions == 25
    assert Policy("trim").visible(0) == 1  # a window of nothing but padding shows some of it


def test_seconds_of_padding():
    assert Policy().padding_s(500) == (20.0, 0.0)
    assert Policy("mask:both").padding_s(500) == (20.0, 0.0)  # hidden, but computed
    assert Policy("trim", 1.0).padding_s(500) == (1.0, 19.0)
    assert Policy("trim", 1.0, sink=0.5).padding_s(500) == (1.5, 18.5)
    assert Policy("trim", 1.0, sink=20).padding_s(500) == (20.0, 0.0)  # they meet
    assert Policy("mask:both", sink=0.5).padding_s(500) == (20.0, 0.0)
    assert Policy("virtual").padding_s(1500) == (0.0, 0.0)
