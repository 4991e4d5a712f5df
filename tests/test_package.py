"""What is installed: one import name, every file of the three folders, and no quarrel with a user's own modules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attn_variants import __version__

ROOT = Path(__file__).parents[1]
FOLDERS = {"attn_variants": "attn_variants", "cache": "attn_variants/cache", "bench": "attn_variants/bench"}


def python(*arguments: str | Path, cwd: Path) -> str:
    """What a fresh interpreter prints; -I keeps the checkout and the environment's variables out of it."""
    done = subprocess.run([sys.executable, "-I", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """The `wheel`, `sdist` or `editable` that the build backend makes of `source`, without a download."""
    into.mkdir()
    python("-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})", cwd=source)
    return next(into.iterdir())


def unpacked(archive: Path, into: Path) -> Path:
    shutil.unpack_archive(archive, into, "zip" if archive.suffix == ".whl" else None)
    return into


def modules_and_data(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, into / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, into)
    return into


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def installed(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that each way of installing adds to an interpreter's path."""
    place = tmp_path_factory.mktemp("installed")
    editable = build("editable", checkout, place / "dist")
    return {
        "wheel": unpacked(wheel, place / "wheel"),
        "editable": unpacked(editable, place / "editable"),
        "uninstalled": checkout,
    }


def run_with(site: Path, code: str, folder: Path) -> list[str]:
    """What `code` prints in `folder` when the package lies in `site`, and no other third-party package anywhere."""
    start = f"import site, sys; sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(site)!r})"
    return python("-S", "-c", f"{start}\n{code}", cwd=folder).split()


def test_the_wheel_holds_one_import_name(wheel: Path):
    assert {name.partition("/")[0] for name in modules_and_data(wheel)} == {"attn_variants"}


def test_the_wheel_holds_every_file_of_the_three_folders(wheel: Path, checkout: Path):
    """A new sub-package, or a new kind of data file, needs its line in pyproject.toml."""
    files = {
        f"{place}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, place in FOLDERS.items()
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    assert {f"{place}/py.typed" for place in FOLDERS.values()} <= files
    assert modules_and_data(wheel) == files


def test_the_wheel_brings_the_command_and_the_licence(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    metadata = f"attn_variants-{__version__}.dist-info"
    assert b"attn-bench = attn_variants.bench.cli:main" in archive.read(f"{metadata}/entry_points.txt")
    assert archive.read(f"{metadata}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_builds_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path):
    source = next(unpacked(build("sdist", checkout, tmp_path / "sdist"), tmp_path / "source").iterdir())
    assert modules_and_data(build("wheel", source, tmp_path / "dist")) == modules_and_data(wheel)


@pytest.mark.parametrize("way", ["wheel", "editable", "uninstalled"])
def test_a_users_own_cache_and_bench_stay_the_users(way: str, installed: dict[str, Path], tmp_path: Path):
    for name in ("cache", "bench"):
        (tmp_path / f"{name}.py").write_text("OWNER = 'user'\n")
    code = """
import attn_variants.bench, attn_variants.cache.accounting
import bench, cache
print(bench.OWNER, cache.OWNER, attn_variants.bench.__name__, attn_variants.cache.accounting.__name__)
"""
    printed = run_with(installed[way], code, tmp_path)
    assert printed == ["user", "user", "attn_variants.bench", "attn_variants.cache.accounting"]


@pytest.mark.parametrize("way", ["editable", "uninstalled"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_added_later_needs_no_new_installation(
    way: str, folder: str, installed: dict[str, Path], checkout: Path, tmp_path: Path
):
    added = checkout / folder / "added_later.py"
    added.write_text("")
    try:
        module = f"{FOLDERS[folder]}/added_later".replace("/", ".")
        assert run_with(installed[way], f"import {module}; print({module}.__name__)", tmp_path) == [module]
    finally:
        added.unlink()
