"""Published models, with integers worked by hand from their sizes."""

import subprocess
import sys
from typing import Any

import pytest

from attn_variants.architectures import PRESETS, Architecture, architecture, decoder_config, preset
from attn_variants.architectures.strided import strided_entries

EMPTY = {"mlp", "moe"}


def growth(found: Architecture) -> int:
    """Bytes in bfloat16 that a token costs once it is past every window."""
    return sum(2 * spec.numel_per_token for spec in found.layers if spec.window is None and spec.chunk is None)


def ideal(found: Architecture, context: int) -> int:
    """Bytes in bfloat16 of what one sequence's newest token can read."""
    return sum(2 * spec.numel_per_token * spec.visible_tokens(context) for spec in found.layers)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("smollm2-135m", 2 * 30 * 3 * 64 * 2),
        ("tinyllama-1.1b", 2 * 22 * 4 * 64 * 2),
        ("mixtral-8x7b", 131_072),
        ("mistral-7b-v0.3", 131_072),
        ("mistral-7b-v0.1", 0),
        ("qwen2.5-7b", 57_344),
        ("qwen3-0.6b", 114_688),
        ("qwen3-4b", 147_456),
        ("qwen3-235b-a22b", 2 * 94 * 4 * 128 * 2),
        ("phi-4", 2 * 40 * 10 * 128 * 2),
        ("falcon-7b", 8192),
        ("falcon-40b", 2 * 60 * 8 * 64 * 2),
        ("olmo-2-7b", 524_288),
        ("gemma-2b", 2 * 18 * 1 * 256 * 2),
        ("gemma-2-9b", 2 * 21 * 8 * 256 * 2),
        ("gemma-3-27b", 2 * 10 * 16 * 128 * 2),
        ("gpt-oss-20b", 24_576),
        ("gpt-oss-120b", 36_864),
        ("llama-4-scout", 2 * 12 * 8 * 128 * 2),
        ("mimo-v2-flash", 9 * 4 * (192 + 128) * 2),
        ("deepseek-v2-lite", 31_104),
        ("deepseek-v3", 70_272),
        ("kimi-k2", 70_272),
        ("deepseek-v3.2", 61 * (576 + 128) * 2),
        ("glm-5", 78 * (576 + 128) * 2),
        ("glm-5.2", (78 * 576 + 21 * 128) * 2),
        ("kimi-k3", 24 * 576 * 2),
        ("qwen3.5-27b", 2 * 16 * 4 * 256 * 2),
        ("nemotron-3-nano-30b-a3b", 2 * 6 * 2 * 128 * 2),
        ("gemma-3n-e4b", 2 * 4 * 2 * 256 * 2),
        ("gemma-4-26b-a4b", 2 * 5 * 2 * 512 * 2),
        ("longcat-flash", 2 * 28 * 576 * 2),
    ],
)
def test_what_a_token_costs_in_the_long_run(name: str, bytes_per_token: int) -> None:
    assert growth(architecture(name)) == bytes_per_token


@pytest.mark.parametrize(
    ("name", "layers", "limit"),
    [
        ("mistral-7b-v0.1", 32, 4096),
        ("gemma-2-9b", 21, 4096),
        ("gemma-3-1b", 22, 512),
        ("gemma-3-27b", 52, 1024),
        ("gpt-oss-20b", 12, 128),
        ("llama-4-scout", 36, 8192),
    ],
)
def test_windows_and_chunks(name: str, layers: int, limit: int) -> None:
    limits = [spec.window or spec.chunk for spec in architecture(name).layers]
    assert [found for found in limits if found] == [limit] * layers


def test_local_layers_come_first() -> None:
    for name, first in (
        ("gpt-oss-20b", "sf"),
        ("gemma-2-9b", "sf"),
        ("gemma-3-27b", "sssssf"),
        ("llama-4-scout", "cccf"),
    ):
        kinds = "".join(kind[0] for kind in architecture(name).kinds)
        assert kinds.startswith(first), name


def test_bytes_at_a_context_are_those_of_full_layers_and_of_windows() -> None:
    # 128 and 1000 tokens, 8 heads of 64, keys and values, 12 layers each.
    assert ideal(architecture("gpt-oss-20b"), 1000) == 2 * 2 * 8 * 64 * 12 * (128 + 1000)
    # 163,840 tokens of 61 latents of 576 numbers.
    assert ideal(architecture("deepseek-v3"), 163_840) == 11_513_364_480
    # 26 layers, 1 head of 256: 4 see all 32,768 tokens and 22 a window of 512.
    assert ideal(architecture("gemma-3-1b"), 32_768) == 2 * 2 * 256 * (4 * 32_768 + 22 * 512)


@pytest.mark.parametrize(
    ("name", "layers", "numbers"),
    [
        # States of 96 heads of 128 by 128, and three tokens of three times 96 times 128 channels.
        ("kimi-k3", 69, 96 * 128 * 128 + 3 * 3 * 96 * 128),
        ("qwen3.5-27b", 48, 48 * 128 * 128 + 3 * (2 * 16 + 48) * 128),
        ("nemotron-3-nano-30b-a3b", 23, 64 * 64 * 128 + 3 * (64 * 64 + 2 * 8 * 128)),
    ],
)
def test_states_of_hybrids(name: str, layers: int, numbers: int) -> None:
    found = [sum(state.numel for state in spec.states) for spec in architecture(name).layers if spec.states]
    assert found == [numbers] * layers


def test_the_states_of_kimi_k3_are_221_mebibytes_in_bfloat16() -> None:
    numbers = sum(state.numel for spec in architecture("kimi-k3").layers for state in spec.states)
    assert round(2 * numbers / 2**20, 2) == 221.55


def test_deepseek_v4_pro_at_a_million_tokens() -> None:
    """9.62 GiB in bfloat16 (arXiv 2606.19348): strides of all layers, windows of 128 and what is pending aside."""
    found = architecture("deepseek-v4-pro")
    pooled = sum(
        count * entry.numel
        for spec in found.layers
        for entry, count in strided_entries(spec, 2**20)
        if entry.name in ("compressed", "index_k")
    )
    assert round(2 * pooled / 2**30, 2) == 9.62


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_is_read_and_names_its_source(name: str) -> None:
    found = architecture(name)
    assert len(found.layers) == len(found.kinds) == len(found.query_heads) >= found.num_hidden_layers
    assert any(spec.records for spec in found.layers)
    assert all(
        spec.records or spec.states or spec.shares is not None or kind in EMPTY
        for spec, kind in zip(found.layers, found.kinds, strict=True)
    )
    assert len(PRESETS[name].source) > 10
    assert name == name.lower()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "smollm2-135m", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b-v0.3"])
def test_presets_of_the_decoders_own_families_describe_a_decoder(name: str) -> None:
    config = decoder_config(name)
    assert config.cache_specs == architecture(name).layers


def test_a_preset_is_handed_out_as_a_copy() -> None:
    given: dict[str, Any] = preset("llama-3.1-8b")
    given["rope_scaling"]["factor"] = 1.0
    assert preset("llama-3.1-8b")["rope_scaling"]["factor"] == 8.0


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no preset is called 'lama-3.1-8b'; did you mean llama-3.1-8b"):
        preset("lama-3.1-8b")


def test_reading_an_architecture_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from attn_variants.architectures import architecture, decoder_config, preset, read_config\n"
        "architecture('deepseek-v3'), decoder_config('qwen3-0.6b'), preset('llama-2-7b'), read_config('gpt-oss-20b')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
