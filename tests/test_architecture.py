"""Rules about what the library's files import and use. Each rule has a planted violation, which it has to find."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path.read_text() for path in sorted((ROOT / "torchwrap").rglob("*.py"))}
PACKAGES = {module_name(path.parent / "__init__.py") for path in (ROOT / "torchwrap").rglob("__init__.py")}


# Reading files.


@functools.cache
def parse(source):
    return ast.parse(source)


def walk(node, *, at_import=False):
    """All nodes; with `at_import`, only those that run when the module is imported (or checked by a type checker)."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from walk(child, at_import=at_import)


@functools.cache
def imports(source, at_import=False):
    """Dotted names that a file imports, in functions and as string arguments of importlib too."""
    names = set()
    for node in walk(parse(source), at_import=at_import):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not resolved here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return names


@functools.cache
def code_of(source):
    """A file without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    return ast.unparse(tree)


def within(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# Rules: each returns the violations in the sources of modules by name.


def arrows(sources, here, there, allowed=()):
    """Imports of `there` by modules in `here`, except for the allowed ones."""
    return [
        f"{name} -> {target}"
        for name, source in sources.items()
        if within(name, *here) and not within(name, *allowed)
        for target in sorted(imports(source))
        if within(target, *there)
    ]


ABOVE_TRANSFORMS = [
    f"torchwrap.{name}" for name in ("env", "wrappers", "envs", "interop", "functional", "collector", "_compile")
]
BASES = [f"torchwrap.transforms.{name}" for name in ("transform", "compose", "statistics")]
STACKS = ["torchwrap.transforms.presets"]  # of several families
FAMILIES = sorted(
    name for name in SOURCES if within(name, "torchwrap.transforms") and name not in PACKAGES | {*BASES, *STACKS}
)


def transforms_know_no_env(sources):
    return arrows(sources, ["torchwrap.transforms"], ABOVE_TRANSFORMS)


def envs_know_no_transform(sources):
    return arrows(sources, ["torchwrap.envs"], ["torchwrap.transforms"])


def transform_families_are_independent(sources):
    return [
        arrow for family in FAMILIES for arrow in arrows(sources, [family], [other for other in FAMILIES if other != family])
    ]


def transform_bases_know_no_family(sources):
    return arrows(sources, BASES, FAMILIES)


def below_the_top(sources):
    return {name: source for name, source in sources.items() if name != "torchwrap"}


def interop_is_imported_where_envs_are_made(sources):
    # Gymnasium is a core dependency: `tw.make` and `tw.from_gymnasium` bridge to it.
    allowed = ["torchwrap.interop", "torchwrap.registration"]
    return arrows(below_the_top(sources), ["torchwrap"], ["torchwrap.interop"], allowed)


def media_is_imported_by_wrappers_that_render(sources):
    return arrows(
        sources,
        ["torchwrap"],
        ["torchwrap._media"],
        ["torchwrap._media", "torchwrap.wrappers.render", "torchwrap.wrappers.video"],
    )


def library_knows_no_testing(sources):
    return arrows(sources, ["torchwrap"], ["torchwrap.testing", "tests", "examples"], ["torchwrap.testing"])


def compile_is_imported_at_the_top_and_by_testing(sources):
    allowed = ["torchwrap._compile", "torchwrap.testing"]
    return arrows(below_the_top(sources), ["torchwrap"], ["torchwrap._compile"], allowed)


LADDER = ["torchwrap._core", "torchwrap.random", "torchwrap.spaces", "torchwrap._env", "torchwrap.env"]


def ladder_has_no_upward_arrow(sources):
    """Each package imports from torchwrap only itself and what stands below it."""
    found = []
    for height, package in enumerate(LADDER):
        for name, source in sources.items():
            if within(name, package):
                targets = {target for target in imports(source) if within(target, "torchwrap")}
                found += [f"{name} -> {target}" for target in targets if not within(target, *LADDER[: height + 1])]
    return found


LIBRARIES = {
    **{"torchwrap._media.video": {"imageio"}, "torchwrap._media.window": {"pygame"}},
    **{f"torchwrap.interop.{name}": {name} for name in ("torchrl", "rsl_rl", "skrl", "rl_games")},
    **{"torchwrap.interop.jax": {"jax", "brax", "gymnax"}, "torchwrap.interop._jax_functions": {"jax"}},
    **{"torchwrap.interop._torchrl_specs": {"torchrl"}, "torchwrap.interop.sb3": {"stable_baselines3"}},
    **{"torchwrap.interop._engines": {"envpool"}, "torchwrap.interop.atari": {"ale_py"}},
    "torchwrap.interop.mujoco_torch": {"mujoco", "mujoco_torch"},
}
DEPENDENCIES = {"torch", "tensordict", "gymnasium", "numpy", "torchwrap", *sys.stdlib_module_names}


def dependencies_are_known(sources):
    return [
        f"{name} -> {target}"
        for name, source in sources.items()
        for target in imports(source)
        if target.split(".")[0] not in DEPENDENCIES | LIBRARIES.get(name, set())
    ]


def edges(sources):
    """Modules of the library that each module imports while it is imported, with the packages that this imports."""
    graph = {}
    for name, source in sources.items():
        targets = set()
        for target in imports(source, at_import=True):
            target = target if target in sources else target.rpartition(".")[0]
            while "." in target:
                targets |= {target} & set(sources)
                target = target.rpartition(".")[0]
        graph[name] = {target for target in targets if target != name and not within(name, target)}
    return graph


def module_imports_have_no_circle(sources):
    graph, done, circles = edges(sources), set(), []

    def visit(name, path):
        if name in path:
            circles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return circles


def modules_do_not_shadow_functions(sources):
    found = []
    for package in PACKAGES:
        children = {name.rpartition(".")[2] for name in sources if name.rpartition(".")[0] == package}
        public = {target.rpartition(".")[2] for target in imports(sources[package]) if target not in sources}
        found += [f"{package}.{name}" for name in children & public]
    return found


def used_only_in(sources, pattern, *homes):
    return [name for name, source in sources.items() if not within(name, *homes) and re.search(pattern, code_of(source))]


def compilers_are_used_in_compile(sources):
    pattern = r"torch\.compile\(|make_fx|torch\._inductor|torch\._dynamo"
    return used_only_in(sources, pattern, "torchwrap._compile", "torchwrap._env.translation")


def cuda_graphs_are_used_in_replay(sources):
    return used_only_in(sources, r"CUDAGraph|cuda\.graph", "torchwrap._compile.replay")


def reference_counts_are_not_used(sources):
    return used_only_in(sources, r"getrefcount")


def processes_are_used_in_distributed(sources):
    return used_only_in(sources, r"torch\.distributed", "torchwrap.distributed")


def random_numbers_come_from_random(sources):
    drawing = r"torch\.(rand|normal|bernoulli|poisson)|Generator|manual_seed|multinomial|np\.random|secrets"
    return used_only_in(
        sources,
        rf"{drawing}|\.(uniform|normal|random|exponential|bernoulli)_\(",
        "torchwrap.random",
        "torchwrap._core.reachable",
    )


def pickle_is_not_used(sources):
    return used_only_in(sources, r"weights_only=False|\b(import|from) \w*pickle|\bpickle\.")


def files_have_at_most_320_lines(sources):
    return [f"{name}: {len(source.splitlines())}" for name, source in sources.items() if len(source.splitlines()) > 320]


HOST_CODE = {  # exceptions, by file
    # PassiveEnvChecker reads values by design: it names the env and the value that are wrong.
    "torchwrap.transforms.checker": {"nonzero", "item", "tolist"},
    # The bins of a space, read from the constants that were just computed, in `setup`.
    "torchwrap.transforms.discretize": {"tolist"},
    # `episode_count`, which documents that it waits for the device.
    "torchwrap.transforms.episode": {"int(self"},
    # The dtype of NumPy that corresponds to one of PyTorch, of an empty tensor in a constructor.
    "torchwrap.transforms.observation": {"numpy"},
}


def host_code_of(source):
    code = code_of(source)
    names = re.findall(r"\b(is_tracing|is_host_readable|is_compiling|FakeTensor|_core\.tracing)\b", code)
    methods, casts = r"\.(numpy|item|cpu|tolist|nonzero|argwhere)\(", r"\b(?:int|bool|float)\(self"
    return {*names, *re.findall(methods, code), *re.findall(casts, code)}


def transforms_contain_no_host_code(sources):
    # RowMask is where host code and graph code part, so that authors of transforms write one path.
    found = []
    for name, source in sources.items():
        if within(name, "torchwrap.transforms"):
            used, allowed = host_code_of(source), HOST_CODE.get(name, set())
            found += [f"{name}: {word}" for word in used - allowed] + [f"{name}: no {word}" for word in allowed - used]
    return found


def public_definitions_have_docstrings(sources):
    return [
        f"{name}.{node.name}"
        for name, source in sources.items()
        for node in parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]


# A module, and code that violates the rule if it is appended to the module.
VIOLATIONS = [
    (transforms_know_no_env, "torchwrap.transforms.reward", "def f():\n    from torchwrap import env"),
    (transforms_know_no_env, "torchwrap.transforms", "importlib.import_module('torchwrap.wrappers')"),
    (transforms_know_no_env, "torchwrap.transforms.transform", "import torchwrap._compile.graph"),
    (envs_know_no_transform, "torchwrap.envs.cartpole", "from torchwrap import transforms"),
    (transform_families_are_independent, "torchwrap.transforms.reward", "from torchwrap.transforms.action import ClipAction"),
    (transform_bases_know_no_family, "torchwrap.transforms.compose", "from torchwrap.transforms import reward"),
    (interop_is_imported_where_envs_are_made, "torchwrap.env", "from torchwrap.interop.gymnasium import from_gymnasium"),
    (interop_is_imported_where_envs_are_made, "torchwrap.wrappers", "__import__('torchwrap.interop')"),
    (media_is_imported_by_wrappers_that_render, "torchwrap.wrappers.repeat", "from torchwrap._media import video"),
    (library_knows_no_testing, "torchwrap.env", "from torchwrap.testing import ScriptedEnv"),
    (library_knows_no_testing, "torchwrap", "def f():\n    import examples.ppo"),
    (compile_is_imported_at_the_top_and_by_testing, "torchwrap.env", "from torchwrap._compile.api import compile"),
    (ladder_has_no_upward_arrow, "torchwrap._core.rows", "from torchwrap.random import Key"),
    (ladder_has_no_upward_arrow, "torchwrap._env.executor", "if TYPE_CHECKING:\n    from torchwrap.env import Env"),
    (ladder_has_no_upward_arrow, "torchwrap.random.key", "from torchwrap import spaces"),
    (dependencies_are_known, "torchwrap.wrappers.render", "def f():\n    import imageio"),
    (module_imports_have_no_circle, "torchwrap._core.rows", "from torchwrap._core import row_mask"),
    (modules_do_not_shadow_functions, "torchwrap.compile", ""),
    (modules_do_not_shadow_functions, "torchwrap.random.uniform", ""),
    (compilers_are_used_in_compile, "torchwrap.collector", "torch.compile(print)"),
    (compilers_are_used_in_compile, "torchwrap.env", "import torch._dynamo"),
    (cuda_graphs_are_used_in_replay, "torchwrap._compile.graph", "torch.cuda.CUDAGraph()"),
    (reference_counts_are_not_used, "torchwrap._core.buffer_pool", "sys.getrefcount(None)"),
    (processes_are_used_in_distributed, "torchwrap.collector", "import torch.distributed"),
    (random_numbers_come_from_random, "torchwrap.transforms.image", "torch.rand(3)"),
    (random_numbers_come_from_random, "torchwrap.functional", "x.normal_()"),
    (pickle_is_not_used, "torchwrap.env", "import pickle"),
    (pickle_is_not_used, "torchwrap.env", "torch.load(path, weights_only=False)"),
    (files_have_at_most_320_lines, "torchwrap.env", "pass\n" * 320),
    (transforms_contain_no_host_code, "torchwrap.transforms.reward", "reward.item()"),
    (transforms_contain_no_host_code, "torchwrap.transforms.history", "is_host_readable(frames)"),
    (public_definitions_have_docstrings, "torchwrap.env", "def f():\n    pass"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in VIOLATIONS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_follows_the_rule(rule):
    assert rule(SOURCES) == []


@pytest.mark.parametrize(
    ("rule", "module", "code"), VIOLATIONS, ids=[f"{rule.__name__}-{name}" for rule, name, _ in VIOLATIONS]
)
def test_rule_reports_a_planted_violation(rule, module, code):
    assert rule({**SOURCES, module: f"{SOURCES.get(module, '')}\n{code}\n"}) != []


def test_importing_torchwrap_imports_no_optional_dependency():
    code = "import sys, torch, tensordict, gymnasium; known = {*sys.modules}; import torchwrap; print(*{*sys.modules} - known)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    added = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names - {"torch", "tensordict", "gymnasium", "numpy"}
    assert {name for name in added if not name.startswith("__editable__")} == {"torchwrap"}


# The tests themselves.


def test_test_modules_have_unique_names_and_import_no_other_test_module():
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in Counter(path.name for path in paths).items() if count > 1] == []
    names = {path.stem for path in paths}
    assert [path.name for path in paths for name in imports(path.read_text()) if names & set(name.split("."))] == []
