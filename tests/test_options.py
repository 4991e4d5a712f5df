"""Windows, chunks, sinks, soft-capping and shared caches: each option with every variant, held to the textbook."""

import copy
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch._dynamo.testing

from attn_variants import VARIANTS, AttentionOptions, Decoder, DecoderConfig
from attn_variants.attend import BACKENDS, backend
from attn_variants.cache import assert_cache_shapes
from attn_variants.linear import lay_out_weights
from tests import reference
from tests.tiny import GEOMETRY, LONG, SHORT, TOLERANCE, append, error, kv_cache, sharpen, static

FLOAT64 = TOLERANCE[torch.float64]
WITH_OPTIONS = [name for name, variant in VARIANTS.items() if issubclass(variant.config, AttentionOptions)]
variants = pytest.mark.parametrize("variant", WITH_OPTIONS)

OPTIONS = {
    "window": {"sliding_window": 4},
    "window of one": {"sliding_window": 1},
    "window, tokens that stay": {"sliding_window": 3, "sink_tokens": 2},
    "chunk": {"attention_chunk_size": 4},
    "chunk, token that stays": {"attention_chunk_size": 3, "sink_tokens": 1},
    "learned sink": {"attention_sink": True},
    "window, learned sink": {"sliding_window": 4, "attention_sink": True},
    "softcap": {"attn_logit_softcapping": 1.5},
    "window, softcap": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "scale": {"softmax_scale": 0.9},
    "no positions": {"rope": None},
    "no positions, growing queries": {"rope": None, "floor_scale": 3, "attn_scale": 0.7},
    "all": {
        "sliding_window": 3,
        "sink_tokens": 2,
        "attention_sink": True,
        "attn_logit_softcapping": 1.5,
        "softmax_scale": 0.9,
        "floor_scale": 3,
    },
}
HYBRIDS = {
    "window, full": [{"sliding_window": 3}, {}],
    "chunks, full without positions": [{"attention_chunk_size": 3}, {"attention_chunk_size": 4}, {"rope": None}],
}
SHARED = {
    "shared": [{}, {"kv_shared_layer": 0}],
    "shared by kind": [
        {"sliding_window": 3},
        {"attention_sink": True},
        {"sliding_window": 3, "kv_shared_layer": 0, "attn_logit_softcapping": 1.5},
        {"kv_shared_layer": 1, "attention_sink": True},
    ],
}
LAYERS = {**{name: [option, option] for name, option in OPTIONS.items()}, **HYBRIDS, **SHARED}

options = pytest.mark.parametrize("option", LAYERS)


def config(variant: str, layers: list[dict]) -> DecoderConfig:
    """A decoder whose layers have these options."""
    base = DecoderConfig.from_geometry(GEOMETRY, VARIANTS[variant].config)
    attention = tuple(replace(base.attention, **option) for option in layers)
    return replace(base, attention=attention, num_hidden_layers=len(layers))


@cache
def decoder(variant: str, option: str) -> Decoder:
    """The same weights at every call."""
    return sharpen(Decoder(config(variant, LAYERS[option])).double()).eval()


@cache
def _expected(variant: str, option: str, ids: tuple[int, ...]) -> torch.Tensor:
    model = decoder(variant, option)
    return reference.decoder(variant, reference.weights_of(model), model.config, ids)


def expected(variant: str, option: str, ids) -> torch.Tensor:
    """The reference's logits of one sequence alone."""
    return _expected(variant, option, tuple(ids))


@variants
@options
def test_without_a_cache_every_backend_is_the_textbook(variant, option):
    for name in BACKENDS:
        with torch.no_grad(), backend(name):
            logits = decoder(variant, option)(torch.tensor([LONG]))
        assert error(logits[0], expected(variant, option, LONG)) < FLOAT64


@variants
@pytest.mark.parametrize("option", [*OPTIONS, *HYBRIDS])
def test_every_option_matters(variant, option):
    """The control of all the others: an option that both sides forgot would pass them."""
    model = decoder(variant, option)
    plain = Decoder(config(variant, [{}] * len(LAYERS[option]))).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        assert error(plain(torch.tensor([LONG])), model(torch.tensor([LONG]))) > 1e-2


@variants
@options
@static
def test_cached_is_uncached_on_rows_of_different_length(variant, option, static):
    model = decoder(variant, option)
    store = kv_cache(model, static=static)
    assert_cache_shapes(store, model.cache_specs)
    said = [[], []]
    for step in ([LONG[:5], SHORT[:2]], [[11], [12]], [[13, 14, 15], []], [[], [16, 17]], [[18], [19]], [[20], [21]]):
        for row, logits in enumerate(append(model, store, step)):
            said[row] = said[row] + step[row]
            if step[row]:
                assert error(logits, expected(variant, option, said[row])[-len(step[row]) :]) < FLOAT64


@variants
@options
def test_padding_anywhere_is_each_row_alone(variant, option):
    model = decoder(variant, option)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 1, 0]])
    ids = torch.full((2, 10), 49)
    real = [LONG[: int(row.sum())] for row in mask]
    for row, sequence in enumerate(real):
        ids[row, mask[row] == 1] = torch.tensor(sequence)
    for store in (None, kv_cache(model)):
        with torch.no_grad():
            logits = model(ids, store, mask=mask)
        for row, sequence in enumerate(real):
            assert error(logits[row, mask[row] == 1], expected(variant, option, sequence)) < FLOAT64


@variants
@options
def test_a_lone_long_row_is_read_by_every_backend(variant, option):
    model = decoder(variant, option)
    for name in BACKENDS:
        store = kv_cache(model, batch=1)
        append(model, store, [LONG])
        with backend(name):
            logits = [append(model, store, [[token]])[0] for token in SHORT[:4]]
        assert error(torch.cat(logits), expected(variant, option, LONG + SHORT[:4])[-4:]) < FLOAT64


@options
@pytest.mark.parametrize("below", [0, math.inf], ids=["expanded", "absorbed"])
def test_latent_attention_knows_the_options_in_both_orders(option, below, monkeypatch):
    model = decoder("mla", option)
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "absorbed_below", below)
    with torch.no_grad():
        assert error(model(torch.tensor([LONG]))[0], expected("mla", option, LONG)) < FLOAT64


@variants
@pytest.mark.parametrize("option", ["all", "chunk, token that stays", "shared by kind"])
def test_gradients_of_inputs_and_weights(variant, option):
    stack = decoder(variant, option).model
    names, parameters = zip(*stack.layers.named_parameters(), strict=True)
    ids = torch.tensor([LONG[:5]])
    inputs = [tensor.detach().clone().requires_grad_() for tensor in parameters]
    model = decoder(variant, option)

    def run(*parameters):
        given = dict(zip((f"model.layers.{name}" for name in names), parameters, strict=True))
        return torch.func.functional_call(model, given, (ids,))

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_options_in_every_dtype(variant, dtype):
    model = sharpen(Decoder(config(variant, LAYERS["all"])).double()).to(dtype).eval()
    wanted = reference.decoder(variant, reference.weights_of(model), model.config, LONG)
    with torch.no_grad():
        logits = model(torch.tensor([LONG]))
    assert logits.dtype == dtype
    assert error(logits[0], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("variant", ["gqa", "mla"])
@pytest.mark.parametrize("option", ["window, tokens that stay", "all", "shared by kind"])
def test_a_decoder_compiles_whole(variant, option):
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    model = decoder(variant, option)
    ids = torch.tensor([LONG])
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=graphs)(ids)
        assert error(compiled, model(ids)) < 1e-12
    assert graphs.frame_count == 1
    torch._dynamo.reset()


@variants
@pytest.mark.parametrize("option", ["all", "shared by kind"])
def test_weights_may_be_laid_out(variant, option):
    model = copy.deepcopy(decoder(variant, option))
    lay_out_weights(model)
    with torch.no_grad():
        assert error(model(torch.tensor([LONG]))[0], expected(variant, option, LONG)) < FLOAT64


@variants
def test_a_layer_that_shares_keeps_nothing_and_projects_no_keys(variant):
    model = decoder(variant, "shared by kind")
    specs, layers = model.cache_specs, model.model.layers
    assert [spec.shares for spec in specs] == [None, None, 0, 1]
    assert [spec.numel_per_token for spec in specs[2:]] == [0, 0]
    own, shared = (set(layers[layer].self_attn.state_dict()) for layer in (0, 2))
    gone = {"mla": {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight"}}
    gone["mla-expanded"] = {*gone["mla"], "kv_b_proj.weight"}
    assert own - shared == gone.get(variant, {"k_proj.weight", "v_proj.weight"})


@variants
def test_learned_sinks_are_a_logit_per_query_head_and_bear_the_checkpoints_name(variant):
    layer = decoder(variant, "learned sink").model.layers[0].self_attn
    assert dict(layer.named_parameters())["sinks"].shape == (GEOMETRY.heads,)
    assert "sinks" not in dict(decoder(variant, "window").named_parameters())


@variants
def test_a_layer_that_shares_is_nothing_without_its_owner(variant):
    layer = decoder(variant, "shared").model.layers[1].self_attn
    with pytest.raises(ValueError, match="layer 0, whose cache this layer shares, has appended nothing"):
        layer(torch.zeros(1, 3, GEOMETRY.hidden_size, dtype=torch.float64))


@variants
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sliding_window": 0}, r"sliding_window \(0\) must be an integer of at least 1"),
        ({"sliding_window": 4.0}, r"sliding_window \(4\.0\) must be an integer"),
        ({"attention_chunk_size": -1}, r"attention_chunk_size \(-1\) must be an integer of at least 1"),
        ({"sliding_window": 4, "attention_chunk_size": 8}, r"sliding_window \(4\) and attention_chunk_size \(8\) excl"),
        ({"sink_tokens": -1}, r"sink_tokens \(-1\) must be an integer of at least 0"),
        ({"attention_sink": 1}, r"attention_sink \(1\) must be True or False"),
        ({"attn_logit_softcapping": -50.0}, r"attn_logit_softcapping \(-50\.0\) must be a positive number"),
        ({"attn_logit_softcapping": 0}, r"attn_logit_softcapping \(0\) must be a positive number"),
        ({"attn_logit_softcapping": math.nan}, r"attn_logit_softcapping \(nan\) must be a positive number"),
        ({"softmax_scale": "1"}, r"softmax_scale \('1'\) must be a positive number"),
        ({"floor_scale": 0}, r"floor_scale \(0\) must be an integer of at least 1"),
        ({"kv_shared_layer": -1}, r"kv_shared_layer \(-1\) must be an integer of at least 0"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_field(variant, given, says):
    with pytest.raises(ValueError, match=says) as refusal:
        replace(VARIANTS[variant].config.from_geometry(GEOMETRY), **given)
    assert "\n" not in str(refusal.value)


@variants
@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([{"kv_shared_layer": 0}, {}], r"layer 0: kv_shared_layer \(0\) must be an earlier layer"),
        ([{}, {"kv_shared_layer": 1}], r"layer 1: kv_shared_layer \(1\) must be an earlier layer"),
        ([{}, {"kv_shared_layer": 5}], r"layer 1: kv_shared_layer \(5\) must be an earlier layer"),
        (
            [{}, {"kv_shared_layer": 0}, {"kv_shared_layer": 1}],
            r"layer 2: kv_shared_layer \(1\) reads the cache of layer 0 itself; name that one",
        ),
        (
            [{"sliding_window": 4}, {"kv_shared_layer": 0}],
            r"layer 1: kv_shared_layer \(0\) has another cache .*both need the same",
        ),
    ],
)
def test_a_cache_that_a_layer_cannot_read_is_refused(variant, layers, says):
    with pytest.raises(ValueError, match=says) as refusal:
        config(variant, layers)
    assert "\n" not in str(refusal.value)


def test_an_owner_of_other_heads_is_refused():
    base = DecoderConfig.from_geometry(GEOMETRY, VARIANTS["gqa"].config)
    wider = replace(base.attention, num_key_value_heads=3, kv_shared_layer=0)
    with pytest.raises(ValueError, match=r"layer 1: kv_shared_layer \(0\) has another cache"):
        replace(base, attention=(base.attention, wider))


@variants
def test_one_config_per_layer_or_one_for_all(variant):
    base = DecoderConfig.from_geometry(GEOMETRY, VARIANTS[variant].config)
    assert base.attentions == (base.attention,) * 2
    assert replace(base, attention=[base.attention] * 2) == replace(base, attention=(base.attention,) * 2)
    with pytest.raises(ValueError, match=r"attention has 3 configs, num_hidden_layers is 2: give one config, or one"):
        replace(base, attention=(base.attention,) * 3)
    other = replace(base.attention, hidden_size=36)
    with pytest.raises(ValueError, match=r"the layers' attention must agree on hidden_size, got \[32, 36\]"):
        replace(base, attention=(base.attention, other))


def test_every_variant_that_published_models_combine_with_options_has_them():
    assert {"mha", "gqa", "mqa", "mla", "mla-expanded"} <= set(WITH_OPTIONS)
