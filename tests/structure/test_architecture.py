"""The rules of dependencies and names, checked in the source, so that a reader can rely on them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.conftest import FIRST, TOGETHER
from tests.structure import private_attributes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "peer", "coordinator", "cairn")

MAY_IMPORT = {
    "protocol": {"protocol"},
    "peer": {"protocol", "peer"},
    "coordinator": {"protocol", "coordinator"},
    "cairn": set(PACKAGES),
    "benchmarks": {*PACKAGES, "benchmarks"},
}
"""`cairn -> peer, coordinator -> protocol`: peer and coordinator never know each other."""

OF_TESTS = {"benchmarks": {"tests.wan", "tests.simulation"}}
"""Parts of the tests that a package may import: benchmarks use the emulated internet and the simulator of rounds."""

WORLD = {
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "fsspec", "glob", "grpc", "hivemind", "http", "httpx", "io",
    "logging", "mmap", "multiprocessing", "numpy.random", "os", "pathlib", "random", "requests", "secrets", "select",
    "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "torch.distributed",
    "torch.multiprocessing", "urllib", "uuid",
}  # fmt: skip
"""Sockets, files, clocks, processes, chance: none of it in `protocol`."""

PURE_EXCEPTIONS = {
    ("protocol/quantised.py", "logging"): "bitsandbytes' own log is silent while it is imported",
    ("protocol/state.py", "concurrent"): "hashing in threads (hashlib frees the GIL); the order of results is kept",
    ("protocol/state.py", "os"): "cpu_count, for the number of those threads",
    ("protocol/state.py", "mmap"): "the type of an argument: a checkpoint that the caller has mapped",
}

NEVER = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Nothing that arrives is ever unpickled, so nothing is pickled either."""

NEVER_CALLED = {"eval", "exec", "torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "__import__"}
WORLD_CALLS = {"open", "input", "print", "breakpoint", "torch.rand", "torch.randn", "torch.randint", "torch.randperm"}

INTERNAL_ERRORS = {
    "BlockError": "within the codec, which turns it into a CodecError that names the place",
    "InvariantError": "a bug of the round machine: a traceback is wanted, not one line",
}
"""Exceptions beside the tree of CairnError, with the reason. Those that begin with `_` are a file's own."""

BAD_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}


@dataclass(frozen=True)
class Source:
    """A file of the project: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def generated(self) -> bool:
        return "_pb2" in self.path

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree: many rules look at each."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Every module that is imported, at the top or in a function, as a dotted name."""
        return tuple(self._imports())

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """The dotted name of everything that is called, where it has one."""
        called = (dotted(node.func) for node in self.nodes if isinstance(node, ast.Call))
        return tuple(name for name in called if name)

    def _imports(self) -> Iterator[str]:
        here = self.path.removesuffix(".py").split("/")
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = here[: len(here) - node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                # `from torch import distributed` is an import of torch.distributed.
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)


def dotted(what: ast.expr) -> str:
    """Return the name of what is called, as "a.b.c" or "a().c"; empty if it has none."""
    match what:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute() as of, attr=name):
            return f"{dotted(of)}.{name}"
        case ast.Attribute():
            return ast.unparse(what)
    return ""


@cache
def read(path: Path) -> Source:
    text = path.read_text()
    return Source(str(path.relative_to(ROOT)), text, ast.parse(text, str(path)))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    paths = [p for f in folders or (*PACKAGES, "benchmarks", "tests") for p in sorted((ROOT / f).rglob("*.py"))]
    return tuple(read(p) for p in paths)


def is_of(module: str, packages: set[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def test_the_walk_sees_every_package_and_every_kind_of_import():
    assert {s.package for s in sources()} >= {*PACKAGES, "tests"}
    text = "import a.b\ndef f():\n from c import d\n from . import e\n from ..g import h\nx.y(z())"
    seen = Source("peer/swarm/x.py", text, ast.parse(text))
    assert set(seen.imports) == {"a.b", "c", "c.d", "peer.swarm", "peer.swarm.e", "peer.g", "peer.g.h"}
    assert set(seen.calls) == {"x.y", "z"}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_point_one_way(package: str):
    forbidden = {*PACKAGES, "benchmarks", "tests"} - MAY_IMPORT[package]
    wrong = [(s.path, m) for s in sources(package) for m in s.imports if is_of(m, forbidden)]
    assert not [(p, m) for p, m in wrong if not is_of(m, OF_TESTS.get(package, {package}))]


def test_the_emulated_internet_knows_nothing_of_the_project():
    packages = {*PACKAGES, "benchmarks"}
    assert not [(s.path, m) for s in sources("tests/wan") for m in s.imports if is_of(m, packages)]


def test_the_protocol_touches_no_socket_file_clock_process_or_chance():
    wrong = set()
    for source in sources("protocol"):
        if source.path.endswith("_pb2_grpc.py"):
            continue  # generated: the service's stubs, which only peer and coordinator use
        for module in source.imports:
            for part in WORLD:
                if is_of(module, {part}) and (source.path, part) not in PURE_EXCEPTIONS:
                    wrong.add((source.path, module))
        wrong |= {(source.path, call) for call in source.calls if call in WORLD_CALLS}
    assert not wrong


def test_each_exception_is_still_needed():
    used = {(s.path, part) for s in sources("protocol") for m in s.imports for part in WORLD if is_of(m, {part})}
    assert PURE_EXCEPTIONS.keys() <= used


def test_chance_in_the_protocol_comes_from_the_spec():
    # Initial weights are drawn from the spec's seed, in a forked generator: a pure function of the seed.
    seeders = {s.path for s in sources("protocol") for call in s.calls if "manual_seed" in call or "Generator" in call}
    assert seeders <= {"protocol/model.py"}


def test_generated_services_are_imported_at_the_edges_alone():
    wrong = [s.path for s in sources("protocol") for m in s.imports if m.endswith("_pb2_grpc")]
    assert not wrong


def test_the_round_machine_and_the_chain_know_no_tensors():
    wrong = [
        (s.path, m)
        for s in sources("protocol")
        if s.path.startswith("protocol/rounds/") or s.path == "protocol/chain.py"
        for m in s.imports
        if is_of(
            m,
            {"torch", "numpy", "transformers", "protocol.codec", "protocol.outer", "protocol.state", "protocol.model"},
        )
    ]
    assert not wrong


def test_only_the_decision_of_a_round_knows_the_kinds_of_exchange():
    kinds = {"protocol.rounds.gathered_exchange", "protocol.rounds.reduced_exchange"}
    knowing = {s.path for s in sources("protocol") for m in s.imports if is_of(m, kinds)}
    assert knowing == {"protocol/rounds/consensus.py"}


def test_a_container_with_a_bound_evicts_in_one_way():
    """See `BoundedDict`: two containers beside it are bounded by bytes too, which they count as an entry goes."""
    by_hand = ("popitem(last=False)", "[next(iter(", "pop(next(iter(")
    found = {s.path for s in sources("protocol") if any(way in s.text for way in by_hand)}
    assert found == {"protocol/bounded.py", "protocol/message_codec.py", "protocol/rounds/reduced_exchange.py"}


def foreign_writes(tree: ast.Module) -> list[str]:
    """Return the attributes that a file writes of others than `self`, unless another class of the file declares them.

    So a container may change its entries, whose class stands beside it, and the owner of a `BoundedDict` its limit.
    """
    fields: dict[str, set[str]] = {}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        fields[owner.name] = {
            node.target.id
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        } | {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute) and dotted(node.value) == "self"}
    found = []
    for part in tree.body:
        others = {"limit"}.union(*(of for name, of in fields.items() if name != getattr(part, "name", "")))
        for node in ast.walk(part):
            is_write = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
            if is_write and dotted(node.value) != "self" and node.attr not in others:
                found.append(ast.unparse(node))
    return found


def test_no_part_of_the_round_machine_or_the_node_writes_the_fields_of_another():
    parts = sources("protocol/rounds", "peer/node")
    assert {s.path: w for s in parts if (w := foreign_writes(s.tree))} == {}


def test_every_write_of_a_foreign_field_is_seen_and_no_other():
    text = """
class Entry:
    until: float
    def __init__(self): self.seen = 0
class Part:
    def f(self, context, entry):
        self.now = entry.until = entry.seen = 1
        context.observer, self._sync.began = True, 2
        context.now += 1
        del entry.other
"""
    writes = ["context.observer", "self._sync.began", "context.now", "entry.other"]
    assert sorted(foreign_writes(ast.parse(text))) == sorted(writes)


def test_a_node_has_at_most_ten_parts():
    (node,) = (
        n for n in read(ROOT / "peer/node/node.py").tree.body if isinstance(n, ast.ClassDef) and n.name == "Node"
    )
    parts = [n for n in node.body if isinstance(n, ast.AnnAssign) and "init=False" not in ast.unparse(n)]
    assert 5 < len(parts) <= 10 and not [f for f in node.body if getattr(f, "name", "") == "__init__"]


def used_before_made(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function reads, also in a lambda, on a line before it assigns them."""
    made: dict[str, int] = {}
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
    for name in names:
        if isinstance(name.ctx, ast.Store):
            made[name.id] = min(name.lineno, made.get(name.id, name.lineno))
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load) and n.lineno < made.get(n.id, 0)} - arguments


def test_a_node_is_built_bottom_up():
    """Nothing is given a part that is made after it, and nothing is assigned to a part that is made."""
    tree = read(ROOT / "peer/node/builder.py").tree
    (build,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build_node")
    assert used_before_made(build) == set()
    assert not [n for n in ast.walk(build) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)]


def test_every_use_of_a_part_that_is_made_later_is_seen_and_no_other():
    text = "def f(given):\n given = given or 1\n a = g(lambda: b + given)\n b = a + c\n return a, b"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef) and used_before_made(function) == {"b"}


def test_the_codec_and_the_outer_step_know_no_network():
    wrong = [
        (s.path, m)
        for s in sources("protocol")
        if s.path.startswith(("protocol/codec/", "protocol/outer.py", "protocol/state.py"))
        for m in s.imports
        if is_of(m, {"protocol.rounds", "protocol.chain", "protocol.envelope", "protocol.wire", "protocol.invite"})
    ]
    assert not wrong


def test_the_scheduler_of_a_fetch_is_a_step_function():
    """It draws from a generator that its driver gives: of `random` it uses the type alone."""
    names = ("actions", "chunk_picker", "chunk_stage", "congestion", "frames", "requests", "scheduler")
    pure = {f"peer.swarm.transfer.{name}" for name in names}
    steps = [s for s in sources("peer") if s.path.removesuffix(".py").replace("/", ".") in pure]
    assert len(steps) == len(names)
    for source in steps:
        beyond = [m for m in source.imports if is_of(m, {"peer"}) and not is_of(m, pure)]
        world = [m for m in source.imports if is_of(m, WORLD - {"random"})]
        drawn = [c for c in source.calls if c.startswith("random.")]
        assert not [*beyond, *world, *drawn], source.path


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["protocol.rounds.machine", "protocol.chain", "protocol.spec", "protocol.message_codec"]
)
def test_a_node_that_follows_the_chain_never_loads_torch(module: str):
    loaded = _modules_after(f"import {module}")
    assert module in loaded
    assert not loaded & {"torch", "numpy", "transformers", "hivemind", "asyncio"}


def test_the_network_side_of_a_peer_never_loads_cuda():
    # The node process leaves tensors to the trainer; hivemind loads torch on its own account, which is why it is named.
    wrong = [
        (s.path, m)
        for s in sources("peer")
        if s.path.startswith(("peer/node/", "peer/store/", "peer/swarm/"))
        for m in s.imports
        if is_of(m, {"torch.cuda", "transformers"})
    ]
    assert not wrong


def test_the_trainer_knows_the_channel_and_not_the_swarm():
    swarm = {
        "hivemind",
        "grpc",
        "peer.swarm",
        "peer.node",
        "peer.coordinator_client",
        "protocol.rounds",
        "protocol.chain",
    }
    wrong = [
        (s.path, m)
        for s in sources("peer")
        if s.path.startswith("peer/training/")
        for m in s.imports
        if is_of(m, swarm)
    ]
    assert not wrong


def test_hivemind_is_imported_by_the_transport_of_libp2p_alone():
    wrong = [s.path for s in sources(*PACKAGES) for m in s.imports if is_of(m, {"hivemind"})]
    assert wrong and not [path for path in wrong if not path.startswith("peer/swarm/libp2p/")]


def test_the_terminal_is_known_to_the_command_line_alone():
    assert not [
        (s.path, m)
        for s in sources("protocol", "peer", "coordinator")
        for m in s.imports
        if is_of(m, {"click", "rich"})
    ]


def test_nothing_is_pickled_or_evaluated():
    wrong = [(s.path, m) for s in sources() for m in s.imports if is_of(m, NEVER)]
    wrong += [(s.path, c) for s in sources(*PACKAGES) for c in s.calls if c in NEVER_CALLED]
    assert not wrong


def test_no_input_is_checked_by_an_assertion():
    # `python -O` drops assertions. One that tells the type checker that something is not None is allowed.
    wrong = [
        f"{s.path}:{node.lineno}"
        for s in sources(*PACKAGES)
        for node in s.nodes
        if isinstance(node, ast.Assert) and not ast.unparse(node.test).endswith(" is not None")
    ]
    assert not wrong


def test_every_file_opens_with_what_it_is_for():
    wrong = [s.path for s in sources() if not s.generated and not ast.get_docstring(s.tree)]
    assert not wrong


def test_every_folder_of_code_is_a_package():
    folders = {Path(s.path).parent for s in sources(*PACKAGES)}
    assert not [str(f) for f in folders if not (ROOT / f / "__init__.py").exists()]


def test_no_test_imports_another_test():
    """Keep what several tests use in tests/support, or beside them in a module that is no test."""
    modules = {m for s in sources("tests", "benchmarks") for m in s.imports if m.startswith("tests.")}
    assert not {m for m in modules if any(word.startswith("test_") for word in m.split("."))}


def test_the_order_of_tests_names_files_that_exist():
    files = {s.path for s in sources("tests")}
    assert {f for f in FIRST if not any(path.startswith(f) for path in files)} == set()
    assert TOGETHER.keys() <= files


def test_private_attributes_of_other_packages_are_touched_no_more_than_before():
    """See `private_attributes`: a lower count is stored by `python -m tests.structure.private_attributes --write`."""
    bounds = json.loads(private_attributes.BOUNDS.read_text())
    places = private_attributes.foreign((s.path, s.nodes) for s in sources() if not s.generated)
    assert not {folder: found for folder, found in places.items() if len(found) > bounds.get(folder, 0)}


def test_every_kind_of_foreign_private_attribute_is_seen_and_no_other():
    product = """
import os
from peer.a import _imported
class A:
    _field: int = 0
    def __init__(self): self._own = self._unset
    def f(self, other): return other._own, other._field, super()._inherited, self.__class__, os._exit
"""
    test = """
def _helper(): pass
def test(monkeypatch, a):
    monkeypatch.setattr(a, "_own", 1)
    monkeypatch.setattr("peer.b._own", 1)
    a.b._foreign.c, getattr(a, "_own"), getattr(a, "public"), a._helper
"""
    other = "def f(a): return a._own"
    files = {"peer/x/a.py": product, "peer/x/b.py": other, "peer/y/c.py": other, "tests/x/test_a.py": test}
    assert private_attributes.foreign((path, list(ast.walk(ast.parse(text)))) for path, text in files.items()) == {
        "peer/x": ["peer/x/a.py:3 _imported"],
        "peer/y": ["peer/y/c.py:1 _own"],
        "tests/x": [f"tests/x/test_a.py:{at}" for at in ("4 _own", "5 _own", "6 _foreign", "6 _own")],
    }


def test_files_are_named_for_what_is_in_them():
    wrong = [
        s.path
        for s in sources()
        if BAD_NAMES & {part for word in Path(s.path).with_suffix("").parts for part in word.split("_")}
    ]
    assert not wrong


def test_no_file_is_named_for_an_activity():
    # A file is named for its contents, or for the command that it is: serve.py, not serving.py.
    assert not [s.path for s in sources(*PACKAGES) if Path(s.path).stem.endswith("ing")]


def test_a_public_class_name_stands_for_one_thing():
    names = Counter(
        node.name
        for source in sources(*PACKAGES)
        if not source.generated
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


def test_errors_are_one_tree():
    """Every error is a CairnError, so that a command line can print any of them as one line."""
    ours: dict[str, list[str]] = {}
    for source in sources(*PACKAGES):
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                ours[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]

    def roots(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        if name == "CairnError" or name not in ours or name in seen:
            return {name}
        return set().union(*(roots(base, seen | {name}) for base in ours[name])) if ours[name] else {name}

    builtin_errors = {"Exception", "ValueError", "RuntimeError", "OSError", "TypeError", "KeyError", "BaseException"}
    errors = {name for name in ours if name != "CairnError" and roots(name) & {*builtin_errors, "CairnError"}}
    outside = {name for name in errors if "CairnError" not in roots(name) and not name.startswith("_")}
    assert len(errors) > 10
    assert outside == INTERNAL_ERRORS.keys()
