"""A config is read from a file, its folder, a dict or a preset's name; anything else is refused in one line."""

import json
from pathlib import Path

import pytest

from attn_variants.architectures import PRESETS, architecture, decoder_config, read_config

TINY = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": 11}


def written(folder: Path, content: bytes | str) -> Path:
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_file_folder_dict_and_string_are_the_same_source(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(TINY))
    assert read_config(path) == read_config(tmp_path) == read_config(str(tmp_path)) == read_config(TINY) == TINY


def test_a_read_config_is_a_dict_of_its_own() -> None:
    read_config(TINY)["hidden_size"] = 1
    assert TINY["hidden_size"] == 24


def test_a_preset_is_read_by_its_name() -> None:
    assert read_config("smollm2-135m") == PRESETS["smollm2-135m"].config


def test_a_folder_goes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepseek-v3").mkdir()
    written(tmp_path / "deepseek-v3", json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    assert read_config("deepseek-v3") == TINY


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("[1, 2]", "holds a JSON list, not an object"),
        ("null", "holds a JSON null, not an object"),
        ('"llama"', "holds a JSON string, not an object"),
        ("7", "holds a JSON number, not an object"),
        ('{"model_type": "llama", "num_hidden', "not JSON at line 1, column 25"),
        ('{"a": 1,}', "not JSON at line 1"),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "holds what no config.json does"),
        ("[" * 100_000, "holds what no config.json does"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
        ("{}".encode("utf-16"), "begins with a byte order mark"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b" " * (5 * 1024 * 1024), "5242880 bytes"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line_that_names_it(
    tmp_path: Path, content: bytes | str, says: str
) -> None:
    path = written(tmp_path, content)
    for read in (read_config, architecture, decoder_config):
        with pytest.raises(ValueError, match=r"^[^\n]+$") as refusal:
            read(tmp_path)
        assert str(refusal.value).startswith(f"{path}: ")
        assert says in str(refusal.value)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder holds no config\.json"):
        architecture(tmp_path)


@pytest.mark.parametrize("name", ["llama-3.1-8B", "meta-llama/Llama-3.1-8B"])
def test_what_is_neither_a_path_nor_a_preset_is_refused_with_the_nearest_preset(name: str) -> None:
    with pytest.raises(ValueError, match=r"no file, folder or preset .*; did you mean llama-3\.1-8b"):
        architecture(name)


def test_a_name_too_long_for_a_path_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="no file, folder or preset"):
        architecture("x" * 5000)


def test_messages_name_the_file_the_field_the_value_and_the_remedy(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({**TINY, "num_hidden_layers": -3}))
    with pytest.raises(ValueError, match="must be a positive integer") as refusal:
        architecture(path)
    assert str(refusal.value).startswith(f"{path}: num_hidden_layers (-3) must be a positive integer")
