"""How layers run changes what a step costs, never what it is: compiled, recomputed, and when memory or torch fail."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo  # torch documents its options and counters under this private name
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from peer.errors import TrainingError
from peer.training import layers as layers_module
from peer.training.inner_optimizer import InnerOptimizer
from peer.training.layers import LayerOptions, compiles, decoder_layers
from protocol.model import build_model, plain_config
from protocol.spec import InnerSpec, Schedule
from tests.support.local_trainer import Heard, born, loaded, same, train
from tests.support.specs import TINY_LLAMA
from tests.support.trainer_world import World

BATCH, LAYERS = 4, 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh():
    """Reset torch before each test, since it keeps compiled code for all models."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Backend:
    """Stands for a compiler: counts the graphs it is given and how often they run."""

    def __init__(self, fails: Exception | None = None):
        self.graphs = self.runs = 0
        self.fails = fails

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]):
        self.graphs += 1
        if self.fails is not None:
            raise self.fails

        def run(*inputs: Tensor):
            self.runs += 1
            return graph(*inputs)

        return run


@pytest.fixture
def backend(monkeypatch) -> Backend:
    made = Backend()
    monkeypatch.setattr(layers_module, "BACKEND", made)
    return made


def inner(options: LayerOptions, **more) -> tuple[InnerOptimizer, Heard]:
    heard = Heard()
    model = build_model(plain_config(TINY_LLAMA), seed=3)
    spec = InnerSpec(batch=BATCH, optimizer="adamw", schedule=Schedule(kind="constant"))
    return InnerOptimizer(spec, model, CPU, layers=options, report=heard, **more), heard


def gradients(of: InnerOptimizer, windows: int = BATCH) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(windows)
    step = of.forward_backward(torch.randint(0, TINY_LLAMA["vocab_size"], (windows, 17), generator=made))
    assert step is not None and step.is_finite
    return {n: p.grad.clone() for n, p in of.model.named_parameters() if p.grad is not None}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def calls_of_mlps(of: InnerOptimizer) -> list[str]:
    """Filled at each forward call of a layer's MLP."""
    seen: list[str] = []
    for name, module in of.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


def test_recomputed_activations_give_the_same_gradients_bit_for_bit():
    plain, again = inner(LayerOptions("off"))[0], inner(LayerOptions("on"))[0]
    once, twice = calls_of_mlps(plain), calls_of_mlps(again)
    assert equal(gradients(plain), gradients(again))
    assert len(once) == LAYERS and len(twice) == 2 * LAYERS


def kept(of: InnerOptimizer) -> int:
    """Bytes that a forward pass keeps, within the layers and outside."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    x = torch.zeros((BATCH, 16), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        of.model(input_ids=x, use_cache=False)
    return total


def test_of_a_recomputed_layer_next_to_nothing_is_kept():
    assert kept(inner(LayerOptions("on"))[0]) < kept(inner(LayerOptions("off"))[0]) / 3


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_compiled_layers_share_few_graphs_and_give_the_gradients(backend, recompute):
    plain, (compiled, heard) = inner(LayerOptions())[0], inner(LayerOptions(recompute, compiled=True))
    assert [n for n, _ in compiled.model.named_parameters()] == [n for n, _ in plain.model.named_parameters()]
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
    for windows in (4, 3, 2, 1, 5, 6, 7, 4):
        runs = backend.runs
        found, wanted = gradients(compiled, windows), gradients(plain, windows)
        assert backend.runs - runs == (2 * LAYERS if recompute == "on" else LAYERS)
        same(found, wanted, atol=1e-7)
    assert backend.graphs <= 3  # the first size, any number of windows, one window
    assert [h[:2] for h in heard] == [("info", "compile")]


def test_other_threads_have_a_turn_between_compiled_layers(backend, monkeypatch):
    turns, hooked_modules = [], []
    register = nn.Module.register_forward_pre_hook

    def note(module: nn.Module, *given, **named):
        hooked_modules.append(module)
        return register(module, *given, **named)

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", note)
    of, _ = inner(LayerOptions(compiled=True), yield_hook=lambda: turns.append(1))
    gradients(of)
    outside = {"", "model", "model.embed_tokens", "model.layers", "model.rotary_emb", "model.norm", "lm_head"}
    hooked = {n for n, m in of.model.named_modules() if m in hooked_modules}
    assert hooked == outside | decoder_layers(of.model).keys()
    assert len(turns) == len(hooked)  # "model.layers" is not called; the last is after the backward pass
    assert backend.graphs == 1


def test_a_machine_that_cannot_compile_trains_without_and_says_so_once(backend):
    backend.fails = RuntimeError("no compiler\nwas found")
    of, heard = inner(LayerOptions("on", compiled=True))
    assert equal(gradients(of), gradients(inner(LayerOptions())[0]))
    gradients(of, 3)
    assert backend.graphs == 1
    (_, _, _), (level, kind, text) = heard
    assert (level, kind) == ("warning", "compile")
    assert "(no compiler was found)" in text and "apt install g++" in text


def test_layers_compiled_before_torch_failed_are_computed_again_compiled(monkeypatch):
    """Of layers of two kinds torch compiles the first only: what each keeps for the backward pass is its own."""
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("no compiler")
        return aot_eager(graph, inputs)

    def layers_of_two_kinds(options: LayerOptions) -> InnerOptimizer:
        model = build_model(plain_config(TINY_LLAMA), seed=3)
        wide = build_model(plain_config(TINY_LLAMA | {"intermediate_size": 96}), seed=4)
        model.model.layers[1].mlp = wide.model.layers[1].mlp
        spec = InnerSpec(batch=BATCH, optimizer="adamw", schedule=Schedule(kind="constant"))
        return InnerOptimizer(spec, model, CPU, layers=options)

    monkeypatch.setattr(layers_module, "BACKEND", compiler)
    of = layers_of_two_kinds(LayerOptions("on", compiled=True))
    same(gradients(of), gradients(layers_of_two_kinds(LayerOptions("off"))), atol=1e-6)
    assert not of.layers.compiled and len(graphs) == 2


def test_a_compiler_that_runs_out_of_memory_is_a_pass_without_memory(backend):
    backend.fails = torch.OutOfMemoryError("a GPU's")
    of, _ = inner(LayerOptions("off", compiled=True))
    with pytest.raises(TrainingError, match="does not suffice for one window"):
        gradients(of)
    assert of.layers.compiled


def test_more_forms_of_input_than_torch_compiles_run_without_and_it_is_said(backend):
    of, heard = inner(LayerOptions(compiled=True))
    with dynamo.patch(recompile_limit=1):
        for windows in (4, 3, 2):
            same(gradients(of, windows), gradients(inner(LayerOptions())[0], windows), atol=1e-7)
        runs = backend.runs
        gradients(of, 4)
        assert backend.runs - runs == LAYERS, "what is compiled is used still"
    assert [h[:2] for h in heard] == [("info", "compile"), ("warning", "compile")] and backend.graphs == 1


def test_a_model_whose_layers_are_not_found_is_trained_as_it_is():
    heard = Heard()
    made = layers_module.Layers(nn.Linear(2, 2), LayerOptions("on", compiled=True), heard)
    assert not made.compiled and not made.may_recompute
    assert [h[:2] for h in heard] == [("warning", "compile")]


# -- when memory does not suffice --------------------------------------------------------------------------------


def short_of_memory(of: InnerOptimizer, most: dict[bool, int]) -> list[tuple[int, bool]]:
    """Have passes of more windows fail, by whether activations are recomputed. Filled with what was tried."""
    tried: list[tuple[int, bool]] = []

    def look(_module, _positional, named):
        windows = len(named["input_ids"])
        tried.append((windows, of.layers.recompute))
        if windows > most[of.layers.recompute]:
            raise torch.OutOfMemoryError("a GPU's")

    of.model.register_forward_pre_hook(look, with_kwargs=True)
    return tried


def test_fewer_windows_come_first_then_recomputed_activations_then_fewer_of_those():
    of, heard = inner(LayerOptions())
    tried = short_of_memory(of, {False: 0, True: 2})
    wanted = gradients(inner(LayerOptions())[0])
    found = gradients(of)
    assert tried == [(4, False), (2, False), (1, False), (4, True), (2, True), (2, True)]
    same(found, wanted, atol=1e-6)
    assert [h[:2] for h in heard] == [("info", "memory")]


def test_where_nothing_is_left_to_try_the_error_tells_what_to_do():
    of, _ = inner(LayerOptions())
    tried = short_of_memory(of, {False: 0, True: 0})
    remedies = "choose another with --device, add --moments 8bit unless the run is replayable, or take a GPU with more"
    with pytest.raises(TrainingError, match=remedies):
        gradients(of)
    assert tried[-1] == (1, True)
    of, _ = inner(LayerOptions("off"))
    tried = short_of_memory(of, {False: 0})
    with pytest.raises(TrainingError, match="leave out --recompute off"):
        gradients(of)
    assert tried == [(4, False), (2, False), (1, False)]


# -- by the trainer ----------------------------------------------------------------------------------------------


def test_auto_compiles_on_a_gpu_only():
    assert [compiles(asked, kind) for asked in ("auto", "on", "off") for kind in ("cpu", "cuda")] == [
        False, True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++, and there is none")
def test_a_trainer_learns_the_same_with_layers_that_are_really_compiled(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    world = World.make(tmp_path)
    trainer, heard = born(world, compile="on", recompute="on")
    trainer.load(world.load())
    train(trainer, 3)
    assert [h[:2] for h in heard] == [("info", "compile")] and trainer.backend.inner.layers.compiled
    assert counters["stats"]["unique_graphs"] == 1
    assert any((tmp_path / "peer1" / "trainer" / "compiled").rglob("*.so"))
    plain = loaded(world, 1)
    train(plain, 3)
    same(trainer.backend.outer.local, plain.backend.outer.local, atol=2e-4)
