"""The run's model: any causal language model of `transformers`, built from the config in the spec and nothing else.

Nothing is downloaded and no code comes with a config. `transformers` is imported when a model is first asked for: it
takes seconds. A model here is a pure function of its config and a seed.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import rfc8785
import torch
from torch import Tensor, nn

from protocol.errors import SpecError
from protocol.layout import Layout
from protocol.spec import MAX_LAYERS

if TYPE_CHECKING:
    from transformers.configuration_utils import PretrainedConfig

# Fields that say how a model is used, printed or stored, not what it computes: left out, so that a config.json
# from elsewhere can be pasted into a run.toml. Parameters are fp32 whatever its dtype says.
_NOT_OF_THE_MODEL = frozenset(
    "_name_or_path _attn_implementation _commit_hash architectures attn_implementation chunk_size_feed_forward dtype "
    "id2label label2id output_attentions output_hidden_states problem_type return_dict torch_dtype torchscript "
    "transformers_version use_cache use_bfloat16".split()
)
_ROPE = frozenset(["rope_theta", "rope_scaling", "rope_parameters"])  # one thing by the names it had over time


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full config with all defaults, as values that survive canonical JSON.

    This is what a spec holds: a later `transformers` with other defaults still builds the same model.
    Raises SpecError.
    """
    whole = {k: v for k, v in _config_of(config).to_dict().items() if k not in _NOT_OF_THE_MODEL}
    try:
        plain = json.loads(rfc8785.dumps(whole))
    except (rfc8785.CanonicalizationError, TypeError, ValueError) as e:
        raise SpecError(
            f"model: this config does not fit into JSON ({e}): write plain numbers, words and lists"
        ) from None
    again = {k: v for k, v in _config_of(plain).to_dict().items() if k not in _NOT_OF_THE_MODEL}
    if again != whole:
        changed = sorted(k for k in whole.keys() | again.keys() if whole.get(k) != again.get(k))
        raise SpecError(f"model: {', '.join(changed)} would not survive being written down and read again")
    return plain


def build_model(
    config: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """Build the model in training mode, with initial weights drawn from `seed`.

    The process's random state is unchanged.

    On device "meta" it has shapes and no memory. Attention is scaled_dot_product_attention where the model has it.
    Raises SpecError, in one line that names the field.
    """
    from transformers import dynamic_module_utils
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # nobody is asked whether a stranger's code may run: it may not
    made = _config_of(config)
    device = torch.device(device)
    try:
        with seeded(seed, device), torch.device(device):
            try:
                model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
            except ValueError as e:
                if "scaled_dot_product_attention" not in str(e):
                    raise
                model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # noqa: BLE001 - models of a hundred authors raise what they like, as configs do
        raise SpecError(f"model: {made.model_type} cannot be built from this config: {one_line(e)}") from None
    return model.to(torch.float32).train()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from a seed in the block, on the CPU and on this device. The process's random state is unchanged."""
    forked = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        torch.manual_seed(seed)
        yield


def model_layout(model: nn.Module) -> Layout:
    """Return the layout of the model's state: its parameters, or those that are trained of one with an adapter.

    A tied parameter has the first one's name only. Raises SpecError for persistent buffers: they change while training,
    and updates would not carry them.
    """
    for name, module in model.named_modules():
        for buffer in module._buffers:
            if module._buffers[buffer] is not None and buffer not in module._non_persistent_buffers_set:
                raise SpecError(
                    f"model: it keeps state outside its parameters (buffer {name}.{buffer}), which updates do "
                    "not carry: choose a model_type without such buffers"
                )
    return Layout.of({name: tuple(p.shape) for name, p in _state_parameters(model)})


def _state_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    adapted = hasattr(model, "peft_config")
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad or not adapted)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of the model's state by their layout names: the tensors themselves, in layout order."""
    named = dict(_state_parameters(model))
    return {t.name: named[t.name].detach() for t in model_layout(model).tensors}


def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy a state into the model. `tensors` must have exactly the layout's names and shapes, else SpecError."""
    own = parameters_of(model)
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise SpecError(f"the state does not fit the model: {len(odd)} tensors differ, the first is {odd[0]}")
    for name, parameter in own.items():
        if parameter.shape != tensors[name].shape:
            raise SpecError(
                f"the state does not fit the model: {name} is {list(tensors[name].shape)}, not {list(parameter.shape)}"
            )
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def _version() -> str:
    return importlib.metadata.version("transformers")


def _config_of(config: Mapping[str, Any]) -> PretrainedConfig:
    """Return a `transformers` config from a mapping with a model_type, whose fields it must all know.

    Raises SpecError.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CAUSAL or kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), CAUSAL, n=5, cutoff=0.5) or ["llama", "qwen3", "gpt2", "gpt_neox"]
        raise SpecError(
            f"model: model_type is {str(kind)[:60]!r}, for which transformers {_version()} has no causal language "
            f"model; known ones nearby: {', '.join(near)}"
        )
    for forbidden in ("auto_map", "trust_remote_code"):
        if forbidden in config:
            raise SpecError(f"model: {forbidden}: models that bring their own code are not accepted; remove it")
    try:
        defaults = CONFIG_MAPPING[kind]()
        known = set(defaults.to_dict()) | set(defaults.attribute_map) | {"model_type"}
        known |= _ROPE if _ROPE & known else set()
        config = {k: v for k, v in config.items() if k not in _NOT_OF_THE_MODEL}
        for field in config:
            if field not in known and not _is_read(type(defaults), field):
                near = difflib.get_close_matches(field, known, n=3)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise SpecError(f"model: {field}: {kind} has no such field in transformers {_version()}{hint}")
        fields = {k: _like(v, getattr(defaults, k, None)) for k, v in config.items() if k != "model_type"}
        made = CONFIG_MAPPING[kind](**fields)
        layers = getattr(made, "num_hidden_layers", 1)
    except SpecError:
        raise
    except Exception as e:  # noqa: BLE001 - configs of a hundred authors raise what they like; the cause is passed on
        raise SpecError(f"model: {one_line(e)}") from None
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise SpecError(f"model: the number of layers is {layers!r}: write one from 1 to {MAX_LAYERS}")
    return made


def _is_read(kind: type[PretrainedConfig], field: str) -> bool:
    """Return whether the model's code reads a field that its config does not declare: qwen3_moe's reads head_dim."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    code = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__])
    return f'self.{field} = getattr(config, "{field}"' in code  # elsewhere some read it for their rotary angles alone


def _like(value: Any, default: Any) -> Any:
    """Canonical JSON writes 1.0 as 1: give a float back where the config has one."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, dict) and isinstance(value, dict):
        return {k: _like(v, default.get(k)) for k, v in value.items()}
    return value


def one_line(error: Exception) -> str:
    """Return the text of an error of any library, for a line of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__
