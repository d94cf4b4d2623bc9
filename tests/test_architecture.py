"""Rules on what the library's files import and use, and on how densely they are written.

Each rule has planted violations that it must report.
"""

import ast
import collections
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {
    module_name(path): path.read_text() for path in sorted((ROOT / "torchwrap").rglob("*.py"))
}
PACKAGES = {
    module_name(path.parent / "__init__.py") for path in (ROOT / "torchwrap").rglob("__init__.py")
}


# Reading files.


@functools.cache
def parse(source):
    return ast.parse(source)


def walk(node, *, at_import=False):
    """All nodes; with `at_import`, only those outside functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (
            at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            yield from walk(child, at_import=at_import)


@functools.cache
def imports(source, at_import=False):
    """Dotted names that a file imports, in functions and as strings of importlib too."""
    names = set()
    for node in walk(parse(source), at_import=at_import):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not resolved here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(
            r"\b(import_module|__import__)$", ast.unparse(node.func)
        ):
            names |= {
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            }
    return names


@functools.cache
def code_of(source):
    """A file without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                part
                for part in body
                if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.unparse(tree)


def within(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def members(package, names):
    return [f"{package}.{name}" for name in names.split()]


# Arrows: modules in `here` import nothing in `there`, but for the allowed modules and targets.

TOP = "torchwrap"  # as `here`, every module; as an allowed module, torchwrap/__init__.py alone
BASES = ["torchwrap.transforms.transform"]
STACKS = ["torchwrap.transforms.presets"]  # of several families
FAMILIES = [
    name
    for name in SOURCES
    if within(name, "torchwrap.transforms") and name not in PACKAGES | {*BASES, *STACKS}
]
OF_ENV = ["torchwrap.policy"]
LADDER = members("torchwrap", "_core random spaces env")
ABOVE_TRANSFORMS = members(
    "torchwrap", "env wrappers envs interop functional collector _compile _deploy"
)

ARROWS = [  # here, there, allowed modules, allowed targets
    (["torchwrap.transforms"], ABOVE_TRANSFORMS, [], []),
    (["torchwrap.envs"], ["torchwrap.transforms"], [], []),
    (BASES, FAMILIES, [], []),
    *(([family], FAMILIES, [], [family]) for family in FAMILIES),
    # Gymnasium is a core dependency: `tw.make` and `tw.from_gymnasium` bridge to it.
    ([TOP], ["torchwrap.interop"], [TOP, "torchwrap.interop", "torchwrap.registration"], []),
    ([TOP], ["torchwrap.testing", "tests", "examples"], ["torchwrap.testing"], []),
    (
        [TOP],
        ["torchwrap._compile"],
        [TOP, "torchwrap._compile", "torchwrap._deploy", "torchwrap.testing"],
        [],
    ),
    ([TOP], ["torchwrap._deploy"], [TOP, "torchwrap._deploy"], []),
    # Each package imports from torchwrap only itself and what stands below it.
    # The last one also reads the state of a policy that PolicyState declares.
    *(
        ([package], [TOP], [], [*LADDER[: height + 1], *OF_ENV * (package == LADDER[-1])])
        for height, package in enumerate(LADDER)
    ),
]


def arrows(sources):
    return [
        f"{name} -> {target}"
        for here, there, modules, targets in ARROWS
        for name, source in sources.items()
        if within(name, *here) and name not in modules and not within(name, *{*modules} - {TOP})
        for target in imports(source)
        if within(target, *there) and not within(target, *targets)
    ]


# Other rules: each returns the violations in the sources of modules by name.

LIBRARIES = {
    "torchwrap.interop.torchrl": {"torchrl"},
    "torchwrap.interop.rsl_rl": {"rsl_rl"},
    "torchwrap.interop.skrl": {"skrl"},
    "torchwrap.interop.rl_games": {"rl_games"},
    "torchwrap.interop.sb3": {"stable_baselines3"},
    "torchwrap.interop.jax": {"jax", "brax"},
    "torchwrap.registration": {"envpool"},
    "torchwrap.wrappers.render": {"imageio"},
    "torchwrap.collector": {"tqdm"},
}
FOREIGN = ("torch", "tensordict", "gymnasium", "numpy")
DEPENDENCIES = {*FOREIGN, "torchwrap", *sys.stdlib_module_names}


def dependencies_are_known(sources):
    return [
        f"{name} -> {target}"
        for name, source in sources.items()
        for target in imports(source)
        if target.split(".")[0] not in DEPENDENCIES | LIBRARIES.get(name, set())
    ]


def edges(sources):
    """The modules and packages that each module imports while it is imported itself."""
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
    graph = edges(sources)
    done = set()
    circles = []

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
        children = {
            name.rpartition(".")[2] for name in sources if name.rpartition(".")[0] == package
        }
        public = {
            target.rpartition(".")[2]
            for target in imports(sources[package])
            if target not in sources
        }
        found += [f"{package}.{name}" for name in children & public]
    return found


# Not a draw: to keep a generator as it was.
DRAWING = (
    r"torch\.(rand(?!om\.fork_rng)|normal|bernoulli|poisson)|Generator\(|manual_seed|multinomial\("
)
DRAWING += r"|np\.random(?!\.[gs]et_state)|secrets"
HOMES = [  # a pattern, and where it may be used
    (r"torch\.compile\(|make_fx|torch\._inductor|torch\._dynamo", ["torchwrap._compile"]),
    (r"CUDAGraph|cuda\.graph", ["torchwrap._compile.cuda_graph"]),
    (r"torch\.distributed", ["torchwrap.statistics"]),
    (rf"{DRAWING}|\.(uniform|normal|random|exponential|bernoulli)_\(", ["torchwrap.random"]),
    (r"weights_only=False|\b(import|from) \w*pickle|\bpickle\.", []),
    (r"getrefcount|weakref\.finalize|gc\.(freeze|disable)", []),
    (r"\bexec\(", []),
]


def acts_stay_at_home(sources):
    return [
        f"{name}: {found[0]}"
        for pattern, homes in HOMES
        for name, source in sources.items()
        if not within(name, *homes) and (found := re.search(pattern, code_of(source)))
    ]


def dotted(node):
    """The name of a chain of attributes, such as "torch.nn.Module"; empty for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def is_foreign(name):
    return name.split(".")[0] in FOREIGN


@functools.cache
def foreign_names(tree):
    """The full names of the modules, classes and functions that a file imports from others."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: full for name, full in names.items() if is_foreign(full)}


def written_name(node):
    """The attribute that an assignment, a deletion, `setattr` or `delattr` writes to."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return dotted(node)
    if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
        return dotted(node.args[0])
    return ""


def nothing_is_patched(sources):
    """No attribute of another library is assigned or deleted."""
    found = []
    for name, source in sources.items():
        foreign = foreign_names(parse(source))
        for node in ast.walk(parse(source)):
            if written_name(node).split(".")[0] in foreign:
                found.append(f"{name}: {ast.unparse(node)}")
    return found


@functools.cache
def private_names(source):
    """Private names of other libraries, by import or by attribute."""
    foreign = foreign_names(parse(source))
    used = set(filter(is_foreign, imports(source)))
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            if root in foreign:
                used.add(f"{foreign[root]}.{rest}")
    return sorted(full for full in used if re.search(r"(^|\.)_(?!_)", full))


def private_names_are_in_one_file(sources):
    found = {name: private_names(source) for name, source in sources.items()}
    files = [f"{name}: {private}" for name, private in found.items() if private]
    return files if len(files) > 1 else []


HOST_CODE = {  # exceptions, by file
    # PassiveEnvChecker reads values by design: it names the env and the value that are wrong.
    "torchwrap.transforms.checker": {".nonzero", ".item", ".tolist"},
    # `episode_count`, which documents that it waits for the device.
    "torchwrap.transforms.episode": {"int(self"},
}


HOST_QUESTIONS = r"\b(is_traced|is_host_readable|is_compiling|is_fake|FakeTensor)\b"
HOST_READS = r"\.(?:numpy|item|cpu|tolist|nonzero|argwhere)(?=\()|\b(?:int|bool|float)\(self"


def transforms_contain_no_host_code(sources):
    """A transform neither reads values nor asks whether it may: RowMask does that."""
    found = []
    for name, source in sources.items():
        if within(name, "torchwrap.transforms"):
            code = code_of(source)
            used = {*re.findall(HOST_QUESTIONS, code), *re.findall(HOST_READS, code)}
            allowed = HOST_CODE.get(name, set())
            found += [f"{name}: {word}" for word in used - allowed]
            found += [f"{name}: no {word}" for word in allowed - used]
    return found


# Density: one thought a statement. Line ends, comments and docstrings do not count.

MAX_TOKENS = 25
NO_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def statements(sources):
    for name, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.stmt):
                yield name, node


def expressions(statement):
    """The nodes of a statement, without those of the statements in its body."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from expressions(child)


def a_statement_assigns_one_value(sources):
    """`a, b = x, y` assigns two. An exchange, `a, b = b, a`, is allowed."""
    found = []
    for name, node in statements(sources):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                targets = {ast.unparse(part) for part in target.elts}
                values = {ast.unparse(part) for part in node.value.elts}
                if targets != values:
                    found.append(f"{name}: {ast.unparse(node)}")
    return found


def a_statement_has_one_condition(sources):
    """At most one conditional expression."""
    found = []
    for name, node in statements(sources):
        conditions = [part for part in expressions(node) if isinstance(part, ast.IfExp)]
        if len(conditions) > 1:
            found.append(f"{name}: {ast.unparse(node)}")
    return found


@functools.cache
def tokens_by_line(source):
    """The number of tokens on each line. An f-string is one token, as before Python 3.12."""
    counts = collections.Counter()
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_END"):
            depth -= 1
        elif depth == 0 and kind not in NO_CODE:
            counts[token.start[0]] += 1
        if kind.endswith("STRING_START"):
            depth += 1
    return counts


def lines_are_thin(sources):
    found = []
    for name, source in sources.items():
        lines = source.splitlines()
        for number, count in tokens_by_line(source).items():
            if count > MAX_TOKENS:
                found.append(f"{name}: {count} tokens in `{lines[number - 1].strip()}`")
    return found


# A module, and code that violates the rule if it is appended to the module.
VIOLATIONS = [
    (arrows, "torchwrap.transforms.reward", "def f():\n    from torchwrap import env"),
    (arrows, "torchwrap.transforms", "importlib.import_module('torchwrap.wrappers')"),
    (arrows, "torchwrap.transforms.transform", "from torchwrap.transforms import reward"),
    (arrows, "torchwrap.collector", "from torchwrap.interop.gymnasium import from_gymnasium"),
    (arrows, "torchwrap.functional", "from torchwrap.testing import ScriptedEnv"),
    (arrows, "torchwrap", "def f():\n    import examples.ppo"),
    (arrows, "torchwrap.collector", "from torchwrap._compile.trace import trace"),
    (arrows, "torchwrap._core.rows", "from torchwrap.random import Key"),
    (arrows, "torchwrap.random", "if TYPE_CHECKING:\n    from torchwrap import spaces"),
    (dependencies_are_known, "torchwrap.wrappers.repeat", "def f():\n    import imageio"),
    (
        module_imports_have_no_circle,
        "torchwrap.env",
        "from torchwrap.functional import FunctionalEnv",
    ),
    (modules_do_not_shadow_functions, "torchwrap.compile", ""),
    (modules_do_not_shadow_functions, "torchwrap.transforms.atari", ""),
    (acts_stay_at_home, "torchwrap.collector", "torch.compile(print)"),
    (acts_stay_at_home, "torchwrap._compile.trace", "torch.cuda.CUDAGraph()"),
    (acts_stay_at_home, "torchwrap.collector", "import torch.distributed"),
    (acts_stay_at_home, "torchwrap.transforms.image", "torch.rand(3)"),
    (acts_stay_at_home, "torchwrap.env", "import pickle"),
    (acts_stay_at_home, "torchwrap._core.nested", "sys.getrefcount(None)"),
    (acts_stay_at_home, "torchwrap.functional", "exec('pass')"),
    (nothing_is_patched, "torchwrap.env", "import torch\ntorch.backends.cudnn.benchmark = True"),
    (
        nothing_is_patched,
        "torchwrap.env",
        "from tensordict import TensorDict\nTensorDict.shape = None",
    ),
    (
        nothing_is_patched,
        "torchwrap.env",
        "import numpy as np\ndef f():\n    setattr(np, 'float', float)",
    ),
    (private_names_are_in_one_file, "torchwrap.env", "import torch._inductor"),
    (private_names_are_in_one_file, "torchwrap.env", "import torch\ntorch._C._x()"),
    (private_names_are_in_one_file, "torchwrap.env", "from tensordict import _td"),
    (private_names_are_in_one_file, "torchwrap.env", "import numpy as np\nnp.a._b"),
    (transforms_contain_no_host_code, "torchwrap.transforms.reward", "reward.item()"),
    (transforms_contain_no_host_code, "torchwrap.transforms.history", "is_host_readable(frames)"),
    (
        transforms_contain_no_host_code,
        "torchwrap.transforms.normalize",
        "torch.compiler.is_compiling()",
    ),
    (a_statement_assigns_one_value, "torchwrap.env", "low, high = 0, 1"),
    (a_statement_has_one_condition, "torchwrap.env", "x = 1 if a else (2 if b else 3)"),
    (lines_are_thin, "torchwrap.env", "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in VIOLATIONS))


@functools.cache
def violations(rule):
    return set(rule(SOURCES))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_library_follows_the_rule(rule):
    assert violations(rule) == set()


@pytest.mark.parametrize(
    ("rule", "module", "code"),
    VIOLATIONS,
    ids=[f"{rule.__name__}-{name}" for rule, name, _ in VIOLATIONS],
)
def test_rule_reports_a_planted_violation(rule, module, code):
    planted = {**SOURCES, module: f"{SOURCES.get(module, '')}\n{code}\n"}
    assert set(rule(planted)) - violations(rule)


@pytest.mark.full
def test_importing_torchwrap_imports_no_optional_dependency():
    code = "import sys, torch, tensordict, gymnasium; known = {*sys.modules}; import torchwrap; "
    code += "print(*{*sys.modules} - known)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    added = loaded - sys.stdlib_module_names - set(FOREIGN)
    assert {name for name in added if not name.startswith("__editable__")} == {"torchwrap"}
