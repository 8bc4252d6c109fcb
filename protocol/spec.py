"""The run spec: everything that peers must agree on. Its canonical bytes are a blob whose digest is the run id.

A spec is written by the run owner's tools from a commented TOML file (see `examples/`), as canonical JSON (RFC 8785),
and signed with the owner's key. A peer accepts it only when its digest is the run id in the invite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from protocol.data_address import check_address
from protocol.envelope import Envelope, open_envelope, seal
from protocol.errors import MalformedError, SignatureError, SpecError
from protocol.identity import Identity
from protocol.ids import Digest, PeerKey, RunId
from protocol.layout import MAX_DIMENSIONS, MAX_TENSOR_NAME, MAX_TENSORS, RESERVED, Layout, TensorShape, ValueKind
from protocol.merkle import MAX_BLOB, blob_digest
from protocol.messages import MAX_CONTRIBUTORS
from protocol.plain_text import is_plain
from protocol.proof_of_work import MAX_WORK_BITS
from protocol.strict_json import read_json
from protocol.version import MAX_PROTOCOL, PROTOCOL, check_spoken

KIND = "run-spec"
MAX_SPEC = 1024 * 1024
MAX_INT = 2**53 - 1
"""The largest integer that canonical JSON has."""
MAX_TOKENIZER = 256 * 1024 * 1024
"""Maximum bytes of a tokenizer.json, which is read whole."""
MAX_TEMPLATE = 65_536
"""Maximum characters of a chat template."""
MAX_CONFIG_DEPTH = 32
MAX_LAYERS = 10_000
MAX_PROBLEMS_SHOWN = 20
"""Problems that an error lists; the rest it counts."""


def _data_address(text: str) -> str:
    if not is_plain(text):
        raise ValueError(f"has characters that cannot be shown: {text[:60]!r}")
    try:
        check_address(text)
    except SpecError as e:
        raise ValueError(str(e)) from None
    return text


Hex32 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Address = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_data_address)]
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
ModuleName = Annotated[
    str, Field(min_length=1, max_length=MAX_TENSOR_NAME, pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$")
]
TokenId = Annotated[int, Field(ge=0, lt=2**29)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 7)]
# The first error of a list ends its check: each error takes a thousand times the bytes of a wrong item.
Shape = Annotated[list[Annotated[int, Field(ge=1, le=2**40)]], FailFast(), Field(max_length=MAX_DIMENSIONS)]


class Section(BaseModel):
    """A table of the spec: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BlobRef(Section):
    """A blob that the spec names: the digest of its bytes (see `merkle`) and their number."""

    digest: Hex32
    size: Annotated[int, Field(ge=0, le=MAX_BLOB)]

    @property
    def name(self) -> Digest:
        return Digest.parse(self.digest)


ALL_LINEAR = "all-linear"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class AdapterSettings(Section):
    """A LoRA adapter (Hu et al. 2021) as `peft` builds it, without dropout. The end of a module's name names it."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    alpha: Annotated[float, Field(gt=0, le=1e6)] = Field(description="the adapter's output counts alpha / rank times")
    targets: Annotated[list[ModuleName], FailFast(), Field(min_length=1, max_length=1024), BeforeValidator(_listed)] = (
        Field(
            default=[ALL_LINEAR],
            description='linear modules that get an adapter, such as ["q_proj", "v_proj"]; ["all-linear"]: all of them',
        )
    )
    train: Annotated[list[ModuleName], FailFast(), Field(max_length=1024)] = Field(
        default=[], description='modules of vectors alone that are trained in full, such as ["input_layernorm"]'
    )
    dtype: Literal["bfloat16", "float32", "int8", "nf4"] = Field(
        default="bfloat16",
        description="the frozen base's values, as its file has them; int8 and nf4 (8 and 4 bits): of linear layers but "
        "the output layer, all else being bfloat16",
    )
    addresses: Annotated[list[Address], FailFast(), Field(max_length=64)] = Field(
        default=[],
        description="addresses of folders that hold the base as DIGEST.safetensors and DIGEST.leaves; without one that "
        "may be used, it is fetched from the swarm as a blob",
    )

    @model_validator(mode="after")
    def _all_or_named(self):
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ValueError(f"targets: {ALL_LINEAR} stands alone: name all modules, or none")
        return self

    @property
    def kind(self) -> ValueKind:
        """The values of the base's file; of a quantised one, those that stay unquantised."""
        return "F32" if self.dtype == "float32" else "BF16"

    @property
    def quantised(self) -> bool:
        """True if the base's linear layers are codes and scales (`protocol.quantised`)."""
        return self.dtype in ("int8", "nf4")


class AdapterSpec(AdapterSettings):
    """The adapter that a run trains, and its frozen base, which is no part of the state.

    The base is a file of all the model's parameters in `dtype`, in the form of a checkpoint. Its digest is that of this
    file: of a quantised base, of the codes and scales.
    """

    base: BlobRef
    parameters: Count = Field(description="of the base")


class ModelSpec(Section):
    """Any causal language model of `transformers`, by its config."""

    config: dict[str, Any] = Field(description="the model's transformers config, with its model_type")
    tensors: Annotated[list[tuple[str, Shape]], FailFast(), Field(min_length=1, max_length=MAX_TENSORS)] = Field(
        description="name and shape of each parameter, by ascending name: the layout of updates, so that a node "
        "knows it without building the model; of a run with an adapter, the trained parameters alone"
    )
    adapter: AdapterSpec | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if name != "adapter" or value is not None}

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(config.get("model_type"), str):
            raise ValueError('write model_type, e.g. model_type = "llama"')
        _check_plain(config, "")
        return config

    @model_validator(mode="after")
    def _has_layout(self):
        try:
            _ = self.layout
        except MalformedError as e:
            raise ValueError(f"tensors: {e}") from None
        if taken := next((name for name, _ in self.tensors if name.startswith(RESERVED)), None):
            raise ValueError(
                f"tensors: {taken} begins with {RESERVED}, as what a state holds beside the model does: choose a "
                "model_type without such a parameter"
            )
        return self

    @property
    def layout(self) -> Layout:
        """The layout that `tensors` lists. Raises MalformedError when they are not in order."""
        return Layout(tuple(TensorShape(name, tuple(shape)) for name, shape in self.tensors))


def _random_fields(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields that make training random, such as GPT-2's dropout of 0.1: nobody could repeat it."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _random_fields(value))
        elif isinstance(value, int | float) and value and not isinstance(value, bool):
            if any(word in name for word in ("drop", "jitter", "noise")):
                yield name


def _check_plain(value: Any, field: str, depth: int = 0) -> None:
    """Raise ValueError unless the value survives canonical JSON unchanged, and brings no code."""
    if depth > MAX_CONFIG_DEPTH:
        raise ValueError(f"{field[:60]}... is nested more than {MAX_CONFIG_DEPTH} deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_field(key, inner, field, depth)
            _check_plain(inner, f"{field}{key}.", depth + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{field}{i}.", depth + 1)
    elif isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{field[:-1]} is not Unicode text")
        if not is_plain(value):  # transformers quotes it in warnings, which terminals show
            raise ValueError(f"{field[:-1]} is not printable text")
    elif isinstance(value, int):
        if abs(value) > MAX_INT:
            raise ValueError(f"{field[:-1]} is beyond {MAX_INT}, the largest integer that a spec can hold")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field[:-1]} is {value}: write a finite number")
        # Canonical JSON writes it as an integer, which would then be read as one.
        if MAX_INT < abs(value) < 1e21:
            raise ValueError(f"{field[:-1]} is beyond {MAX_INT}, the largest integer that a spec can hold")
    elif value is not None:
        raise ValueError(f"{field[:-1]} is a {type(value).__name__}: write plain numbers, words, lists and tables")


def _check_field(key: Any, value: Any, field: str, depth: int) -> None:
    """Raise ValueError for a field of a config, or of a sub-config (`depth`), that no language model needs."""
    if not isinstance(key, str) or not is_plain(key) or len(key) > 128:
        raise ValueError(f"{field}{key!r:.60} is not a field's name: want printable text")
    if key == "auto_map" or (key == "trust_remote_code" and value):
        raise ValueError(f"{field}{key}: models that bring their own code are not accepted: remove it")
    # `attribute_map` gives any field another name, such as `auto_map`; `num_labels` makes tables of any size.
    if key == "attribute_map" or (depth and (key.startswith("_") or key == "num_labels")):
        raise ValueError(f"{field}{key} says nothing of a language model, and is not accepted: remove it")
    if "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
        raise ValueError(f"{field}{key} is {value:,}: at most {MAX_LAYERS:,} layers are built")


class DataShard(BlobRef):
    """A file of tokens, little endian, of the data's dtype."""

    tokens: Count


TRAINED = 1 << 30
"""The mark of a token whose prediction counts in the loss."""
BEGINS = 1 << 29
"""The mark of a document's first token, and of the first of a window's padding."""
NUMBER = BEGINS - 1
"""The bits of a marked token that are its number. The marks are the two bits above: so a shard's chunks, digests and
ranges are those of any other shard, and a window's marks are checked with its tokens."""


class ChatSpec(Section):
    """How conversations became text, for whoever exports the model. Training never renders the template."""

    template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE)] = Field(
        description="the chat template (Jinja) as transformers reads it"
    )
    special_tokens: dict[Literal["bos_token", "eos_token", "pad_token", "unk_token"], Word] = Field(
        default={}, description="the special tokens that the template was given"
    )
    end_tokens: Annotated[list[TokenId], FailFast(), Field(min_length=1, max_length=16)] = Field(
        description="tokens that end an answer, by ascending number"
    )
    generation: dict[
        Literal["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"],
        bool | Annotated[int, Field(ge=0, le=MAX_INT)] | Annotated[float, Field(ge=0, le=1e6)],
    ] = Field(default={}, description="fields of the base model's generation_config.json")


class ConversationSpec(Section):
    """The content of windows of marked tokens (docs/data.md)."""

    window_tokens: Count = Field(
        description="tokens that a window counts as: the mean of its trained tokens over all training windows, rounded"
    )
    attention: Literal["document", "window"] = Field(
        description="document: attention and positions begin again with each document of a window; window: the model "
        "cannot do that, so a token sees all of its window before it"
    )
    chat: ChatSpec | None = Field(default=None, description="absent if no document is a conversation")


class DataSpec(Section):
    """Pre-tokenised shards. Window w is tokens [w*window, (w+1)*window + 1) of a shard: inputs and shifted targets."""

    window: Annotated[int, Field(ge=8, le=2**20)]
    dtype: Literal["uint16", "uint32"] = "uint16"
    train: Annotated[list[DataShard], FailFast(), Field(min_length=1, max_length=65_536)]
    validation: Annotated[list[DataShard], FailFast(), Field(max_length=1024)] = []
    addresses: Annotated[list[Address], FailFast(), Field(max_length=64)] = Field(
        default=[],
        description="addresses of folders that hold the shards as DIGEST.tokens; without one that may be used, they "
        "are fetched from the swarm as blobs",
    )
    conversations: ConversationSpec | None = Field(
        default=None, description="present if the tokens are marked; a spec without it has no such field"
    )

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields; a run of plain text keeps the bytes, and so the run id, that it has without this field."""
        fields = handler(self)
        if self.conversations is None:
            fields.pop("conversations", None)
        return fields

    @model_validator(mode="after")
    def _sized(self):
        width = {"uint16": 2, "uint32": 4}[self.dtype]
        for kind, shards in (("train", self.train), ("validation", self.validation)):
            for i, shard in enumerate(shards):
                if shard.size != width * shard.tokens:
                    raise ValueError(
                        f"{kind}.{i}: {shard.tokens} tokens of {self.dtype} are {width * shard.tokens} bytes, "
                        f"not {shard.size}: correct size, tokens or dtype"
                    )
        if self.conversations is not None:
            if self.dtype != "uint32":
                raise ValueError("dtype: marked tokens are uint32")
            if self.conversations.window_tokens > self.window:
                raise ValueError(f"conversations.window_tokens: more than the {self.window} tokens of a window")
        return self

    @property
    def train_windows(self) -> int:
        """Windows in all training shards together."""
        return sum(windows_in(s.tokens, self.window) for s in self.train)

    @property
    def window_tokens(self) -> int:
        """Tokens that a window counts as, for weight, credit, schedule and the end of the run.

        All of plain text; of conversations the mean of those that are trained.
        """
        return self.window if self.conversations is None else self.conversations.window_tokens


def windows_in(tokens: int, window: int) -> int:
    """Return the number of windows in a data shard of `tokens` tokens.

    The last target is one token beyond its window.
    """
    return max(0, (tokens - 1) // window)


def is_total_reached(total: int, accepted: int) -> bool:
    """Return whether a run has accepted its total, both in tokens or both in windows. A total of 0 is never reached."""
    return 0 < total <= accepted


class Schedule(Section):
    """Learning rate as a factor of `lr`, a function of the tokens that the chain has accepted."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    total_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1


class InnerSpec(Section):
    """The inner optimizer: what a peer does between rounds."""

    optimizer: Literal["muon", "adamw"] = Field(
        default="muon", description="muon: on hidden matrices; AdamW on the rest"
    )
    lr: Annotated[float, Field(gt=0, le=10)] = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1
    clip_norm: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    batch: Annotated[int, Field(ge=1, le=65_536)] = Field(default=16, description="windows in one inner step")
    schedule: Schedule = Schedule()


MEAN_KEEP_FACTOR = 4
"""Factor of the coordinates that a mean of sparse updates keeps, compared with one update: peers choose different
ones."""


class CodecSpec(Section):
    """How pseudo-gradients are compressed."""

    kind: Literal["sign", "sparse", "int8", "none"] = "sign"
    k: Annotated[int, Field(ge=64, le=4096)] = Field(
        default=64, description="coordinates kept of each block of 4096 (sparse)"
    )
    beta: Annotated[float, Field(ge=0, le=1)] = Field(default=0.5, description="decay of the error feedback")


class OuterSpec(Section):
    """How accepted updates change the state."""

    mean: Literal["senders", "all"] = "senders"
    clip: Literal["median", "none"] = "median"
    weight_cap: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1 / 3, description="the largest share of a round's mean that one update can have"
    )
    optimizer: Literal["plain", "nesterov"] = "plain"
    lr: Annotated[float, Field(gt=0, le=10)] = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class RoundSpec(Section):
    """When a round ends and how long anything is waited for. Timers are for faults: a healthy round waits for none."""

    target_tokens: Count = Field(description="a round's training ends when the swarm has trained on this many tokens")
    max_seconds: Seconds = Field(default=600, description="a round's training ends after this time whatever was done")
    exchange_seconds: Seconds = Field(default=60, description="from announcing to proposing without late members")
    propose_seconds: Seconds = Field(
        default=10, description="time that each proposer gets before it is the next one's turn"
    )
    patience_seconds: Seconds = Field(
        default=120, description="how long a certified record without support is held back (docs/rounds.md)"
    )
    heartbeat_seconds: Seconds = 2.0
    member_seconds: Seconds = Field(
        default=20, description="a member that has been silent for this time is no member any more"
    )
    max_update_tokens: Count = Field(description="the most tokens one update may claim")
    max_members: Annotated[int, Field(ge=1, le=MAX_CONTRIBUTORS)] = 256
    exchange: Literal["gather", "reduce", "auto"] = Field(
        default="gather",
        description="gather: everyone fetches every update; reduce: each shard of the mean is made by a committee, and "
        "everyone fetches the shards; auto: reduce where it halves the bytes",
    )
    committee: Annotated[int, Field(ge=1, le=64)] = Field(
        default=3, description="contributors that make each shard of the mean; more than half must agree (reduce)"
    )

    @model_validator(mode="after")
    def _ordered(self):
        if self.member_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("member_seconds must be at least twice heartbeat_seconds")
        return self


class AdmissionSpec(Section):
    """Admission of contributors."""

    mode: Literal["open", "invite", "allow"] = "open"
    seconds: Annotated[int, Field(ge=60, le=30 * 86_400)] = Field(
        default=86_400, description="how long an admission lasts"
    )
    allow: Annotated[list[Hex32], FailFast(), Field(max_length=100_000)] = Field(
        default=[], description='peer keys, for mode "allow"'
    )
    work_bits: Annotated[int, Field(ge=0, le=MAX_WORK_BITS)] = Field(
        default=0,
        description="a new key costs a proof of work: about 2**work_bits tries of 9 ms on one core; 0: no cost",
    )
    founders: Annotated[list[Hex32], Field(max_length=1024)] = Field(
        default=[], description="peer keys that begin with stake, so that they decide until others have earned theirs"
    )


class CreditSpec(Section):
    """One credit is 10^15 model FLOPs of accepted training; kept in integers of a millionth of it."""

    flops_per_parameter_token: Annotated[int, Field(ge=1, le=1000)] = 6
    hold_rounds: Annotated[int, Field(ge=0, le=64)] = Field(
        default=12,
        description="credit settles when this many more rounds are finalized, and is stake when this many are built on "
        "it; until then it can be voided",
    )
    max_teraflops_per_second: Count = Field(
        default=20_000, description="the most that one peer can plausibly do; an update beyond it is voided"
    )


MIN_AUDITED_ROUNDS = 4
"""The least `credit.hold_rounds` in which auditors are drawn, accuse, and a jury has a round to itself."""


class AuditSpec(Section):
    """Audits of updates (docs/audits.md)."""

    replayable: bool = Field(
        default=False,
        description="updates depend on public values alone, so that any peer can train one again and compare; it needs "
        'codec.kind = "sign", codec.beta = 0, round.exchange = "gather", credit.hold_rounds of 4 or more, and a model '
        "without dropout or other chance",
    )

    def remedy(self, codec: CodecSpec, rounds: RoundSpec, credit: CreditSpec, model: Mapping[str, Any]) -> str:
        """Return what to set, if updates would depend on what only their author has; empty if all is well.

        `model`: the model's config.
        """
        needed = {
            'codec.kind = "sign"': codec.kind == "sign",
            "codec.beta = 0": codec.beta == 0,
            'round.exchange = "gather"': rounds.exchange == "gather",
            f"credit.hold_rounds of {MIN_AUDITED_ROUNDS} or more": credit.hold_rounds >= MIN_AUDITED_ROUNDS,
        } | {f"model.{name} = 0": False for name in _random_fields(model)}
        if not self.replayable or all(needed.values()):
            return ""
        missing = ", ".join(setting for setting, holds in needed.items() if not holds)
        return f"{missing}: set that, or audit.replayable = false"


class CheckpointSpec(Section):
    """Retention of states, and their finalization."""

    # Every tree of records has over 256 of them: a newcomer needs the newest checkpoint's.
    every: Annotated[int, Field(ge=1, le=256)] = Field(default=10, description="rounds between checkpoints")
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(default=2, description="checkpoints that each member keeps")
    final_depth: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=12, description="the owner finalizes a record when this many are built on it"
    )


class RunSpec(Section):
    """The whole spec. See `examples/sotu.toml` for a commented file from which one is made."""

    version: Annotated[int, Field(ge=PROTOCOL, le=PROTOCOL)] = Field(
        default=PROTOCOL, description="the protocol's version"
    )
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")]
    owner: Hex32
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] = 0
    total_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        default=0, description="training ends when the chain has accepted this many tokens; 0: never"
    )
    model: ModelSpec
    genesis: BlobRef = Field(description="the checkpoint that is state[0]")
    tokenizer: BlobRef
    data: DataSpec
    inner: InnerSpec = InnerSpec()
    codec: CodecSpec = CodecSpec()
    outer: OuterSpec = OuterSpec()
    round: RoundSpec
    admission: AdmissionSpec = AdmissionSpec()
    credit: CreditSpec = CreditSpec()
    audit: AuditSpec = AuditSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _consistent(self):
        if self.round.max_update_tokens < self.inner.batch * self.data.window_tokens:
            raise ValueError(
                "round.max_update_tokens must allow one inner step: inner.batch windows of "
                f"{self.data.window_tokens} tokens"
            )
        if self.tokenizer.size > MAX_TOKENIZER:
            raise ValueError(f"tokenizer.size is more than {MAX_TOKENIZER >> 20} MiB: choose a smaller vocabulary")
        if self.data.train_windows < 1:
            raise ValueError("data.train holds less than one window of tokens")
        if self.inner.schedule.kind != "constant" and not self.inner.schedule.total_tokens:
            raise ValueError('inner.schedule.total_tokens must be set, or inner.schedule.kind = "constant"')
        if remedy := self.audit.remedy(self.codec, self.round, self.credit, self.model.config):
            raise ValueError(f"audit.replayable needs {remedy}")
        return self

    @property
    def owner_key(self) -> PeerKey:
        return PeerKey.parse(self.owner)

    @property
    def max_update_windows(self) -> int:
        """The most windows that one update may cover."""
        return self.round.max_update_tokens // self.data.window_tokens

    def canonical(self) -> bytes:
        """RFC 8785 JSON: the bytes that the run id names."""
        return rfc8785.dumps(self.model_dump(mode="json"))

    @property
    def run_id(self) -> RunId:
        return RunId(blob_digest(self.canonical()))


def explain(error: ValidationError, where: str) -> str:
    """Return one line per problem, the first MAX_PROBLEMS_SHOWN: the field, what is wrong, and what was found there.

    The text is safe for a terminal, even if the spec's author is hostile.
    """
    lines = []
    for e in error.errors(include_url=False)[:MAX_PROBLEMS_SHOWN]:
        field = ".".join(_shown(part) for part in e["loc"]) or "the spec"
        what = {
            "missing": "is missing",
            "extra_forbidden": "is not a field of the spec: remove it, or correct its spelling",
        }
        message = what.get(e["type"], e["msg"].removeprefix("Value error, "))
        found = "" if e["type"] in ("missing", "value_error", "json_invalid") else f" (found {str(e['input'])[:60]!r})"
        lines.append(f"{where}: {field}: {message}{found}")
    if error.error_count() > MAX_PROBLEMS_SHOWN:
        lines.append(f"{where}: and {error.error_count() - MAX_PROBLEMS_SHOWN} more problems")
    return "\n".join(lines)


def _shown(part: str | int) -> str:
    """Return a component of a field's name: unchanged if it is a name, else quoted, since it may hold anything."""
    text = str(part)
    return text if len(text) <= 60 and text.isprintable() else repr(text[:60])


def parse_spec(data: bytes) -> RunSpec:
    """Return the spec in its canonical bytes. Raises SpecError for anything else; VersionError for another protocol's.

    Of another protocol's spec only the version is read: all else may have another form there.
    """
    try:
        value = read_json(data, "the run spec", MAX_SPEC)
        version = value.get("version") if isinstance(value, dict) else None
        if type(version) is int and 1 <= version <= MAX_PROTOCOL:
            check_spoken(version)
        spec = RunSpec.model_validate(value)
    except MalformedError as e:
        raise SpecError(str(e)) from None
    except ValidationError as e:
        raise SpecError(explain(e, "run spec")) from None
    if spec.canonical() != data:
        raise SpecError("the run spec is not in canonical form: it was made by another version of Cairn or altered")
    return spec


def sign_spec(owner: Identity, spec: RunSpec) -> Envelope:
    """Return the signed spec. Raises SpecError when the key is not the owner's, or the spec exceeds MAX_SPEC."""
    if owner.key != spec.owner_key:
        raise SpecError(f"this run is owned by {spec.owner[:8]}, not by the key {owner.key.short}")
    if len(encoded := spec.canonical()) > MAX_SPEC:
        raise SpecError(
            f"the run spec has {len(encoded):,} bytes, and peers read at most {MAX_SPEC:,}: shorten admission.allow, "
            "train fewer tensors (model.adapter.targets), or take a model with fewer"
        )
    return seal(owner, KIND, encoded)


def open_spec(encoded: bytes, run: RunId) -> RunSpec:
    """Return the spec in a signed envelope, if it is the run's. Raises SpecError, SignatureError, MalformedError."""
    envelope = open_envelope(encoded, KIND, limit=MAX_SPEC + 1024)
    if blob_digest(envelope.payload) != run:
        raise SpecError(f"this spec is not that of run {run.short}")
    spec = parse_spec(envelope.payload)
    if envelope.author != spec.owner_key:
        raise SignatureError("the run spec is not signed by the owner that it names")
    return spec
