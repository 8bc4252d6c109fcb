"""The model card of an exported model, and the settings that load its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from coordinator.errors import CoordinatorError
from protocol.ids import Digest, RunId
from protocol.spec import AdapterSpec, ChatSpec


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a checkpoint; None where it is not known.

    `round` is the round that begins with this state, `tokens` those accepted up to it. `loss` is the median
    training loss that the contributors of the round before reported (nats per token, weighted by windows). `state` is
    the state's digest.
    """

    name: str
    run: RunId
    state: Digest | None = None
    round: int | None = None
    tokens: int | None = None
    loss: float | None = None

    def metadata(self) -> dict[str, str]:
        """Return the known fields for the header of a safetensors file."""
        known = {"run": str(self.run), "state": self.state, "round": self.round}
        return {f"cairn_{k}": str(v) for k, v in known.items() if v is not None}


CARD = Template("""\
---
library_name: $library
pipeline_tag: text-generation
tags:
- cairn
$more---

# $name

$what of $parameters parameters ($model_type), trained by volunteers over the internet with Cairn.

| | |
| --- | --- |
| run | $name |
| run id | `$run` |
| round | $round |
| tokens trained on | $tokens |
| training loss | $loss |
| state digest | `$state` |
| weights | $weights |

$usage
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")

The state digest names the checkpoint that this was made from: the certificates of the run vouch for it.
""")


USAGE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("FOLDER")"""

ADAPTER_USAGE = """\
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained("BASE")
    model = PeftModel.from_pretrained(base, "FOLDER")
    # With a generation_config.json in FOLDER: model.generation_config = GenerationConfig.from_pretrained("FOLDER")"""


def model_card(origin: Origin, state: Digest, parameters: int, architecture: str, config: Mapping[str, Any]) -> str:
    """Return the text of README.md; `state` is the digest of the checkpoint that was read."""
    return _card(
        origin, state, parameters, config, library="transformers", what="A causal language model",
        weights=f"fp32, `{architecture}`", usage=USAGE, more="",
    )  # fmt: skip


def adapter_card(
    origin: Origin, state: Digest, parameters: int, adapter: AdapterSpec, config: Mapping[str, Any], base: str
) -> str:
    """Return the text of README.md of an adapter alone. `base`: its base's name or folder; "" if it is not known."""
    weights = f"fp32; the base has {adapter.parameters:,} parameters ({adapter.dtype}), digest `{adapter.base.digest}`"
    quoted = json.dumps(base or "BASE")  # YAML and Python read it alike
    return _card(
        origin, state, parameters, config, library="peft", what="A LoRA adapter", weights=weights,
        usage=ADAPTER_USAGE.replace('"BASE"', quoted), more=f"base_model: {quoted}\n" if base else "",
    )  # fmt: skip


def _card(origin: Origin, state: Digest, parameters: int, config: Mapping[str, Any], **words: str) -> str:
    return CARD.substitute(
        words,
        name=origin.name,
        run=origin.run,
        parameters=f"{parameters:,}",
        model_type=config["model_type"],
        round="not known" if origin.round is None else f"{origin.round:,}",
        tokens="not known" if origin.tokens is None else f"{origin.tokens:,}",
        loss="not known" if origin.loss is None else f"{origin.loss:.4f} nats a token, in the round before",
        state=state,
    )


def tokenizer_settings(
    text: str, path: Path, config: Mapping[str, Any], chat: ChatSpec | None = None
) -> dict[str, Any]:
    """Return the tokenizer_config.json for a tokenizer.json's text; special tokens are those of the model's config.

    With `chat`, its template and the special tokens that the template was given.
    Raises CoordinatorError if `text` (the file at `path`) is no tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # noqa: BLE001 - tokenizers raises plain Exception; the cause is passed on
        why = " ".join(str(e).split())[:200]
        raise CoordinatorError(f"{path}: not a tokenizer.json: {why}: put the run's tokenizer.json there") from None
    # This class loads the file unchanged. A model's own class may rebuild it from the vocabulary.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for kind in ("bos", "eos", "pad"):
        number = config.get(f"{kind}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        token = tokenizer.id_to_token(number) if isinstance(number, int) and 0 <= number < 2**32 else None
        if token is not None:
            settings[f"{kind}_token"] = token
    if chat is not None:
        if "bos_token" not in chat.special_tokens:
            settings.pop("bos_token", None)  # the template was given none
        settings |= {"chat_template": chat.template} | chat.special_tokens
    lengths = [config[f] for f in ("max_position_embeddings", "n_positions") if isinstance(config.get(f), int)]
    return settings | ({"model_max_length": min(lengths)} if lengths else {})
