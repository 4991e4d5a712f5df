"""What each layer of a model keeps on one rank, as pages of one token, before a block size is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from attn_variants.architectures import Architecture
from attn_variants.architectures.fields import Fields
from attn_variants.architectures.formula import evaluate, names
from attn_variants.architectures.strided import StridedSpec
from attn_variants.contract import CacheSpec, Record
from attn_variants.dtypes import canonical_dtype, dtype_bytes

from .dtypes import KV_DTYPES, KVDtype, scales_fp8
from .families import REFUSED, RULES, V4_ALIGN, Listed, Rules, States
from .kernels import GROUPED, LATENT, Kernel
from .pages import UNSIZED, Kind, Page
from .splits import require_split

FP8_LATENT_BYTES = 656
"""The fp8_ds_mla record: 512 numbers in fp8, four float32 scales, 64 rotated numbers in bfloat16 (mla_attention.py)."""
FP8_LATENT_NAMES = frozenset({"fp8", "fp8_ds_mla"})
"""The dtypes that mean that record where latents have an indexer; fp8_e4m3 stays one byte a number."""


class Scope(dict[str, Any]):
    """The names that a rule's formulas read: fields, `tp`, and what the rules say of fields that no family knows."""

    def __init__(self, fields: Fields, rules: Rules, tp: int) -> None:
        super().__init__(tp=tp)
        self.fields = fields
        self.rules = rules

    def __missing__(self, name: str) -> Any:
        if name not in self.rules.defaults:
            return self.fields[name]
        stated = self.fields.stated(name)
        value = self[name] = evaluate(self.rules.defaults[name], self) if stated is None else stated
        return value


class Rows:
    """The layers of a model on one of `tp` ranks.

    pages: a page of one token for each kind of layer, and how many layers have it, in order.

    Raises ValueError for a model_type whose rules are not known, and for a tp that vLLM refuses.
    """

    def __init__(self, architecture: Architecture, tp: int, kv_dtype: KVDtype) -> None:
        if architecture.model_type in REFUSED:
            raise ValueError(
                f"model_type {architecture.model_type!r} has no vllm figures: {REFUSED[architecture.model_type]}; "
                "use policy 'ideal'"
            )
        assert architecture.fields is not None
        self.rules = RULES.get(architecture.model_type, Rules())
        self.architecture, self.tp = architecture, tp
        self.kv_dtype = KV_DTYPES["auto"] if self.rules.own_dtype else kv_dtype
        self.scope = Scope(architecture.fields, self.rules, tp)
        self._require()
        # Layers that are alike share one spec, so each is read once.
        self.specs = {id(spec): spec for spec in architecture.layers}
        counts = Counter(zip(map(id, architecture.layers), architecture.kinds, strict=True))
        self.pages: Counter[Page] = Counter()
        for (spec, kind), count in counts.items():
            for page in self._layer(self.specs[spec], kind):
                self.pages[page] += count
        self.attention = tuple(page for page in self.pages if page.kind is not Kind.STATE)
        if not self.pages:
            raise ValueError(f"model_type {architecture.model_type!r} has no layer that keeps a cache")

    @property
    def latent(self) -> bool:
        """Whether its attention keeps latents."""
        return any(page.latent for page in self.attention)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The attention backends that can run its layers."""
        return self.rules.kernels or (LATENT if self.latent else GROUPED)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """The widths by which kernels are chosen, each once."""
        return tuple(dict.fromkeys(size for spec in self.specs.values() for size in self._head_sizes(spec)))

    @property
    def checkpoints(self) -> bool:
        """Whether its states can be exported inside a prefill."""
        states = self.rules.states
        return states is not None and bool(evaluate(states.checkpoint, self.scope))

    def _require(self) -> None:
        """What vLLM asserts of a config and tp before it makes a layer."""
        for heads in dict.fromkeys(filter(None, self.architecture.query_heads)):
            if heads % self.tp:
                name = self.scope.fields.spelled("num_attention_heads")
                raise ValueError(f"{name} ({heads}) must be a multiple of tp ({self.tp}): give a tp that divides it")
        require_split(self.architecture, self.tp)
        for formula, message in self.rules.requires.items():
            if not evaluate(formula, self.scope):
                values = ", ".join(f"{name} = {self.scope[name]!r:.40}" for name in names(formula))
                raise ValueError(f"{message} ({values})")
        if self.rules.alike and len(set(self.architecture.kinds)) > 1:
            raise ValueError(
                "max_window_layers makes some layers slide and others not, which vLLM refuses for model_type "
                f"{self.architecture.model_type!r}: give use_sliding_window false"
            )
        if self.kv_dtype.bits < 16 and self.rules.alibi:
            raise ValueError(f"kv_dtype ({self.kv_dtype.name!r}) is not taken by attention with ALiBi: give 'bfloat16'")
        if self.kv_dtype.name == "fp8_e5m2" and not self.rules.strided and scales_fp8(self.architecture):
            raise ValueError(
                "kv_dtype ('fp8_e5m2') is refused by vLLM for checkpoints that scale an fp8 cache "
                "(quantization_config): give 'fp8'"
            )

    def _layer(self, spec: CacheSpec, kind: str) -> Iterator[Page]:
        if spec.shares is not None:
            return
        if self.rules.strided:
            yield from self._listed(self.rules.strided[kind], align=V4_ALIGN)
            return
        if isinstance(spec, StridedSpec):
            raise ValueError(f"a layer ({kind}) pools its tokens in strides, by rules that are not known here")
        records = {record.name: record for record in spec.records}
        if records.keys() == {"k", "v"} or records.keys() == {"k", "v", "index_k"}:
            yield self._grouped(records["k"], records["v"], kind, spec)
        elif "kv" in records and self.rules.head_dim is not None:
            yield self._expanded()
        elif records.keys() == {"kv"} or records.keys() == {"kv", "index_k"}:
            yield self._latent(records["kv"], "index_k" in records)
        elif records:
            raise ValueError(f"a layer ({kind}) keeps {', '.join(records)}, by rules that are not known here")
        if "index_k" in records and self.rules.head_dim is None:
            yield self._indexer(kind)
        if kind in self.rules.beside:
            yield from self._listed(self.rules.beside[kind])
        elif spec.states:
            yield self._state(kind)

    def _head_sizes(self, spec: CacheSpec) -> Iterator[int]:
        if spec.shares is not None:
            return
        for record in spec.records:
            if record.name == "k" or record.name == "kv":
                yield record.width if self.rules.head_dim is None else self._whole(self.rules.head_dim)

    def _grouped(self, k: Record, v: Record, kind: str, spec: CacheSpec) -> Page:
        heads = self._heads(k.heads, k.width)
        entry = heads * (self.kv_dtype.width(k.width) + self.kv_dtype.width(v.width))
        formula = self.rules.windows.get(kind)
        window = spec.window if formula is None else evaluate(formula, self.scope)
        what = ("heads", heads, k.width, v.width)
        if window is not None:
            return Page(Kind.SLIDING, what, entry, UNSIZED, span=window)
        if spec.chunk is not None:
            return Page(Kind.CHUNKED, what, entry, UNSIZED, span=spec.chunk)
        return Page(Kind.FULL, what, entry, UNSIZED)

    def _heads(self, total: int, width: int) -> int:
        """Key/value heads of a rank: tp divides them or is a multiple of them (models/llama.py and its like)."""
        name = self.scope.fields.spelled("num_key_value_heads")
        if self.tp > total and not self.rules.replicates:
            raise ValueError(
                f"tp ({self.tp}) must be at most {name} ({total}), for vLLM leaves other ranks no head: give less"
            )
        if max(total, self.tp) % min(total, self.tp) and not (self.rules.uneven and total * width % self.tp == 0):
            raise ValueError(
                f"tp ({self.tp}) must divide {name} ({total}) or be a multiple of it: give a tp that does either"
            )
        return max(1, total // self.tp)

    def _expanded(self) -> Page:
        """Latents stored as the keys and values of every head, values as wide as keys."""
        assert self.rules.head_dim is not None
        width = self._whole(self.rules.head_dim)
        heads = self._heads(self._whole("num_attention_heads"), width)
        return Page(Kind.FULL, ("heads", heads, width, width), 2 * heads * self.kv_dtype.width(width), UNSIZED)

    def _latent(self, kv: Record, indexed: bool) -> Page:
        """One latent and rotated key per token, whole on every rank (MLAAttention.get_kv_cache_spec)."""
        sparse = self.rules.kernels is not None
        entry = FP8_LATENT_BYTES if sparse and self.kv_dtype.name in FP8_LATENT_NAMES else self.kv_dtype.width(kv.width)
        return Page(Kind.FULL, ("latents", kv.width, indexed), entry, UNSIZED, latent=True)

    def _indexer(self, kind: str) -> Page:
        if self.rules.indexer is None:
            raise ValueError(f"a layer ({kind}) has an indexer, by rules that are not known here")
        return Page(Kind.FULL, "index", self._whole(self.rules.indexer), UNSIZED, latent=True)

    def _state(self, kind: str) -> Page:
        states = self.rules.states
        if states is None:
            raise ValueError(f"a layer ({kind}) keeps a state, by rules that are not known here")
        for formula, message in states.requires.items():
            if not evaluate(formula, self.scope):
                raise ValueError(f"tp ({self.tp}) does not split the states: {message}; give a tp that does")
        return Page(Kind.STATE, "state", self._state_bytes(states), UNSIZED)

    def _state_bytes(self, states: States) -> int:
        try:
            conv, state = (self._whole(formula, least=0) for formula in (states.conv, states.state))
            dtype = evaluate(states.dtype, self.scope)
        except ValueError as error:
            raise ValueError(f"tp ({self.tp}) does not split the states: {error}; give a tp that does") from None
        wide = 2 if dtype in (None, "auto") else dtype_bytes(canonical_dtype(dtype))
        return 2 * conv + wide * state

    def _listed(self, caches: Sequence[Listed], align: int = 1) -> Iterator[Page]:
        """Caches that are described one by one; aligned ones are rows of latents."""
        for cache in caches:
            span, block = (None if size is None else self._whole(size) for size in (cache.span, cache.block))
            entry = self._whole(cache.entry)
            yield Page(cache.kind, cache.what, entry, block or UNSIZED, cache.every, span, None, align > 1, align)

    def _whole(self, formula: str, least: int = 1) -> int:
        value = evaluate(formula, self.scope)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{formula} comes to {value!r}; it must be an integer of at least {least}")
        return value
