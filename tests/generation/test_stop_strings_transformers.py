"""Stop strings end a text at the token at which transformers' own end it, but where ours differ on purpose."""

import copy
from random import Random

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from attn_variants.generation import Lookup, ModelDraft, Stopping, generate

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

from transformers.generation.stopping_criteria import StopStringCriteria  # noqa: E402

from attn_variants.bench.peers import transformers_twin  # noqa: E402
from tests.generation.rounds import model_of  # noqa: E402
from tests.generation.test_text import KINDS  # noqa: E402
from tests.generation.theirs import theirs  # noqa: E402

CORPUS = [
    "The cat sat on the mat. The dog sat on the log.\n\nThe end.",
    "Zürich, naïve café — “quoted” … 日本語の文字 🙂🙂 👩‍👩‍👧‍👦",
    '{"name": "value", "list": [1, 22, 333]}</s></s> ### ### User: ### Assistant:',
]


def byte_level():
    """Byte-level BPE that has learned those texts: tokens of many characters, and some that end inside of one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZER = byte_level()
IDS = st.integers(0, len(TOKENIZER) - 1)


def decode(ids):
    return TOKENIZER.backend_tokenizer.decode(list(ids), skip_special_tokens=False)


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def until_theirs(ids, strings, tokenizer=TOKENIZER):
    """How many of these ids their criterion lets a sequence have; None where it never ends it."""
    ends = StopStringCriteria(tokenizer, list(strings))
    return next((count for count in range(1, len(ids) + 1) if ends(torch.tensor([ids[:count]]), None)), None)


def until_ours(ids, strings, decode=decode):
    watch = Stopping(len(ids) + 1, eos=(), strings=strings).watch(decode)
    for token in ids:
        if watch.push(token):
            assert watch.reason == "string"
            assert watch.text == decode(ids).partition(watch.matched)[0]
            return len(watch.ids)
    return None


@pytest.mark.parametrize(
    ("text", "strings", "kept"),
    [
        ("The cat sat on the mat.", ["cat"], "The "),
        ("The cat sat on the mat.", ["t s"], "The ca"),
        ("The cat sat on the mat.", ["at"], "The c"),
        ("The cat sat on the mat.", ["the mat", "on the mat", "at."], "The cat sat "),
        ("aaaaab", ["aab"], "aaa"),
        ("ababac", ["abac"], "ab"),
        ("The end.\n\nThe end.", ["\n\n"], "The end."),
        ("naïve café — x", ["é"], "naïve caf"),
        ("naïve café — x", ["— "], "naïve café "),
        ("日本語の文字", ["語の"], "日本"),
        ("🙂🙂 x", ["🙂 "], "🙂"),
        ("👩‍👩‍👧‍👦.", ["‍👧"], "👩‍👩"),
        ("### User: hi", [" User:", "###"], ""),
        ("no such text", ["zzz"], None),
    ],
)
def test_a_text_ends_at_their_token(text, strings, kept):
    ids = encode(text)
    count = until_theirs(ids, strings)
    assert until_ours(ids, strings) == count
    assert (count is None) == (kept is None)
    if kept is not None:
        watch = Stopping(99, eos=(), strings=strings).watch(decode)
        assert [watch.push(token) for token in ids[:count]][-1] == "string"
        assert watch.text == kept


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(IDS.map(lambda id: [id]), st.sampled_from(CORPUS).map(encode)), min_size=1, max_size=6),
    st.data(),
)
def test_any_ids_end_at_their_token_at_any_part_of_their_text(parts, data):
    """Any bytes among them: a string of whole characters is found in bytes where it is found in text."""
    ids = [token for part in parts for token in part]
    text, strings = decode(ids), []
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, len(text) - 1))
        string = text[start : start + data.draw(st.integers(1, 8))].replace("\ufffd", "")
        strings.append(string or "the")
    assert until_ours(ids, strings) == until_theirs(ids, strings)


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_where_a_tokenizer_drops_the_first_space_it_is_in_no_text_of_ours(kind):
    """Words that begin with ▁: theirs takes the first one's for a space, which no decoded text has."""
    known = KINDS[kind]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=known.backend)
    hello, world, end = (known.backend.token_to_id(word) for word in ("▁hello", "▁world", "t"))
    for string, mine, their in ((" ", 2, 1), (" wor", 2, 2), ("dt", 3, 3), ("o w", 2, 2), (" hello", None, 1)):
        assert until_ours([hello, world, end], [string], known.decode) == mine
        assert until_theirs([hello, world, end], [string], tokenizer) == their
    random = Random(3)
    for _ in range(60):
        ids = [random.randrange(257, known.backend.get_vocab_size()) for _ in range(random.randrange(2, 20))]
        # Also a character in bytes, whose ids are one more than these.
        ids[1:1] = [1 + byte for byte in "é".encode()]
        text = known.decode(ids)
        start = random.randrange(1, len(text))
        string = text[start : start + random.randrange(1, 5)].replace("\ufffd", "").strip() or "é"
        assert until_ours(ids, [string], known.decode) == until_theirs(ids, [string], tokenizer)


SENTENCE = list(dict.fromkeys(encode("The cat sat on 日本語の mat. ### User: naïve “quoted” 🙂 dog")))
TEXT = decode(SENTENCE)
NEVER = next(id for id in range(1, 99) if id not in SENTENCE)


def writer():
    """A decoder that writes SENTENCE again and again, each token's successor being what its embedding points at."""
    model = copy.deepcopy(model_of("gqa", layers=1, vocab_size=len(TOKENIZER))).float()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1)
        elif "embed" not in name:
            parameter.data.zero_()
    towards = torch.nn.functional.normalize(model.model.embed_tokens.weight.data[SENTENCE], dim=1)
    model.lm_head.weight.data[[*SENTENCE[1:], SENTENCE[0]]] = towards
    return model


@pytest.fixture(scope="module")
def writers():
    model = writer()
    return transformers_twin(model), model


def ours(model, prompts, *strings, draft=None):
    stopping = Stopping(40, eos=(), strings=strings)
    return generate(model, prompts, stopping=stopping, draft=draft, decode=decode)


@pytest.mark.parametrize(
    "strings",
    [["sat"], ["a"], ["日本語"], ["本語の m"], ["ve “q", "User:"], ["🙂"], ["dogThe c"], ["not there"]],
    ids=str,
)
def test_a_batch_ends_at_their_tokens_row_by_row(writers, strings):
    """The ids are theirs; our text ends before the string, and theirs, of all ids, behind it.

    Theirs needs an end token, be it one that never comes: without, a row that has ended goes on while others do.
    """
    peer, model = writers
    prompts = [SENTENCE[:4], SENTENCE[5:6], SENTENCE[9:12]]
    given = {"max_new_tokens": 40, "stop_strings": strings, "tokenizer": TOKENIZER}
    said = theirs(peer, prompts, eos=NEVER, **given)
    for result, row, prompt in zip(ours(model, prompts, *strings), said, prompts, strict=True):
        assert list(result.ids) == row[: result.new_tokens]
        assert not any(row[result.new_tokens :])
        following = SENTENCE.index(prompt[-1]) + 1
        assert list(result.ids) == (SENTENCE * 9)[following : following + result.new_tokens]
        written = decode(result.ids)
        if strings == ["not there"]:
            assert (result.reason, result.text) == ("length", written)
        else:
            assert result.reason == "string"
            assert result.text == written[: written.index(result.matched)]


def test_a_string_that_begins_in_the_prompt_is_theirs_alone(writers):
    """Ours looks at what was generated, and goes on to where the sentence comes round again."""
    peer, model = writers
    cut = TEXT.index("sat on")
    prompt = SENTENCE[:3]
    assert decode(prompt) == TEXT[: cut + 3]
    (said,) = theirs(peer, [prompt], max_new_tokens=40, stop_strings=["at on"], tokenizer=TOKENIZER)
    assert decode(said) == " on"
    (result,) = ours(model, [prompt], "at on")
    assert result.new_tokens == len(SENTENCE) + 1
    assert result.text == TEXT[cut + 3 :] + TEXT[: cut + 1]


def test_inside_an_accepted_block_theirs_goes_past_the_string_and_ours_does_not(writers):
    """Theirs looks at the end of a block alone (its `_assisted_decoding` says so): one that the block hides is missed.

    And with an assistant model it refuses stop strings, as it does not hand the tokenizer on.
    """
    peer, model = writers
    prompt = SENTENCE * 2
    given = {"max_new_tokens": 40, "stop_strings": ["sat"], "tokenizer": TOKENIZER}
    (plain,) = theirs(peer, [prompt], **given)
    assert plain == SENTENCE[: len(plain)]
    for draft in (Lookup(8), ModelDraft(model, 6)):
        (result,) = ours(model, [prompt], "sat", draft=draft)
        assert list(result.ids) == plain
        assert result.rounds.accepted
    (past,) = theirs(peer, [prompt], prompt_lookup_num_tokens=8, **given)
    assert len(past) > len(plain)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        theirs(peer, [prompt], assistant_model=peer, **given)
