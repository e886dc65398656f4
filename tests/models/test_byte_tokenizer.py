import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from etude.errors import EtudeError
from etude.models.tiny import SPECIAL_TOKENS, train_tokenizer
from etude.models.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return train_tokenizer(600)


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.sampled_from(["e\u0301", "\u212b", " a  b", "\r\n\t", "\u2126\u0308"]))
def test_a_text_comes_back_as_it_was(plain: Tokenizer, text: str) -> None:
    """Whatever the tokenizer does to characters elsewhere: Qwen's composes them."""
    composing = Tokenizer.from_str(plain.to_str())
    composing.normalizer = normalizers.NFC()
    tokens = ByteTokenizer(composing)
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert b"".join(tokens.token_bytes(token) for token in ids) == text.encode()
    assert not set(ids) & {tokens.special(content) for content in SPECIAL_TOKENS}


@pytest.mark.parametrize("content", SPECIAL_TOKENS)
def test_no_whole_word_is_looked_up_as_a_special_token(plain: Tokenizer, content: str) -> None:
    """`ignore_merges` takes a word that the vocabulary lists, and some list special tokens."""
    description = json.loads(plain.to_str())
    description["model"]["ignore_merges"] = True
    trap = Tokenizer.from_str(json.dumps(description))
    trap.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert content in description["model"]["vocab"]
    tokens = ByteTokenizer(trap)
    assert tokens.special(content) not in tokens.encode(content)
    assert tokens.decode(tokens.encode(content)) == content


def test_a_tokenizer_that_changes_the_text_is_refused(plain: Tokenizer) -> None:
    adding = Tokenizer.from_str(plain.to_str())
    adding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(EtudeError, match="does not give a text back"):
        ByteTokenizer(adding)
