"""A folder's tokenizer.json and chat template give the ids that transformers gives."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from attn_variants.checkpoints import load_tokenizer

TEXTS = ["", " ", "hello world", "low lower lowest", "Zürich 🙂", "<s>hello</s>", "a\n\n b", "12 345"]
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="session")
def backend():
    """A byte-level BPE that puts <s> before every text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken("<s>", special=True), AddedToken("</s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world", "low lower lowest"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def folder(backend, tmp_path):
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": CHAT,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_transformers(folder, text):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_conversation_begins_with_one_begin_of_text(folder):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "low"}]
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.chat(messages)
    assert tokenizer.decode(ids) == tokenizer.render(messages) == "<s>user: hello</s>assistant: low</s>"
    assert ids.count(tokenizer.token_id("bos_token")) == 1
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_special_tokens_are_read_from_texts_and_objects(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert [tokenizer.token_id(name) for name in ("bos_token", "eos_token", "pad_token")] == [0, 1, None]


def test_special_tokens_may_lie_in_a_map_of_their_own(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(folder).token_id("eos_token") == 1


def test_the_template_file_goes_before_the_field(folder):
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(folder).render([]) == "from the file"


def test_of_several_named_templates_the_default_is_used(folder):
    named = [{"name": "rag", "template": "documents"}, {"name": "default", "template": "plain"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(folder).render([]) == "plain"


def test_a_length_limit_in_the_file_does_not_cut_a_prompt(folder, backend):
    limited = tokenizers.Tokenizer.from_str(backend.to_str())
    limited.enable_truncation(max_length=4)
    limited.enable_padding(length=50)
    limited.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("hello world " * 9) == backend.encode("hello world " * 9).ids


def test_without_a_template_a_chat_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no chat template .*give plain text instead"):
        load_tokenizer(folder).chat([{"role": "user", "content": "hello"}])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused_by_name(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00"])
def test_a_broken_tokenizer_config_is_refused_by_name(folder, text):
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)
