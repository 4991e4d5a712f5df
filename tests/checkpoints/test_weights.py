"""A transformers folder loads into our decoder: the same logits, every tensor used or named, nothing junk."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from attn_variants import Decoder
from attn_variants.cache import KVCache
from tests.checkpoints.hf_models import MODELS, error, random_model, transformers

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 60, 0, 1], [58, 2, 2, 3, 8, 4, 6, 2, 6, 4, 33]])


@pytest.fixture
def save(tmp_path):
    """Write a transformers model into a folder."""

    def saved(name, **options):
        model = random_model(name)
        if dtype := options.pop("dtype", None):
            model.to(dtype)
        model.save_pretrained(tmp_path, **options)
        return model, tmp_path

    return saved


def rewrite(folder, change):
    """Change the tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def edit(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard", [None, "20KB"])
def test_logits_are_those_of_transformers(save, name, shard):
    model, folder = save(name, **({"max_shard_size": shard} if shard else {}))
    assert (
        len(list(folder.glob("*.safetensors"))) == 1 if shard is None else len(list(folder.glob("*.safetensors"))) > 2
    )
    decoder = Decoder.from_pretrained(folder)
    assert decoder.dtype == torch.float32
    assert error(decoder(IDS), model(IDS).logits) < 1e-5


def test_layer_types_of_a_mistral_are_honoured_as_transformers_does(save):
    """Its AutoModel takes a mistral with layer types for a ministral."""
    model, folder = save("mistral-windows")
    edit(folder, layer_types=["full_attention", "sliding_attention", "full_attention"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == "MinistralForCausalLM"
    assert error(Decoder.from_pretrained(folder)(IDS), theirs(IDS).logits) < 1e-5
    assert error(model(IDS).logits, theirs(IDS).logits) > 1e-2


@pytest.mark.parametrize("name", [name for name in MODELS if "windows" in name])
@torch.no_grad()
def test_windows_reach_back_as_far_in_a_cache_of_rings_as_in_transformers(save, name):
    model, folder = save(name)
    decoder = Decoder.from_pretrained(folder)
    cache = KVCache(decoder.cache_specs, batch=2, capacity=IDS.shape[1], dtype=decoder.dtype, store="ring")
    logits = [decoder(IDS[:, :3], cache), *(decoder(IDS[:, t : t + 1], cache) for t in range(3, IDS.shape[1]))]
    assert error(torch.cat(logits, dim=1), model(IDS).logits) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_bfloat16_checkpoint_stays_bfloat16(save, name):
    model, folder = save(name, dtype=torch.bfloat16)
    decoder = Decoder.from_pretrained(folder)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.bfloat16}
    for ours, weight in decoder.named_parameters():
        torch.testing.assert_close(weight, model.state_dict()[ours], rtol=0, atol=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert error(Decoder.from_pretrained(folder, dtype="float32")(IDS), theirs(IDS).logits) < 1e-5


@pytest.mark.parametrize("dtype", ["float64", "bf16", torch.float16])
def test_a_dtype_can_be_asked_for(save, dtype):
    _, folder = save("llama")
    expected = {"float64": torch.float64, "bf16": torch.bfloat16}.get(dtype, dtype)
    assert Decoder.from_pretrained(folder, dtype=dtype).dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int64])
def test_a_dtype_that_holds_no_weights_is_refused(save, dtype):
    _, folder = save("llama")
    with pytest.raises(ValueError, match=r"cannot hold a decoder's weights; those that can are float64, float32"):
        Decoder.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("named", [{"dtype": None}, {"dtype": "auto"}, {"dtype": None, "torch_dtype": None}])
def test_without_a_named_dtype_the_tensors_decide(save, named):
    _, folder = save("llama", dtype=torch.float16)
    edit(folder, **named)
    assert Decoder.from_pretrained(folder).dtype == torch.float16


def test_the_older_name_of_the_dtype_is_read(save):
    _, folder = save("llama")
    edit(folder, dtype=None, torch_dtype="bfloat16")
    assert Decoder.from_pretrained(folder).dtype == torch.bfloat16


def test_a_tied_head_is_one_tensor_with_the_embedding(save):
    _, folder = save("llama-tied")
    decoder = Decoder.from_pretrained(folder)
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(decoder.named_parameters())


def test_nothing_stays_on_the_meta_device_and_everything_can_be_trained(save):
    _, folder = save("llama")
    decoder = Decoder.from_pretrained(folder)
    assert not any(tensor.is_meta for tensor in (*decoder.parameters(), *decoder.buffers()))
    decoder(IDS).sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_the_files_can_go_once_the_weights_are_loaded(save):
    """The weights are a copy: a file that is cut under a memory map would end the process."""
    _, folder = save("llama")
    decoder = Decoder.from_pretrained(folder)
    before = decoder(IDS)
    os.truncate(folder / "model.safetensors", 0)
    assert torch.equal(decoder(IDS), before)


def test_a_tied_head_that_is_also_stored_is_fine_when_equal(save):
    model, folder = save("llama-tied")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    decoder = Decoder.from_pretrained(folder)
    assert decoder.config.tie_word_embeddings
    assert error(decoder(IDS), model(IDS).logits) < 1e-5


def test_a_head_that_differs_from_its_embedding_is_used_with_a_warning(save):
    model, folder = save("llama")
    edit(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from it and is used"):
        decoder = Decoder.from_pretrained(folder)
    assert not decoder.config.tie_word_embeddings
    assert error(decoder(IDS), model(IDS).logits) < 1e-5


def test_an_untied_head_that_is_missing_is_named_with_the_remedy(save):
    _, folder = save("llama-tied")
    edit(folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight; .*needs tie_word_embeddings true"):
        Decoder.from_pretrained(folder)


def test_missing_tensors_are_named(save):
    _, folder = save("llama")
    names = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
    rewrite(folder, lambda t: [t.pop(name) for name in names])
    with pytest.raises(ValueError, match="missing tensors: ") as failure:
        Decoder.from_pretrained(folder)
    assert all(name in str(failure.value) for name in names)


def test_unexpected_tensors_are_named(save):
    _, folder = save("llama")
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda t: t.update({name: torch.zeros(3)}))
    with pytest.raises(ValueError, match=f"unexpected tensors: {re.escape(name)}"):
        Decoder.from_pretrained(folder)


def test_of_many_names_the_first_are_told_and_the_rest_counted(save):
    _, folder = save("llama")
    edit(folder, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"missing tensors: model\.layers\.3\.\S+, .* and 10 more;"):
        Decoder.from_pretrained(folder)


def test_old_rotary_buffers_are_ignored(save):
    model, folder = save("llama")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}))
    assert error(Decoder.from_pretrained(folder)(IDS), model(IDS).logits) < 1e-5


def test_a_wrong_shape_is_named_with_both(save):
    _, folder = save("llama")
    edit(folder, intermediate_size=41)
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj\.weight \(\(41, 48\) by config\.json, \(40, 48\) in the file\)"
    ):
        Decoder.from_pretrained(folder)


def test_a_quantised_tensor_is_refused_by_name(save):
    _, folder = save("llama")
    rewrite(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    with pytest.raises(ValueError, match=r"tensors that are no plain floats: model\.norm\.weight \(I8\)"):
        Decoder.from_pretrained(folder)


def test_a_missing_shard_is_refused(save):
    _, folder = save("llama", max_shard_size="20KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=rf"lacks {re.escape(gone.name)}: expected \d+ shards with \d+ bytes"):
        Decoder.from_pretrained(folder)


def test_a_truncated_shard_is_refused(save):
    _, folder = save("llama", max_shard_size="20KB")
    cut = sorted(folder.glob("*.safetensors"))[1]
    size = cut.stat().st_size
    os.truncate(cut, size - 100)
    with pytest.raises(
        ValueError, match=rf"{re.escape(cut.name)} is broken off: expected {size} bytes, found {size - 100}"
    ):
        Decoder.from_pretrained(folder)


def test_no_single_wrong_byte_in_the_header_ends_otherwise_than_in_a_clear_error(save):
    """What this package does not see, such as extents that overlap, the format's own library refuses."""
    _, folder = save("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    refused = 0
    for at in range(8, 8 + length, 37):
        broken = bytearray(whole)
        broken[at] ^= 0x03
        path.write_bytes(bytes(broken))
        try:
            Decoder.from_pretrained(folder)
        except ValueError:
            refused += 1
    assert refused > length // 37 * 0.9


def test_extents_that_overlap_are_refused(save):
    _, folder = save("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(ValueError, match=r"model\.safetensors has a corrupted header"):
        Decoder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, [7, 9], (7, 9)),
        ([7, 9], 7, (7, 9)),
        (None, [9, 8], (9, 8)),
        (7, None, (7,)),
        (7, "missing", (7,)),
        ([7], "no file", (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_are_united(save, config, generation, expected):
    _, folder = save("llama")
    edit(folder, eos_token_id=config)
    path = folder / "generation_config.json"
    if generation == "no file":
        path.unlink()
    else:
        path.write_text(json.dumps({} if generation == "missing" else {"eos_token_id": generation}))
    assert Decoder.from_pretrained(folder).config.eos_token_ids == expected


@pytest.mark.parametrize("value", [True, "2", [1, None], -1, {"id": 2}, 2.0])
def test_an_end_token_that_is_none_is_refused(save, value):
    _, folder = save("llama")
    edit(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id"):
        Decoder.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_json_file_is_refused_by_name(save, name, text):
    _, folder = save("llama")
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(name)):
        Decoder.from_pretrained(folder)


def test_a_folder_without_config_or_at_all_is_refused(save, tmp_path):
    _, folder = save("llama")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        Decoder.from_pretrained(folder)
    with pytest.raises(ValueError, match="is no folder"):
        Decoder.from_pretrained(tmp_path / "nowhere")


@pytest.mark.cuda
def test_weights_can_go_straight_to_the_gpu(save):
    model, folder = save("llama")
    decoder = Decoder.from_pretrained(folder, device="cuda")
    assert decoder.device.type == "cuda"
    assert error(decoder(IDS.cuda()).cpu(), model(IDS).logits) < 1e-5
