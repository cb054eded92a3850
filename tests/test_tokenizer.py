"""Text ↔ tokens as openai-whisper has them, in every kind of model and every language."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whisper import tokenizer as upstream

from asrmask import tokenizer
from asrmask.errors import OptionError
from asrmask.tokenizer.tokenizer import get_tokenizer

KINDS = {"english": (False, 99), "99 languages": (True, 99), "100 languages": (True, 100)}
SPECIALS = ["eot", "sot", "sot_prev", "sot_lm", "transcribe", "translate", "no_speech"]
SPECIALS += ["no_timestamps", "timestamp_begin"]
WORDS = ["hello", " world's", "...", " 3.14", "語", " ça", "\n", "👩‍👧", " ", "ไทย", "\u0301", "-"]
texts = st.lists(st.sampled_from(WORDS)).map("".join) | st.text().filter(lambda t: "<|" not in t)
single_bytes = st.integers(94, 255)  # tokens of one byte above 127: no characters alone


def both(kind, **options):
    """Our tokenizer and upstream's."""
    multilingual, num_languages = KINDS[kind]
    arguments = {"num_languages": num_languages, **options}
    return get_tokenizer(multilingual, **arguments), upstream.get_tokenizer(
        multilingual, **arguments
    )


def test_languages_and_their_names_are_upstreams():
    assert list(tokenizer.LANGUAGES.items()) == list(upstream.LANGUAGES.items())
    assert tokenizer.TO_LANGUAGE_CODE == upstream.TO_LANGUAGE_CODE


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_upstreams(kind):
    ours, theirs = both(kind)
    assert {name: getattr(ours, name) for name in SPECIALS} == {
        name: getattr(theirs, name) for name in SPECIALS
    }
    assert len(ours.vocabulary.tokens) == theirs.encoding.n_vocab
    assert ours.special("29.98") == theirs.special_tokens["<|29.98|>"]
    assert [ours.blank] == theirs.encode(" ")
    assert ours.non_speech_tokens == theirs.non_speech_tokens
    theirs_by_code = zip(theirs.all_language_codes, theirs.all_language_tokens, strict=True)
    assert ours.language_tokens == dict(theirs_by_code)
    ours_by_code = zip(ours.all_language_codes, ours.all_language_tokens, strict=True)
    assert ours.language_tokens == dict(ours_by_code)
    assert sorted(ours.language_tokens.values()) == list(ours.language_tokens.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", [None, "transcribe", "translate"])
def test_the_opening_tokens_are_upstreams(kind, task):
    n_languages = KINDS[kind][1]
    names = [*list(upstream.LANGUAGES)[:n_languages], "English", "CASTILIAN", "haitian creole"]
    for language in [None, *names]:
        ours, theirs = both(kind, language=language, task=task)
        assert ours.sot_sequence == theirs.sot_sequence
        assert (ours.language, ours.task) == (theirs.language, theirs.task)


def test_unknown_languages_and_tasks_are_refused():
    with pytest.raises(OptionError, match=r"language must be .* got Klingon"):
        get_tokenizer(True, language="Klingon")
    with pytest.raises(OptionError, match="task must be transcribe or translate, got sing"):
        get_tokenizer(True, task="sing")
    with pytest.raises(OptionError, match=r"yue needs a model of 100 languages .* got 99"):
        get_tokenizer(True, language="cantonese")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts)
def test_text_becomes_upstreams_tokens_and_comes_back(kind, text):
    ours, theirs = both(kind)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == text


def test_special_tokens_cannot_be_spelled():
    with pytest.raises(OptionError, match=r"must not spell special tokens, got <\|0.00\|>, <\|en"):
        get_tokenizer(True).encode("one <|en|> two <|0.00|>")


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_decoded_only_where_they_are_asked_for(kind):
    ours, theirs = both(kind)
    ids = [ours.sot, *ours.encode(" So."), ours.timestamp_begin + 54, ours.eot]
    assert ours.decode(ids) == theirs.decode(ids)
    assert "<|1.08|>" not in ours.decode(ids)
    assert ours.decode_with_timestamps(ids) == theirs.decode_with_timestamps(ids)
    assert "<|1.08|>" in ours.decode_with_timestamps(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_words_keep_the_space_before_them_and_punctuation_stands_alone(kind):
    ours, _ = both(kind)
    words, groups = ours.split_to_word_tokens([*ours.encode(" He was ill, then."), ours.eot])
    assert words == [" He", " was", " ill", ",", " then", ".", "<|endoftext|>"]
    assert [ours.decode(group) for group in groups] == words


@pytest.mark.parametrize("language", ["en", "fr", "zh", "ja", "th", "lo", "my", "yue"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts)
def test_words_are_upstreams(language, text):
    ours, theirs = both("100 languages", language=language)
    ids = [*ours.encode(text), ours.eot]
    assert ours.split_to_word_tokens(ids) == theirs.split_to_word_tokens(list(ids))


@pytest.mark.parametrize("language", ["en", "zh"])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(single_bytes | st.integers(0, 51_864), max_size=12))
def test_broken_characters_are_cut_as_upstream_does_or_where_it_fails_without_loss(language, ids):
    ours, theirs = both("99 languages", language=language)
    ids = [*ids, ours.eot]
    words, groups = ours.split_to_word_tokens(ids)
    try:
        assert (words, groups) == theirs.split_to_word_tokens(list(ids))
    except IndexError:  # several broken characters that are one in the whole text
        assert [token for group in groups for token in group] == ids


def test_more_broken_characters_than_the_whole_text_has_are_no_error():
    ours, theirs = both("99 languages", language="en")
    ids = [9613, 16623, 1787, 28788, 38438, 25450, 28428, 254]
    with pytest.raises(IndexError):
        theirs.split_to_word_tokens(list(ids))
    _, groups = ours.split_to_word_tokens(ids)
    assert [token for group in groups for token in group] == ids


def test_splitting_changes_nothing_that_it_is_given():
    ours = get_tokenizer(True)
    ids = ours.encode(" one two three")
    before = list(ids)
    ours.split_to_word_tokens(ids)
    assert ids == before


def test_tokens_are_split_into_whole_characters_as_upstream():
    tokens = [8404, 871, 287, 6, 246, 526, 3210, 20378]
    words, groups = get_tokenizer(True).split_tokens_on_unicode(tokens)
    assert words == [" elle", " est", " l", "'", "\ufffd", "é", "rit", "oire"]
    assert groups == [[token] for token in tokens]
    theirs = upstream.get_tokenizer(True)
    assert (words, groups) == theirs.split_tokens_on_unicode(tokens)
    on_spaces = get_tokenizer(True).split_tokens_on_spaces(tokens)
    assert on_spaces == theirs.split_tokens_on_spaces(tokens)
