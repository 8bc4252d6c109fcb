"""LoRA adapters: PEFT's modules in a run's model, whose own parameters are the frozen base.

The adapter alone is the run's state. The base is a file of all the model's parameters, in the form of a checkpoint, and
is named by its digest. Its linear layers may be quantised (see `quantised`). `peft` is imported for such runs only.
Stacked experts are those that `transformers` from version 5 on holds as one parameter for all experts of a layer.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from protocol.errors import MalformedError, SpecError
from protocol.extras import install
from protocol.layout import Layout
from protocol.model import build_model, one_line, seeded
from protocol.quantised import (
    ABSMAX,
    BITSANDBYTES_MISSING,
    QuantisedForm,
    QuantisedLinear,
    check_kernels,
    without_kernel_hub,
)
from protocol.spec import ALL_LINEAR, AdapterSettings, AdapterSpec, ModelSpec
from protocol.state import FileBytes, tensors_in

if TYPE_CHECKING:
    from peft import LoraConfig

PEFT_MISSING = f"this run trains a LoRA adapter, which needs one more package: {install('lora')}"
NAME = "default"
"""The adapter's name, which `peft` puts into the names of its parameters."""
EXPERT_TARGETS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Names of experts' matrices in checkpoints: `peft` finds the stacked ones by them."""
_WRAPPED = re.compile(r"\.(?:base_layer\.)+")
"""The additions of `peft` to the name of a base parameter that has an adapter."""


def build_run_model(model: ModelSpec, *, device: torch.device | str = "cpu", exact: bool = False) -> nn.Module:
    """Build a run's model in training mode. A base and its adapter are zeros until `load_base` and a state come.

    A quantised base is held as it is stored, except on the meta device. `exact`: as in `held_dtype`. Raises SpecError.
    """
    adapter = model.adapter
    if adapter is None:
        return build_model(model.config, device=device)
    device = torch.device(device)
    held = held_dtype(adapter, device.type, exact=exact)
    quantised = adapter.quantised and device.type != "meta"
    return build_adapted(model.config, adapter, device=device, held=held, quantised=quantised)


def held_dtype(adapter: AdapterSettings, device_type: str, *, exact: bool = False) -> torch.dtype:
    """Return the dtype in which a device holds a base's unquantised linear layers and its stacked experts.

    That is bf16 for a base of bf16 values on a GPU, unless it must also run in fp32 (`exact`), and fp32 elsewhere.
    Autocast makes the same numbers of both.
    """
    return torch.bfloat16 if adapter.kind == "BF16" and device_type == "cuda" and not exact else torch.float32


def build_adapted(
    config: Mapping[str, Any],
    adapter: AdapterSettings,
    *,
    device: torch.device | str = "meta",
    held: torch.dtype = torch.float32,
    quantised: bool = False,
) -> nn.Module:
    """Build a model with an adapter, all zeros; only what the adapter trains has gradients.

    `held`: the dtype of the base's linear layers and stacked experts. `quantised`: layers that the base's file has
    quantised are held like that. Not for two threads at once: accelerate's `init_empty_weights` changes what all
    threads build. Raises SpecError.
    """
    device = torch.device(device)
    if device.type == "meta":
        model = build_model(config, device=device)
    else:
        _peft()
        from accelerate import init_empty_weights  # a dependency of peft

        with init_empty_weights(include_buffers=False):  # only the buffers are computed
            model = build_model(config, device=device)
        model.tie_weights()  # type: ignore[operator]
    materialise(model, device, hold_base(model, adapter, device, held=held, quantised=quantised))
    return model


def hold_base(
    model: nn.Module, adapter: AdapterSettings, device: torch.device, *, held: torch.dtype, quantised: bool
) -> Callable[[nn.Parameter], torch.dtype]:
    """Put an adapter and, if `quantised`, quantised layers on the device into a model on the meta device.

    Return the function from its parameters to their dtypes: `held` of frozen linear layers and stacked experts, fp32
    of others. Raises SpecError.
    """
    add_adapter(model, adapter)
    return _hold_frozen(model, adapter, device, held=held, quantised=quantised)


def _hold_frozen(
    model: nn.Module, adapter: AdapterSettings, device: torch.device, *, held: torch.dtype, quantised: bool
) -> Callable[[nn.Parameter], torch.dtype]:
    """Do the same as `hold_base`, to a model whose parameters are frozen already."""
    if quantised:
        if device.type != "meta":
            check_kernels(adapter.dtype, device)
        for name, layer in _to_quantise(model).items():
            model.set_submodule(name, QuantisedLinear(layer, adapter.dtype, device))
    # Autocast rounds what linear layers read, and nothing else: embeddings stay in fp32, and experts of a base in fp32.
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    rounded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - looked_up
    if adapter.kind == "BF16":
        for experts, outermost in _stacked_experts(model).items():
            _cast_experts(experts, outermost)
            rounded |= {id(p) for p in experts.parameters(recurse=False)}
    return lambda p: held if id(p) in rounded and not p.requires_grad else torch.float32


def _stacked_experts(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the modules of stacked experts, each with the outermost module that adds an adapter to it, or itself."""
    found: dict[nn.Module, nn.Module] = {}
    for outermost in model.modules():  # before those within it
        experts = outermost
        while isinstance(inner := getattr(experts, "base_layer", None), nn.Module):
            experts = inner
        if hasattr(experts, "is_transposed") and hasattr(experts, "has_bias"):
            found.setdefault(experts, outermost)
    return found


def _cast_experts(experts: nn.Module, outermost: nn.Module) -> None:
    """Make stacked experts compute in the same type however they are held: casts are for one pass.

    That is autocast's type, as for linear layers: autocast does not know the products of stacked experts. `peft` adds
    an adapter to the weights themselves. With one it is fp32, since bf16 would round small changes away.
    """
    plain = outermost.forward

    def forward(x: Tensor, *positional: Any, **named: Any) -> Tensor:
        kind = x.device.type
        if outermost is not experts:
            dtype = torch.float32
        elif torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x = x.to(dtype)
        else:
            return plain(x, *positional, **named)
        held = {n: p for n, p in experts.named_parameters(recurse=False) if p.dtype != dtype}
        for name, parameter in held.items():
            setattr(experts, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
        try:
            return plain(x, *positional, **named)
        finally:
            for name, parameter in held.items():
                setattr(experts, name, parameter)

    outermost.forward = forward if outermost is experts else torch.compiler.disable(forward)


def add_adapter(model: nn.Module, adapter: AdapterSettings) -> LoraConfig:
    """Put the adapter into a model, freeze all else, and return PEFT's settings with the names of the modules.

    Raises SpecError for names that fit no module, or one that cannot have an adapter.
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=ALL_LINEAR if adapter.targets == [ALL_LINEAR] else list(adapter.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    trained = list(_trained_modules(model, adapter.train))
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[operator]
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except ValueError as e:
        raise SpecError(f"model.adapter: {one_line(e)}") from None
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            # It changes its module's class in each pass, for which torch.compile would compile again.
            module.forward = torch.compiler.disable(module.forward)
    for name, module in model.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer) and module.get_base_layer() in ends:  # type: ignore[operator]
            raise SpecError(f"model.adapter.targets: {name} is an embedding or the output layer: name linear modules")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.endswith((f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight")):
            raise SpecError(f"model.adapter.targets: {name} is not of a linear module: name linear modules")
    if left_out := _left_out(model, adapter.targets):
        raise SpecError(
            f"model.adapter.targets: {len(left_out)} of these linear modules would get no adapter, as {left_out[0]}: "
            "peft gives this model's experts one instead. Name modules that experts do not have, such as q_proj"
        )
    config.modules_to_save = [name for name, _ in trained] or None
    for _, module in trained:
        module.requires_grad_(True)
    return config


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise SpecError for a target that names no module of a model: `peft` ignores it if another target names one.

    For new runs: peers take the spec of one that has begun as it is.
    """
    names = [name for name, _ in model.named_modules()]
    known = {ALL_LINEAR, *(EXPERT_TARGETS if _stacked_experts(model) else ())}
    for target in targets:
        if target not in known and not any(f".{name}".endswith(f".{target}") for name in names):
            output = model.get_output_embeddings()  # type: ignore[operator]
            found = (n for n, m in model.named_modules() if _is_matrix(m) and m is not output)
            last = sorted({name.rpartition(".")[2] for name in found})
            close = ", ".join(get_close_matches(target, last, 1) or last[:5])
            raise SpecError(f"model.adapter.targets: the model has no module {target}: did you mean {close}?")


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _left_out(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the linear modules that are meant and have no adapter.

    `peft` gives stacked experts one adapter for all, and then drops linear modules that have the names of theirs.
    "all-linear" does not mean the output layer.
    """
    wrapped = {id(m) for outer in model.modules() if (m := getattr(outer, "base_layer", None)) is not None}
    wrapped.add(id(model.get_output_embeddings()))  # type: ignore[operator]
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n]
    without = [name for name, module in linear if id(module) not in wrapped]
    ends = tuple(f".{target}" for target in targets)
    return [name for name in without if ALL_LINEAR in targets or f".{name}".endswith(ends)]


def _trained_modules(model: nn.Module, names: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are trained in full. Raises SpecError unless each has vectors alone."""
    for wanted in names:
        found = [(n, m) for n, m in model.named_modules() if n == wanted or n.endswith(f".{wanted}")]
        for name, module in found:
            if any(p.ndim != 1 for p in module.parameters()) or not list(module.parameters()):
                raise SpecError(
                    f"model.adapter.train: {name} is not a module of vectors alone, such as a norm: give matrices an "
                    "adapter (targets)"
                )
            yield name, module
        if not found:
            raise SpecError(f"model.adapter.train: the model has no module {wanted}")


def materialise(model: nn.Module, device: torch.device, dtype_of: Callable[[nn.Parameter], torch.dtype | None]) -> None:
    """Replace parameters on the meta device by zeros on this one; not those whose dtype is None. Ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta or (dtype := dtype_of(parameter)) is None:
                continue
            if id(parameter) not in made:
                zeros = torch.zeros_like(parameter.detach(), dtype=dtype, device=device)  # split as it is
                made[id(parameter)] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])


def draw_adapter(config: Mapping[str, Any], adapter: AdapterSettings, seed: int) -> dict[str, Tensor]:
    """Return the adapter's initial values on the CPU, as PEFT draws them from a seed: B is zeros. No base is built.

    Modules that are trained in full are zeros here: they begin as the base has them. Raises SpecError.
    """
    model = build_adapted(config, adapter)
    materialise(model, torch.device("cpu"), lambda p: torch.float32 if p.requires_grad else None)
    with seeded(seed):
        for module in model.modules():
            if isinstance(module, _peft().tuners.lora.LoraLayer):
                module.reset_lora_parameters(NAME, True)  # type: ignore[operator]
    return {name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the base's parameters in a model with an adapter, by the names that they have without one."""
    lora = (f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight")
    return {_WRAPPED.sub(".", n): p.detach() for n, p in model.named_parameters() if not n.endswith(lora)}


def base_layout(model: nn.Module) -> Layout:
    """Return the layout of the base's parameters in a model with an adapter."""
    shapes = {name: tuple(p.shape) for name, p in base_parameters(model).items()}
    return Layout.of(shapes | {_weight(n): (m.out_features, m.in_features) for n, m in _quantised(model).items()})


def base_file_layout(model: nn.Module, adapter: AdapterSettings) -> Layout:
    """Return the layout of the base's file, for a model with an adapter."""
    forms, tensors = quantised_forms(model, adapter), []
    for t in base_layout(model).tensors:
        tensors += forms[t.name].stored(t.name) if t.name in forms else [replace(t, kind=adapter.kind)]
    return Layout.in_order(tensors)


def quantised_forms(model: nn.Module, adapter: AdapterSettings) -> dict[str, QuantisedForm]:
    """Return the forms of the weights that the base's file has quantised, by the names that they have there.

    Raises SpecError if a quantised base has none.
    """
    layers = (_quantised(model) or _to_quantise(model)) if adapter.quantised else {}
    if adapter.quantised and not layers:
        raise SpecError(
            f"model.adapter.dtype: {adapter.dtype} is of linear layers, and {model.config.model_type} has no linear "  # type: ignore[union-attr]
            'layers of torch: write "bfloat16"'
        )
    return {
        _weight(name): QuantisedForm(adapter.dtype, torch.Size([layer.out_features, layer.in_features]))
        for name, layer in layers.items()
    }


def _to_quantise(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that a quantised base quantises: linear, not the output layer, no shared weight."""
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    output_layer = model.get_output_embeddings()  # type: ignore[operator]
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not output_layer}
    return {n: m for n, m in linear.items() if not m.weight.requires_grad and users[id(m.weight)] == 1}


def _quantised(model: nn.Module) -> dict[str, QuantisedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def _weight(layer: str) -> str:
    """Return the name of a layer's weight without an adapter."""
    return _WRAPPED.sub(".", f"{layer}.weight")


def load_base(
    model: nn.Module,
    adapter: AdapterSpec,
    data: FileBytes,
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Copy the base from its file's bytes, which a digest vouched for, into a model from `build_adapted`.

    Quantised weights become fp32 in a model that does not hold them as they are. `copy(parameter, values)` copies into
    a parameter. Raises MalformedError for another model's file.
    """
    if (numel := base_layout(model).numel) != adapter.parameters:
        raise MalformedError(f"the base has {numel:,} parameters, and the spec says {adapter.parameters:,}")
    base, forms = base_parameters(model), quantised_forms(model, adapter)
    layers = {_weight(name): layer for name, layer in _quantised(model).items()}
    codes: dict[str, Tensor] = {}
    for name, tensor in tensors_in(base_file_layout(model, adapter), data):
        weight = name.removesuffix(ABSMAX)
        if name in forms:
            codes[name] = tensor
        elif weight not in forms:
            copy(base[name], tensor)
        elif weight in layers:
            layers[weight].codes.copy_(codes.pop(weight))
            layers[weight].absmax.copy_(tensor)
        else:
            copy(base[weight], forms[weight].values(codes.pop(weight), tensor, torch.float32))


def merge_adapter(model: nn.Module) -> None:
    """Add the adapter to the base's own parameters, on which it has no effect of its own any more."""
    for module in model.modules():
        if isinstance(module, _peft().tuners.lora.LoraLayer):
            module.merge(safe_merge=True)  # type: ignore[attr-defined]


def held_bytes(config: Mapping[str, Any], adapter: AdapterSettings, device_type: str) -> int:
    """Return the bytes that a trainer's device holds of a frozen base: those of `build_run_model`.

    It needs no `peft`: somebody who looks for a run has not installed it yet. Raises SpecError.
    """
    model, held = build_model(config, device="meta").requires_grad_(False), held_dtype(adapter, device_type)
    for _, module in _trained_modules(model, adapter.train):
        module.requires_grad_(True)
    dtype_of = _hold_frozen(model, adapter, torch.device("meta"), held=held, quantised=adapter.quantised)
    codes = sum(layer.codes.nbytes + layer.absmax.nbytes for layer in _quantised(model).values())
    return codes + sum(p.numel() * dtype_of(p).itemsize for p in model.parameters() if not p.requires_grad)


def missing_package(adapter: AdapterSettings | None) -> str:
    """Return what to do about a package that such a run needs and that is not installed; "" if all are."""
    if adapter is not None and find_spec("peft") is None:
        return PEFT_MISSING
    if adapter is not None and adapter.quantised and find_spec("bitsandbytes") is None:
        return BITSANDBYTES_MISSING
    return ""


def _peft() -> Any:
    with nullcontext() if "peft" in sys.modules else without_kernel_hub():
        try:
            import peft
        except ImportError:
            raise SpecError(PEFT_MISSING) from None
    return peft
