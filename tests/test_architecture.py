from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "torchwrap").rglob("*.py"))


def imports(path):
    """Modules that a file imports when it is imported."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def place(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def crossing(here, there, allowed=(), but=()):
    """Imports of `there`, `but` for some of it, by files in `here`, but for those `allowed`."""
    return [
        f"{place(path)} -> {name}"
        for path in FILES
        for name in imports(path)
        if place(path).startswith(here) and name.startswith(there) and not place(path).startswith(tuple(allowed))
        if name not in but
    ]


ABOVE = (
    "torchwrap.env",
    "torchwrap.wrappers",
    "torchwrap.envs",
    "torchwrap.interop",
    "torchwrap.functional",
    "torchwrap.rollout",
)


@pytest.mark.parametrize(
    ("here", "there", "allowed", "but"),
    [
        ("torchwrap.transforms", ABOVE, (), ()),
        ("torchwrap.envs", "torchwrap.transforms", (), ()),
        ("torchwrap", "torchwrap.interop", ("torchwrap.interop",), ()),
        ("torchwrap", "torchwrap.testing", ("torchwrap.testing",), ()),
        ("torchwrap", ("tests", "examples"), (), ()),
        ("torchwrap.buffer", "torchwrap", (), ()),
        ("torchwrap.arguments", "torchwrap", (), ()),
        ("torchwrap.random", "torchwrap", (), ("torchwrap.buffer", "torchwrap.buffer.Buffer", "torchwrap.buffer.Module")),
        ("torchwrap.spaces", ABOVE, (), ()),
        ("torchwrap.masks", "torchwrap", (), ()),
    ],
)
def test_no_arrow_points_the_wrong_way(here, there, allowed, but):
    assert crossing(here, there, allowed, but) == []


def test_no_transform_family_knows_another():
    families = [path for path in FILES if "transforms" in path.parts and path.stem not in ("__init__", "base")]
    for path in families:
        for other in families:
            assert path == other or place(other) not in imports(path)


def test_the_library_imports_its_four_dependencies_alone_and_others_in_the_file_of_their_name():
    known = {"torch", "tensordict", "gymnasium", "numpy", "torchwrap", *sys.stdlib_module_names}
    for path in FILES:
        unknown = {name.split(".")[0] for name in imports(path)} - known
        assert unknown <= ({path.stem} if "interop" in path.parts else set()), path


@pytest.mark.parametrize(
    ("words", "home"),
    [
        (("torch.rand", "torch.Generator", "torch.normal", "manual_seed", "multinomial"), "torchwrap.random"),
        (("torch.compile(", "torch.cuda.graph", "CUDAGraph"), "torchwrap.graph"),
        (("make_fx", "torch._inductor", "torch._dynamo"), "torchwrap.graph"),
        (("getrefcount",), "torchwrap.memory"),
        (("torch.distributed",), "torchwrap.distributed"),
        (("weights_only=False", "pickle"), "nowhere"),
    ],
)
def test_each_power_has_one_home(words, home):
    for path in FILES:
        code = ast.unparse(ast.parse(path.read_text()))  # without comments
        assert place(path) == home or not any(word in code for word in words), place(path)


def test_importing_torchwrap_imports_nothing_optional():
    code = "import sys, torch, tensordict, gymnasium; known = {*sys.modules}; import torchwrap; print(*{*sys.modules} - known)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    added = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"torch", "tensordict", "gymnasium", "numpy"}
    assert {name for name in added if not name.startswith("__editable__")} == {"torchwrap"}


def test_everything_public_is_documented():
    for path in FILES:
        module = ast.parse(path.read_text())
        for node in module.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{place(path)}.{node.name}"
