"""Imports run one way, nothing heavy is imported before it is needed, and the package's names load lazily.

The directions are read off the syntax trees, so that an import inside a function counts as well.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import attn_variants

ROOT = Path(__file__).parents[1]
FOLDERS = {"bench": "attn_variants.bench", "cache": "attn_variants.cache", "attn_variants": "attn_variants"}

DECLARATIONS = {"contract", "rope_config", "options", "config", "names", "registry", "architectures"}
FOUNDATION = DECLARATIONS | {"dtypes", "transient"}

# What each part of attn_variants may import of the others; "" is all of it that is not named here, the variants and the
# decoder among them. bench may import everything.
MAY_IMPORT = {
    "contract": set(),
    "rope_config": {"contract"},
    "options": {"contract"},
    "config": {"contract", "rope_config", "options"},
    "names": set(),
    "registry": {"contract", "config", "names"},
    "architectures": {"contract", "rope_config", "config", "names"},
    "dtypes": {"names"},
    "transient": {"contract", "dtypes"},
    "": FOUNDATION,
    "cache": FOUNDATION,
    "generation": FOUNDATION | {"", "cache"},
    "bench": FOUNDATION | {"", "cache", "generation"},
}

# Third-party packages that are imported in one part alone. A saved cache is tensors in a file as a checkpoint is, and
# neither of the two may import the other.
HOMES = {
    "safetensors": ("attn_variants.checkpoints", "attn_variants.cache.saved"),
    **dict.fromkeys(("tokenizers", "gguf", "huggingface_hub"), ("attn_variants.checkpoints",)),
    **dict.fromkeys(("pandas", "rich", "typer", "matplotlib", "llama_cpp"), ("attn_variants.bench",)),
}


class Import(NamedTuple):
    """`target` is a module or a name in one; `level` counts the dots of a relative import."""

    module: str
    target: str
    level: int
    typing_only: bool
    place: str


def modules() -> dict[str, Path]:
    """Every module of the three folders, under the name it is imported by."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typing_only = {node for guard in guards for statement in guard.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            level, targets = 0, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level = node.level
            base = package.rsplit(".", level - 1)[0] if level else ""
            targets = [".".join(filter(None, (base, node.module, alias.name))) for alias in node.names]
        else:
            continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        for target in targets:
            yield Import(module, target, level, node in typing_only, place)


IMPORTS = [item for module, path in modules().items() for item in imports_of(module, path)]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def part_of(name: str) -> str:
    first = name.removeprefix("attn_variants").removeprefix(".").partition(".")[0]
    return first if first in MAY_IMPORT else ""


def folder_of(name: str) -> str:
    return next(folder for folder, package in FOLDERS.items() if within(name, package))


def loaded_by(*names: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after importing these modules."""
    code = f"import sys, {', '.join(names)}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_folder_is_read():
    assert {"attn_variants.contract", "attn_variants.cache.kv_cache", "attn_variants.bench.cli"} <= modules().keys()


@pytest.mark.parametrize("part", MAY_IMPORT, ids=lambda part: part or "variants")
def test_a_part_imports_only_what_lies_below_it(part: str):
    inside = [item for item in IMPORTS if part_of(item.module) == part and within(item.target, "attn_variants")]
    assert [item for item in inside if part_of(item.target) not in MAY_IMPORT[part] | {part}] == []


def test_declarations_import_no_torch_except_for_types():
    declared = [item for item in IMPORTS if part_of(item.module) in DECLARATIONS]
    assert [item for item in declared if within(item.target, "torch") and not item.typing_only] == []


@pytest.mark.parametrize("package", HOMES)
def test_a_third_party_package_is_imported_only_in_its_home(package: str):
    importing = [item for item in IMPORTS if within(item.target, package)]
    assert [item for item in importing if not any(within(item.module, home) for home in HOMES[package])] == []


def test_relative_imports_stay_inside_their_folder():
    """`from ..contract import Entry` in cache/ would tie the folder to where it is installed."""
    relative = [item for item in IMPORTS if item.level]
    assert [item for item in relative if folder_of(item.target) != folder_of(item.module)] == []


def test_nothing_imports_the_folders_by_their_own_names():
    """From the checkout's root, `import cache` would load every class a second time."""
    of_tests = [item for path in (ROOT / "tests").rglob("*.py") for item in imports_of(f"tests.{path.stem}", path)]
    assert [item for item in IMPORTS + of_tests if within(item.target, "cache") or within(item.target, "bench")] == []


@pytest.mark.parametrize(
    "names",
    [
        ["attn_variants"],
        [name for name in modules() if part_of(name) in DECLARATIONS | {"dtypes"}],
        ["attn_variants.cache", "attn_variants.cache.accounting", "attn_variants.cache.models"],
        ["attn_variants.bench.cli"],
    ],
    ids=["package", "declarations", "accounting", "command"],
)
def test_sizing_a_cache_imports_neither_torch_nor_pandas(names: list[str]):
    assert not loaded_by(*names) & {"torch", "pandas", "numpy"}


def test_every_exported_name_resolves_to_the_thing_of_that_name():
    for name in attn_variants.__all__:
        value = getattr(attn_variants, name)
        assert getattr(value, "__name__", name) == name


def test_exports_are_the_same_for_type_checkers_and_at_run_time():
    typed = {item.target for item in IMPORTS if item.module == "attn_variants" and item.typing_only}
    at_run_time = {f"attn_variants.{home}.{name}" for name, home in attn_variants._HOMES.items()}
    assert typed == at_run_time
    assert set(attn_variants.__all__) == {"__version__", *attn_variants._HOMES}
    assert set(attn_variants.__all__) <= set(dir(attn_variants))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'attn_variants' has no attribute 'Attention'"):
        _ = attn_variants.Attention


def test_attend_is_the_submodule():
    from attn_variants import attend

    assert attend.__name__ == "attn_variants.attend"
    assert callable(attend.attend)
