"""A saved decoder is read back by transformers and by us, and a folder is complete or untouched."""

import json
import os
import re

import pytest
import torch
from safetensors import safe_open

from attn_variants import Decoder, DecoderConfig, GQAConfig
from attn_variants.checkpoints import save_decoder, weights
from tests.checkpoints.hf_models import MODELS, error, random_model, transformers

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 60, 0, 1]])


@pytest.fixture(params=MODELS)
def decoder(request, tmp_path):
    random_model(request.param).save_pretrained(tmp_path / "theirs")
    return Decoder.from_pretrained(tmp_path / "theirs")


@pytest.fixture
def small():
    attention = GQAConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    return Decoder(DecoderConfig(61, 2, 20, attention, tie_word_embeddings=True, eos_token_ids=(5, 7)))


@pytest.mark.parametrize("limit", [5_000_000_000, 20_000])
def test_transformers_reads_it_back(decoder, tmp_path, limit):
    save_decoder(decoder, tmp_path / "ours", max_shard_bytes=limit)
    files = {path.name for path in (tmp_path / "ours").iterdir()}
    assert ("model.safetensors.index.json" in files) == (limit == 20_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert error(decoder(IDS), theirs.eval()(IDS).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_read_it_back(decoder, tmp_path, dtype):
    decoder.to(dtype).save_pretrained(tmp_path / "ours")
    back = Decoder.from_pretrained(tmp_path / "ours")
    assert back.config == decoder.config
    assert torch.equal(back(IDS), decoder(IDS))
    assert back.dtype == dtype
    assert f"torch.{json.loads((tmp_path / 'ours' / 'config.json').read_text())['dtype']}" == str(dtype)


def test_shards_keep_to_the_limit_and_the_index_counts_them(small, tmp_path):
    save_decoder(small, tmp_path / "out", max_shard_bytes=6000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    total = 0
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            names = list(opened.keys())
            assert {name for name, where in index["weight_map"].items() if where == file} == set(names)
            size = sum(opened.get_tensor(name).nbytes for name in names)
        assert size <= 6000 or len(names) == 1
        total += size
    assert index["metadata"]["total_size"] == total == sum(p.nbytes for p in small.parameters())


def test_a_shared_weight_is_stored_once(small, tmp_path):
    small.save_pretrained(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert "model.embed_tokens.weight" in opened.keys()  # noqa: SIM118
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118
    assert Decoder.from_pretrained(tmp_path / "out").config.eos_token_ids == (5, 7)


def test_tokenizer_files_go_along(small, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (source / name).write_text(name)
    save_decoder(small, tmp_path / "out", tokenizer=source)
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {"config.json", "model.safetensors"}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_folder_with_a_checkpoint_is_left_alone(small, tmp_path):
    small.save_pretrained(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat()
    with pytest.raises(ValueError, match=r"holds a checkpoint already \(config\.json\); choose another folder"):
        small.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        small.save_pretrained(tmp_path / "file")


def test_other_files_of_a_folder_stay(small, tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    small.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "config.json", "model.safetensors"}
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_fails_leaves_nothing(small, tmp_path, monkeypatch, there):
    if there:
        (tmp_path / "out").mkdir()
    written = []

    def save_file(tensors, path, metadata):
        if written:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"half")
        written.append(path)

    monkeypatch.setattr(weights, "save_file", save_file)
    with pytest.raises(OSError, match="No space left"):
        save_decoder(small, tmp_path / "out", max_shard_bytes=6000)
    assert written
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == (["out"] if there else [])


def test_what_no_transformers_class_computes_is_refused_before_a_file_is_written(tmp_path):
    attention = GQAConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8, rope=None)
    with pytest.raises(ValueError, match=re.escape("rope")):
        Decoder(DecoderConfig(61, 2, 20, attention)).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_without_room_is_refused(small, tmp_path, limit):
    with pytest.raises(ValueError, match=rf"max_shard_bytes \({limit}\) must be positive"):
        save_decoder(small, tmp_path / "out", max_shard_bytes=limit)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_files_are_as_readable_as_their_folder(small, tmp_path):
    old = os.umask(0o022)
    try:
        small.save_pretrained(tmp_path / "out")
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}
