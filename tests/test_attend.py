"""The seam, over views made by hand: every backend against the textbook."""

import contextlib

import pytest
import torch

from attn_variants import CacheSpec, Entry, Record, fresh_step
from attn_variants import attend as seam
from attn_variants.attend import BACKENDS, attend, backend
from attn_variants.backends import scaled_dot_product
from attn_variants.cache import KVCache
from attn_variants.contract import Plan, Step
from attn_variants.transient import DenseView, step_mask
from tests import reference
from tests.tiny import error

backends = pytest.mark.parametrize("name", [None, *BACKENDS])
FLOAT64 = 1e-12


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spec_of(heads=2, key=8, value=7, **limits):
    return CacheSpec(records=(Record.of(Entry("k", heads, key)), Record.of(Entry("v", heads, value))), **limits)


def view_of(k, v, q_positions, kv_positions, aliased=True, **limits):
    """A view over tensors and positions, with the mask that `visible` makes."""
    step = Step(torch.tensor(q_positions), torch.tensor([0] * len(q_positions)))
    step.padded = bool((step.positions < 0).any())
    spec, kv = spec_of(k.shape[1], k.shape[-1], v.shape[-1], **limits), torch.tensor(kv_positions)
    plan = Plan(kv, causal=False, mask=step_mask(step, kv, spec), limit=k.shape[2])
    return DenseView(spec, step, plan, {"k": k, "v": v}.__getitem__, aliased=aliased)


def decode_view(k, v):
    """The view of a step that sees every slot: no mask."""
    batch, _, slots, _ = k.shape
    step = Step(torch.full((batch, 1), slots - 1), torch.full((batch,), slots - 1))
    plan = Plan(torch.arange(slots).expand(batch, slots), causal=False, mask=None, limit=slots)
    return DenseView(spec_of(k.shape[1], k.shape[-1], v.shape[-1]), step, plan, {"k": k, "v": v}.__getitem__)


def fresh_view(k, v, **limits):
    """The view of a prompt that is all there is."""
    step = fresh_step(k.shape[0], k.shape[2])
    plan = Plan(step.positions, causal=True, mask=None, limit=k.shape[2])
    spec = spec_of(k.shape[1], k.shape[-1], v.shape[-1], **limits)
    return DenseView(spec, step, plan, {"k": k, "v": v}.__getitem__)


@backends
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize("value", [5, 8, 11])
def test_a_prompt_is_the_textbook(name, heads, value):
    q, k, v = random(3, 6, 5, 8), random(3, heads, 5, 8, seed=1), random(3, heads, 5, value, seed=2)
    with backend(name):
        out = attend(q, fresh_view(k, v), ("k", "v"), scale=0.4)
    assert out.shape == (3, 6, 5, value)
    for row in range(3):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=0.4)) < FLOAT64


@backends
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize("value", [5, 8, 11])
@pytest.mark.parametrize(("threads", "unfolded"), [(1, 256), (4, 256), (16, 256), (4, 3)])
def test_a_masked_chunk_is_the_textbook(name, heads, value, threads, unfolded, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(scaled_dot_product, "UNFOLDED_TOKENS", unfolded)
    q, k, v = random(2, 6, 3, 8), random(2, heads, 7, 8, seed=1), random(2, heads, 7, value, seed=2)
    queries, keys = [[4, 5, 6], [1, 2, 3]], [[0, 1, 2, 3, 4, 5, 6], [3, -1, 0, 2, 1, -1, 9]]
    with backend(name):
        out = attend(q, view_of(k, v, queries, keys), ("k", "v"), scale=0.4)
    for row in range(2):
        textbook = reference.attention(
            q[row], k[row], v[row], scale=0.4, q_positions=queries[row], kv_positions=keys[row]
        )
        assert error(out[row], textbook) < FLOAT64


@backends
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize("value", [5, 8])
@pytest.mark.parametrize("slots", [1, 2, 7, 12])
def test_a_decode_step_is_the_textbook(name, heads, value, slots):
    q, k, v = random(2, 6, 1, 8), random(2, heads, slots, 8, seed=1), random(2, heads, slots, value, seed=2)
    with backend(name):
        out = attend(q, decode_view(k, v), ("k", "v"), scale=0.4)
    for row in range(2):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=0.4, q_positions=[slots])) < FLOAT64


@pytest.mark.parametrize(
    ("batch", "heads", "threads", "slots", "runs"),
    [
        (1, 1, 2, 12, [6, 6]),
        (1, 1, 2, 13, [6, 6, 1]),
        (1, 2, 16, 13, [3, 3, 3, 3, 1]),
        (2, 2, 16, 12, [3, 3, 3, 3]),
        (1, 1, 2, 5, []),
        (2, 1, 2, 12, []),
        (1, 2, 3, 12, []),
        (1, 1, 1, 12, []),
    ],
)
def test_threads_without_a_sequence_and_head_of_their_own_read_a_run(batch, heads, threads, slots, runs, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(scaled_dot_product, "RUN_TOKENS", 3)
    read = []

    def spy(q, key, value, scale, mask):
        read.extend([key.shape[2]] * key.shape[1])
        assert key._is_view()
        assert mask is None
        return flash(q, key, value, scale, mask)

    flash = scaled_dot_product._flash
    monkeypatch.setattr(scaled_dot_product, "_flash", spy)
    q, k, v = random(batch, 6, 1, 8), random(batch, heads, slots, 8, seed=1), random(batch, heads, slots, 8, seed=2)
    out = attend(q, decode_view(k, v), ("k", "v"), scale=0.4)
    assert read == runs
    for row in range(batch):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=0.4, q_positions=[slots])) < FLOAT64


def test_runs_are_merged_in_the_dtype_of_the_query():
    q, k, v = random(1, 4, 1, 8), random(1, 1, 9, 8, seed=1), random(1, 1, 9, 8, seed=2)
    exact = reference.attention(q[0], k[0], v[0], scale=0.4, q_positions=[9])
    with backend("split"):
        out = attend(q.bfloat16(), decode_view(k.bfloat16(), v.bfloat16()), ("k", "v"), scale=0.4)
    assert out.dtype == torch.bfloat16
    assert error(out[0].double(), exact) < 2e-2


@backends
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("limits", [{"window": 3}, {"window": 2, "sinks": 1}, {"chunk": 4}], ids=str)
def test_windows_chunks_and_sinks_are_the_textbooks(name, heads, limits):
    q, k, v = random(1, 6, 9, 8), random(1, heads, 9, 8, seed=1), random(1, heads, 9, 8, seed=2)
    with backend(name):
        out = attend(q, view_of(k, v, [range(9)], [range(9)], **limits), ("k", "v"), scale=0.4)
    assert error(out[0], reference.attention(q[0], k[0], v[0], scale=0.4, **limits)) < FLOAT64


@backends
@pytest.mark.parametrize("extra", [{"softcap": 1.5}, {"sink": True}, {"softcap": 0.7, "sink": True}], ids=str)
@pytest.mark.parametrize("fresh", [True, False])
def test_learned_sinks_and_soft_caps_are_the_textbooks(name, extra, fresh):
    q, k, v = random(2, 6, 5, 8), random(2, 2, 5, 8, seed=1), random(2, 2, 5, 7, seed=2)
    extra = extra | ({"sink": random(6, seed=3)} if extra.get("sink") else {})
    view = fresh_view(k, v) if fresh else view_of(k, v, [range(5)] * 2, [range(5)] * 2)
    with backend(name):
        out = attend(q, view, ("k", "v"), scale=1.3, **extra)
    for row in range(2):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=1.3, **extra)) < FLOAT64


@backends
def test_query_heads_of_a_group_read_the_same_key_side_by_side(name):
    """Four query heads over two: 0, 0, 1, 1 and not 0, 1, 0, 1."""
    q, k = random(1, 4, 1, 8), random(1, 2, 1, 8, seed=1)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 1, 8)
    for view in (fresh_view(k, v), view_of(k, v, [[3]], [[2]])):
        with backend(name):
            assert attend(q, view, ("k", "v"), scale=1.0)[0, :, 0, 0].tolist() == [0, 0, 1, 1]


@backends
def test_the_value_may_be_the_front_of_the_key_s_row(name):
    row, q = random(2, 1, 6, 9), random(2, 4, 2, 9, seed=1)
    spec = CacheSpec(records=(Record("kv", (Entry("latent", 1, 5), Entry("k_rope", 1, 4))),))
    step = Step(torch.tensor([[4, 5], [2, 3]]), torch.tensor([6, 4]))
    kv = torch.arange(6).expand(2, 6)
    plan = Plan(kv, causal=False, mask=step_mask(step, kv, spec), limit=6)
    read = {"kv": row, "latent": row[..., :5], "k_rope": row[..., 5:]}
    view = DenseView(spec, step, plan, read.__getitem__)
    with backend(name):
        out, swapped = (attend(q, view, ("kv", value), scale=0.4) for value in ("latent", "k_rope"))
    for index in range(2):
        limits = {"scale": 0.4, "q_positions": step.positions[index].tolist()}
        assert error(out[index], reference.attention(q[index], row[index], row[index, ..., :5], **limits)) < FLOAT64
        assert error(swapped[index], reference.attention(q[index], row[index], row[index, ..., 5:], **limits)) < FLOAT64


@backends
@pytest.mark.parametrize("fresh", [True, False])
def test_keys_and_values_may_be_made_from_what_is_stored(name, fresh):
    stored, q, up = random(2, 1, 5, 3), random(2, 6, 5, 8, seed=1), random(3, 6 * 15, seed=2)

    def expand(latent, ignored):
        k, v = (latent[:, 0] @ up).unflatten(-1, (6, 15)).transpose(1, 2).split([8, 7], -1)
        return k, v

    view = fresh_view(stored, stored) if fresh else view_of(stored, stored, [range(5)] * 2, [range(5)] * 2)
    with backend(name):
        out = attend(q, view, ("k", "v"), scale=0.4, expand=expand)
    k, v = expand(stored, stored)
    for row in range(2):
        assert error(out[row], reference.attention(q[row], k[row], v[row], scale=0.4)) < FLOAT64


@backends
def test_padding_gives_zero_even_where_a_row_has_nothing_to_see(name):
    q, k, v = random(2, 6, 3, 8), random(2, 2, 4, 8, seed=1), random(2, 2, 4, 8, seed=2)
    with backend(name):
        out = attend(q, view_of(k, v, [[-1, 2, -1], [-1, -1, -1]], [[0, 1, 2, -1], [-1] * 4]), ("k", "v"), scale=0.4)
    assert out.isfinite().all()
    assert not out[0, :, [0, 2]].any()
    assert not out[1].any()
    textbook = reference.attention(q[0, :, 1:2], k[0], v[0], scale=0.4, q_positions=[2], kv_positions=[0, 1, 2, -1])
    assert error(out[0, :, 1:2], textbook) < FLOAT64


@backends
def test_hidden_numbers_do_not_matter_however_large(name):
    q, k, v = random(1, 6, 1, 8), random(1, 2, 4, 8, seed=1), random(1, 2, 4, 8, seed=2)
    with backend(name):
        fair = attend(q, view_of(k, v, [[2]], [[0, 1, 2, 3]]), ("k", "v"), scale=0.4)
        k[:, :, 3], v[:, :, 3] = 1e4, -1e4
        assert error(attend(q, view_of(k, v, [[2]], [[0, 1, 2, 3]]), ("k", "v"), scale=0.4), fair) < FLOAT64


@backends
@pytest.mark.parametrize("value", [8, 7])
@pytest.mark.parametrize("fresh", [True, False])
def test_float16_scores_are_scaled_before_they_overflow(name, value, fresh):
    """|q . k| of 80000 lies beyond float16's 65504; times the scale it is about 5."""
    q = torch.full((1, 6, 3, 8), 100.0, dtype=torch.float16)
    k, v = q[:, :2].clone(), random(1, 2, 3, value).half()
    k[:, :, 1] *= 0.5
    view = fresh_view(k, v) if fresh else view_of(k, v, [range(3)], [range(3)])
    with backend(name):
        out = attend(q, view, ("k", "v"), scale=6e-5)
    assert error(out[0], reference.attention(q[0].double(), k[0].double(), v[0].double(), scale=6e-5)) < 1e-2


def test_bfloat16_weights_are_made_from_scores_in_float32():
    """Scores of 60 and 60.1 are one number in bfloat16; their weights differ by a tenth."""
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)
    q[..., 0], q[..., 1] = 60, 1
    k[..., 0], k[0, 0, 1, 1] = 1, 0.1
    v = torch.zeros(1, 1, 2, 8)
    v[0, 0, 1] = 1
    out = attend(q.bfloat16(), view_of(k.bfloat16(), v.bfloat16(), [[1]], [[0, 1]]), ("k", "v"), scale=1.0)
    assert out[0, 0, 0, 0].item() == pytest.approx(torch.sigmoid(torch.tensor(0.1)).item(), abs=3e-3)


@backends
def test_attention_is_differentiable_in_everything_it_reads(name):
    q, k, v, sink = random(1, 4, 2, 3), random(1, 2, 4, 3, seed=1), random(1, 2, 4, 2, seed=2), random(4, seed=3)
    for tensor in (q, k, v, sink):
        tensor.requires_grad_()

    def run(q, k, v, sink):
        view = view_of(k, v, [[-1, 3]], [[0, 1, 2, 3]])
        whole = view.dense("k")[0][..., :2], view.dense("v")[0]
        return (
            attend(q, view, ("k", "v"), scale=0.4, sink=sink),
            attend(q, view, ("k", "v"), scale=0.4),
            attend(q[:, :, :1, :2], decode_view(*whole), ("k", "v"), scale=0.4),
        )

    with backend(name):
        assert torch.autograd.gradcheck(run, (q, k, v, sink))


def test_a_mask_of_the_wrong_width_is_no_mask():
    """A (1, 1) mask over three slots would broadcast: every plan's mask names every slot."""
    cache = KVCache([spec_of()], batch=2, capacity=9, dtype="float64")
    for tokens in (2, 3, 1):
        step = cache.step(2, tokens)
        view = cache.layers[0].append(step, k=random(2, 2, tokens, 8), v=random(2, 2, tokens, 7))
        cache.advance(step)
        if view.plan.mask is not None:
            assert view.plan.mask.shape == (2, 1, tokens, view.plan.limit)
        assert view.dense("k")[0].shape == (2, 2, view.plan.limit, 8)
        assert view.plan.kv_positions.shape == (2, view.plan.limit)


def test_each_backend_is_counted_under_its_own_name():
    q, k, v = random(1, 6, 1, 8), random(1, 1, 9, 8, seed=1), random(1, 1, 9, 8, seed=2)
    before = dict(seam.BACKENDS)
    with seam.counted() as passes:
        for name in ("split", "split", "sdpa", "reference"):
            with backend(name):
                attend(q, decode_view(k, v), ("k", "v"), scale=1.0)
        with backend("split"):
            attend(q, fresh_view(k[:, :, :1], v[:, :, :1]), ("k", "v"), scale=1.0)
    assert passes == {"split": 2, "sdpa": 2, "reference": 1}
    assert before == seam.BACKENDS


def test_a_backend_is_forced_within_its_block_and_no_longer(monkeypatch):
    ran = []

    def spy(request):
        ran.append(request)
        return seam.reference(request)

    def ask():
        attend(random(1, 6, 2, 8), fresh_view(random(1, 2, 2, 8), random(1, 2, 2, 8)), ("k", "v"), scale=1.0)
        return len(ran)

    monkeypatch.setitem(seam.BACKENDS, "spy", (lambda request: True, spy))
    with backend("spy"):
        assert ask() == 1
        with backend(None):
            assert ask() == 1
        with pytest.raises(ValueError, match="unknown backend"), backend("other"):
            pass
        assert ask() == 2
    assert ask() == 2


def test_a_backend_forced_in_vain_ends_with_its_block():
    """An error within the block does not leave the backend forced."""
    with contextlib.suppress(KeyError), backend("reference"):
        raise KeyError
    assert seam._forced is None


def test_an_unknown_backend_is_refused_with_the_nearest():
    with (
        pytest.raises(
            ValueError,
            match=r"unknown backend 'spda'; did you mean sdpa\? \(known: split, sdpa, blockwise, reference\)",
        ),
        backend("spda"),
    ):
        pass
