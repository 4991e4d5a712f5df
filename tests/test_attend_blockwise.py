"""Attention block by block: whatever the blocks, and whatever is hidden in them, it is the whole's."""

import itertools
import math

import pytest
import torch
import torch._dynamo.testing
from torch.profiler import ProfilerActivity, profile

from attn_variants import CacheSpec, Entry, Record, fresh_step, transient
from attn_variants import attend as seam
from attn_variants.attend import BACKENDS, attend, backend
from attn_variants.backends import blockwise, flash_cpu
from attn_variants.cache import KVCache
from attn_variants.contract import Plan, Step
from attn_variants.transient import DenseView, own_view, step_mask
from tests import reference
from tests.test_attend import FLOAT64, decode_view, fresh_view, random, spec_of, view_of
from tests.tiny import error

blocks = pytest.mark.parametrize("tokens", [1, 3, 4, 5, 11, 64], indirect=True)
inner = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"], indirect=True)
QUERIES, KEYS = [[7, 8, 9], [0, 1, 2]], [[*range(11)], [3, -1, 0, 2, 9, -1, 1, 8, 5, 4, -1]]
"""Row 1 sees nothing in whole blocks of any size: of the first two slots, in the middle, and in the last four."""


@pytest.fixture
def fused(request, monkeypatch):
    """Whether blocks go through the fused kernel."""
    if not request.param:
        monkeypatch.setattr(flash_cpu, "takes", lambda *tensors: False)
    return request.param


@pytest.fixture
def tokens(request, monkeypatch):
    """Slots per block."""
    monkeypatch.setattr(blockwise, "block_tokens", lambda request_: request.param)
    return request.param


def textbook(q, k, v, queries=QUERIES, keys=KEYS, **options):
    return torch.stack(
        [
            reference.attention(q[row], k[row], v[row], q_positions=queries[row], kv_positions=keys[row], **options)
            for row in range(len(q))
        ]
    )


def of_blocks(q, view, **options):
    with backend("blockwise"):
        return attend(q, view, ("k", "v"), **{"scale": 0.4, **options})


@blocks
@inner
@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("value", [8, 5, 11])
@pytest.mark.parametrize("unfolded", [256, 3])
def test_blocks_of_any_size_are_the_whole(tokens, fused, heads, value, unfolded, monkeypatch):
    monkeypatch.setattr(blockwise, "UNFOLDED_TOKENS", unfolded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    q, k, v = random(2, 6, 3, 8), random(2, heads, 11, 8, seed=1), random(2, heads, 11, value, seed=2)
    assert error(of_blocks(q, view_of(k, v, QUERIES, KEYS)), textbook(q, k, v, scale=0.4)) < FLOAT64
    step = decode_view(k, v)
    alone = textbook(q[:, :, :1], k, v, [[11]] * 2, [range(11)] * 2, scale=0.4)
    assert error(of_blocks(q[:, :, :1], step), alone) < FLOAT64
    prompt = textbook(q, k[:, :, :3], v[:, :, :3], [range(3)] * 2, [range(3)] * 2, scale=0.4)
    assert error(of_blocks(q, fresh_view(k[:, :, :3], v[:, :, :3])), prompt) < FLOAT64


@blocks
@inner
def test_what_is_hidden_changes_no_bit(tokens, fused):
    q, k, v = random(2, 6, 3, 8), random(2, 2, 11, 8, seed=1), random(2, 2, 11, 8, seed=2)
    fair = of_blocks(q, view_of(k, v, QUERIES, KEYS))
    hidden = ~step_mask(Step(torch.tensor(QUERIES), torch.tensor([10, 3])), torch.tensor(KEYS), CacheSpec()).any(2)
    assert hidden.sum() == 9
    k, v = (tensor.masked_fill(hidden[..., None], number) for tensor, number in ((k, 1e4), (v, -1e4)))
    assert torch.equal(of_blocks(q, view_of(k, v, QUERIES, KEYS)), fair)


@blocks
@inner
@pytest.mark.parametrize("sink", [None, True, "-inf"], ids=str)
def test_a_query_that_sees_nothing_anywhere_gets_zeros(tokens, fused, sink):
    q, k, v = random(1, 6, 2, 8), random(1, 2, 11, 8, seed=1), random(1, 2, 11, 8, seed=2)
    view = view_of(k, v, [[3, 4]], [range(11)])
    view.plan.mask[:, :, 0] = False
    logits = {None: None, True: random(6, seed=3), "-inf": torch.full((6,), -torch.inf, dtype=torch.float64)}[sink]
    out = of_blocks(q, view, sink=logits)
    assert not out[:, :, 0].any()
    alone = textbook(q[:, :, 1:], k, v, [[4]], [range(11)], scale=0.4, sink=logits if sink is True else None)
    assert error(out[:, :, 1:], alone) < FLOAT64


@blocks
@inner
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_sink_joins_the_sum_once_and_caps_come_before_the_mask(tokens, fused, softcap, sink, heads):
    q, k, v = random(2, 6, 3, 8), random(2, heads, 11, 8, seed=1), random(2, heads, 11, 7, seed=2)
    options = {"scale": 1.3, "softcap": softcap, "sink": random(6, seed=3) if sink else None}
    assert error(of_blocks(q, view_of(k, v, QUERIES, KEYS), **options), textbook(q, k, v, **options)) < FLOAT64


@inner
def test_parts_are_merged_on_the_way_when_they_outgrow_a_block(fused, monkeypatch):
    monkeypatch.setattr(blockwise, "block_tokens", lambda request: 2)
    q, k, v = random(2, 6, 3, 8), random(2, 2, 11, 8, seed=1), random(2, 2, 11, 8, seed=2)
    merged, counts = blockwise._merged, []
    monkeypatch.setattr(blockwise, "_merged", lambda parts: counts.append(len(parts)) or merged(parts))
    for numbers, expected in ((2**19, [6]), (2 * 288, [3, 3, 2]), (1, [1, 2, 2, 2, 2, 2, 1])):
        monkeypatch.setattr(blockwise, "BLOCK_NUMBERS", numbers)
        counts.clear()
        assert error(of_blocks(q, view_of(k, v, QUERIES, KEYS)), textbook(q, k, v, scale=0.4)) < FLOAT64
        assert counts == expected


@blocks
@inner
def test_a_row_that_is_key_and_value_is_read_once_per_block(tokens, fused):
    row, q = random(2, 1, 11, 9), random(2, 4, 3, 9, seed=1)
    spec = CacheSpec(records=(Record("kv", (Entry("latent", 1, 5), Entry("k_rope", 1, 4))),))
    step, kv = Step(torch.tensor(QUERIES), torch.tensor([10, 3])), torch.tensor(KEYS)
    view = DenseView(spec, step, Plan(kv, False, step_mask(step, kv, spec), 11), {"kv": row}.__getitem__, aliased=False)
    assert error(attend(q, view, ("kv", "latent"), scale=0.4), textbook(q, row, row[..., :5], scale=0.4)) < FLOAT64


@blocks
@inner
def test_keys_and_values_are_made_of_one_block_at_a_time(tokens, fused):
    stored, q, up = random(2, 1, 11, 3), random(2, 6, 3, 8, seed=1), random(3, 6 * 15, seed=2)
    made = []

    def expand(latent, ignored):
        made.append(latent.shape[2])
        k, v = (latent[:, 0] @ up).unflatten(-1, (6, 15)).transpose(1, 2).split([8, 7], -1)
        return k, v

    out = of_blocks(q, view_of(stored, stored, QUERIES, KEYS), expand=expand)
    assert made == [min(tokens, 11 - start) for start in range(0, 11, tokens)]
    assert error(out, textbook(q, *expand(stored, stored), scale=0.4)) < FLOAT64


@pytest.mark.parametrize("tokens", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_blocks_are_differentiable_in_all_they_read(tokens, softcap):
    """The first query sees nothing of most blocks, the second sees nothing at all."""
    q, k, v, sink = random(1, 4, 3, 3), random(1, 2, 4, 3, seed=1), random(1, 2, 4, 2, seed=2), random(4, seed=3)
    for tensor in (q, k, v, sink):
        tensor.requires_grad_()

    def run(q, k, v, sink):
        view = view_of(k, v, [[0, 1, 3]], [[3, 0, 1, 2]])
        view.plan.mask[:, :, 1] = False
        return of_blocks(q, view, softcap=softcap), of_blocks(q, view, softcap=softcap, sink=sink)

    assert torch.autograd.gradcheck(run, (q, k, v, sink))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 64], indirect=True)
@inner
@pytest.mark.parametrize("masked", [True, False])
def test_a_narrow_dtype_is_rounded_when_it_must_be_and_no_more(dtype, tokens, fused, masked):
    """With u the unit roundoff and values of at most V, plain rounds the output alone: u V.

    The fused kernel also rounds the weights (each by u, and they add up to 1) and each block's output: 3 u V; its
    exponentials are right to 1e-4.
    """
    q, k, v = (random(2, n, t, 8, seed=n + t).to(dtype) for n, t in ((6, 3), (2, 11), (2, 11)))
    queries, keys = (QUERIES, KEYS) if masked else ([[10]] * 2, [range(11)] * 2)
    view = view_of(k, v, queries, keys) if masked else decode_view(k, v)
    out = of_blocks(q[:, :, : len(queries[0])], view)
    assert out.dtype == dtype
    wanted = textbook(q[:, :, : len(queries[0])].double(), k.double(), v.double(), queries, keys, scale=0.4)
    bound = (3 if fused else 1) * torch.finfo(dtype).eps / 2 + (1e-4 if fused else 1e-6)
    assert (out.double() - wanted).abs().max() <= bound * v.abs().max().double()


@pytest.mark.parametrize("tokens", [4], indirect=True)
def test_autocast_narrows_no_score(tokens):
    """Scores of 60 and 60.1 are one number in bfloat16."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6, 8)
    q[..., 0], q[..., 1], k[..., 0], k[0, 0, 5, 1], v[0, 0, 5] = 60, 1, 1, 0.1, 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = of_blocks(q, decode_view(k, v), scale=1.0)
    assert out[0, 0, 0, 0].item() == pytest.approx(math.exp(0.1) / (5 + math.exp(0.1)), abs=1e-5)


def chosen(q, view, **options):
    with seam.counted() as passes:
        attend(q, view, ("k", "v"), scale=0.4, **options)
    return set(passes)


def test_memory_that_is_not_read_in_place_is_read_in_blocks(monkeypatch):
    q, k, v = random(1, 6, 3, 8), random(1, 2, 9, 8, seed=1), random(1, 2, 9, 8, seed=2)
    copied, in_place = (view_of(k, v, [[6, 7, 8]], [range(9)], aliased=aliased) for aliased in (False, True))
    sink = random(6, seed=3)
    assert chosen(q, copied) == chosen(q, copied, sink=sink) == {"blockwise"}
    assert chosen(q, in_place) == chosen(q, fresh_view(k[:, :, :3], v[:, :, :3])) == {"sdpa"}
    assert chosen(q, in_place, sink=sink) == {"reference"}
    monkeypatch.setattr(blockwise, "MANY_SCORES", 6 * 3 * 9 - 1)
    assert chosen(q, in_place, sink=sink) == {"blockwise"}


@pytest.mark.parametrize(
    ("batch", "heads", "width", "slots", "tokens"),
    [
        (1, 4, 64, 9300, 4096),
        (1, 4, 64, 9000, 4096 + 512),
        (1, 4, 64, 4097, 4096 + 256),
        (1, 4, 64, 4096, 4096),
        (1, 1, 64, 9000, 16384),
        (2, 4, 48, 9000, 2048),
        (64, 8, 128, 129, 64),
    ],
)
def test_a_block_holds_so_many_numbers_and_leaves_no_scrap(batch, heads, width, slots, tokens):
    view = decode_view(*(torch.zeros(1, heads, 1, width).expand(batch, -1, slots, -1) for _ in range(2)))
    request = blockwise.Request(torch.zeros(batch, heads, 1, width), view, ("k", "v"), 1.0)
    assert blockwise.block_tokens(request) == tokens


def peak(run) -> int:
    """The most bytes that `run` held at once beyond what was there before, as the allocator saw them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    moves = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert moves
    return max(itertools.accumulate(moves))


class Dequantised(DenseView):
    """A view that makes what it is asked for, and nothing else, in float32 from bfloat16."""

    def blocks(self, size, *names):
        for start in range(0, self.plan.limit, size):
            slots = slice(start, min(start + size, self.plan.limit))
            yield tuple(self._read(name)[:, :, slots].float() for name in names), slots


@inner
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("slots", [2048, 8192])
def test_one_block_is_held_at_a_time(fused, queries, slots, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_NUMBERS", 2**15)
    k, v = (random(1, 2, slots, 32, seed=seed).bfloat16() for seed in (1, 2))
    q = random(1, 4, queries, 32).float()
    step = Step(torch.full((1, queries), slots), torch.tensor([slots]))
    view = Dequantised(spec_of(2, 32, 32), step, Plan(None, False, None, slots), {"k": k, "v": v}.get, aliased=False)
    block, scores, out = 4 * 2**15, 4 * 4 * queries * 256, 4 * q.numel()
    with torch.inference_mode():
        held = peak(lambda: attend(q, view, ("k", "v"), scale=0.4))
    collected = min(slots // 256 * out, block)
    assert block < held <= block + 2 * scores + collected + 4 * out + 2**14
    # Decoding holds a fifth more than the block, however long the cache is.
    assert queries > 1 or held < 1.2 * block


@pytest.mark.parametrize("name", [None, *BACKENDS])
@pytest.mark.parametrize("limits", [{"window": 3}, {"chunk": 4}, {"window": 2, "sinks": 1}], ids=str)
@pytest.mark.parametrize("counts", [None, [9, 5]])
def test_a_mask_too_large_is_made_block_by_block(name, limits, counts, monkeypatch):
    monkeypatch.setattr(transient, "MASK_ENTRIES", 2 * 9 * 9 - 1)
    q, k, v = random(2, 6, 9, 8), random(2, 2, 9, 8, seed=1), random(2, 2, 9, 8, seed=2)
    view = own_view(spec_of(2, 8, 8, **limits), fresh_step(2, 9, counts=counts), {"k": k, "v": v})
    assert view.plan.mask is None
    assert view.plan.deferred
    monkeypatch.setattr(blockwise, "MANY_SCORES", 0)
    with backend(name), seam.counted() as passes:
        out = attend(q, view, ("k", "v"), scale=0.4)
    assert passes == {"reference" if name == "reference" else "blockwise": 1}
    for row, count in enumerate(counts or [9, 9]):
        wanted = reference.attention(q[row, :, :count], k[row], v[row], scale=0.4, **limits)
        assert error(out[row, :, :count], wanted) < FLOAT64
        assert not out[row, :, count:].any()


def test_a_chunk_on_a_cache_may_have_a_mask_too_large(monkeypatch):
    q, k, v = random(2, 6, 9, 8), random(2, 2, 9, 8, seed=1), random(2, 2, 9, 8, seed=2)
    cache = KVCache([spec_of(2, 8, 8)], batch=2, capacity=9, dtype="float64")
    for at, entries in ((slice(0, 4), None), (slice(4, 9), 2 * 5 * 9 - 1)):
        if entries is not None:
            monkeypatch.setattr(transient, "MASK_ENTRIES", entries)
            monkeypatch.setattr(blockwise, "MANY_SCORES", 0)
        step = cache.step(2, at.stop - at.start)
        view = cache.layers[0].append(step, k=k[:, :, at], v=v[:, :, at])
        cache.advance(step)
        out = attend(q[:, :, at], view, ("k", "v"), scale=0.4)
        assert view.plan.deferred == (entries is not None)
    assert error(out, textbook(q, k, v, [range(9)] * 2, [range(9)] * 2, scale=0.4)[:, :, 4:]) < FLOAT64


@inner
def test_one_graph_serves_every_position_of_a_fixed_shape(fused, monkeypatch):
    monkeypatch.setattr(blockwise, "block_tokens", lambda request: 4)
    q, k, v = random(2, 6, 1, 8), random(2, 2, 11, 8, seed=1), random(2, 2, 11, 8, seed=2)
    spec = spec_of(2, 8, 8)

    def run(q, k, v, positions, mask):
        plan = Plan(None, causal=False, mask=mask, limit=11)
        view = DenseView(spec, Step(positions, positions[:, 0] + 1), plan, {"k": k, "v": v}.__getitem__, aliased=False)
        return attend(q, view, ("k", "v"), scale=0.4)

    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    for position in range(3, 9):
        queries, keys = [[position], [position - 2]], [range(11)] * 2
        mask = view_of(k, v, queries, keys).plan.mask
        with torch.no_grad():
            out = compiled(q, k, v, torch.tensor(queries), mask)
        assert error(out, textbook(q, k, v, queries, keys, scale=0.4)) < FLOAT64
    assert graphs.frame_count == 1
    torch._dynamo.reset()
