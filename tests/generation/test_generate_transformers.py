"""Generation as transformers does it: greedy ids of left-padded batches, ends, lengths, penalties, caches, scores."""

import copy
import json

import pytest
import torch

from attn_variants import Decoder
from attn_variants.generation import Sampling, Stopping, generate, stream
from tests.tiny import kv_cache

transformers = pytest.importorskip("transformers", reason="parity with transformers is checked where it is installed")

from tests.generation.theirs import cut, left_padded, theirs  # noqa: E402
from tests.test_transformers import CASES, GROUPS, grouped, pair  # noqa: E402

PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5], [9], [7, 7, 7, 7, 7, 7, 7, 7, 31, 7]]
KINDS = [
    "llama, rope llama3",
    "llama, multi-query, tied",
    "qwen2",
    "qwen3",
    "deepseek, q rank 18, rope yarn with mscales",
]


@pytest.fixture(scope="module")
def models():
    return pair("Llama", GROUPS, grouped(rms_norm_eps=1e-5))


@pytest.fixture(scope="module")
def whole(models):
    """What theirs goes on with where nothing ends it."""
    return theirs(models[0], PROMPTS, max_new_tokens=16)


def ours(model, prompts=PROMPTS, *, penalty=1.0, options=None, **stops):
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    results = generate(model, prompts, sampling=sampling, stopping=Stopping(**stops), **(options or {}))
    return [list(one.ids) for one in results]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_of_a_ragged_batch_are_theirs(kind):
    name, config, attention, options = CASES[kind]
    peer, model = pair(name, config, attention, **options)
    assert ours(model, max_new_tokens=12, eos=()) == theirs(peer, PROMPTS, max_new_tokens=12)


@pytest.mark.parametrize("penalty", [0.8, 1.1, 1.3, 5.0])
def test_a_repetition_penalty_is_theirs(models, whole, penalty):
    peer, model = models
    wanted = theirs(peer, PROMPTS, max_new_tokens=16, repetition_penalty=penalty)
    assert ours(model, penalty=penalty, max_new_tokens=16, eos=()) == wanted != whole


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_of_several_end_tokens_ends_a_row_as_theirs(models, whole, count):
    peer, model = models
    for places in ([0, 5, 9], [3, 3, 3], [15, 1, 7]):
        ends = [row[place] for row, place in zip(whole, places, strict=False)][:count]
        wanted = theirs(peer, PROMPTS, eos=ends, max_new_tokens=16)
        assert ours(model, max_new_tokens=16, eos=ends) == wanted
        assert wanted == [cut(row, ends) for row in whole]


def test_an_end_token_in_the_prompt_ends_nothing(models, whole):
    peer, model = models
    assert 31 not in whole[3]
    assert ours(model, max_new_tokens=16, eos=31) == theirs(peer, PROMPTS, eos=31, max_new_tokens=16)
    assert len(ours(model, max_new_tokens=16, eos=31)[3]) == 16


def test_a_checkpoints_end_tokens_are_theirs_and_those_of_its_config_besides(models, whole, tmp_path):
    """theirs reads generation_config alone where there is one; a config that names others means them to end as well."""
    _, model = models
    first, second = whole[1][5], whole[1][10]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": second}))
    without = Decoder.from_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 3], "pad_token_id": 0}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    united = Decoder.from_pretrained(tmp_path)
    assert united.config.eos_token_ids == (second, first, 3)
    ids = torch.tensor([PROMPTS[1]])
    assert loaded.generate(ids, max_new_tokens=16, do_sample=False)[0, 5:].tolist() == whole[1][:6]
    for held, ends in ((united, [second, first, 3]), (without, [second])):
        assert ours(held, max_new_tokens=16) == theirs(loaded, PROMPTS, eos=ends, max_new_tokens=16)
    assert ours(united, max_new_tokens=16) != ours(without, max_new_tokens=16)


@pytest.mark.parametrize("count", [1, 2, 13])
def test_the_number_of_new_tokens_is_theirs(models, whole, count):
    peer, model = models
    said = ours(model, max_new_tokens=count, eos=())
    assert said == theirs(peer, PROMPTS, max_new_tokens=count) == [row[:count] for row in whole]


def test_a_whole_length_is_theirs_row_by_row(models):
    """In a batch theirs counts the padding; ours counts each row's own tokens."""
    peer, model = models
    wanted = [theirs(peer, [prompt], max_length=12)[0] for prompt in PROMPTS]
    assert ours(model, max_length=12, eos=()) == wanted
    assert [len(row) for row in wanted] == [9, 7, 11, 2]
    assert [len(row) for row in theirs(peer, PROMPTS, max_length=12)] == [2, 2, 2, 2]
    # Theirs refuses a prompt that is as long already; ours gives it no new token.
    with pytest.raises(ValueError, match="max_length"):
        theirs(peer, [PROMPTS[3]], max_length=10)
    assert ours(model, [PROMPTS[3]], max_length=10, eos=()) == [[]]


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_a_prompt_in_chunks_is_theirs_whole_and_in_chunks(models, whole, chunk):
    peer, model = models
    assert ours(model, max_new_tokens=16, eos=(), options={"prefill_chunk": chunk}) == whole
    assert theirs(peer, PROMPTS[1:2], max_new_tokens=16, prefill_chunk_size=chunk) == whole[1:2]


@torch.no_grad()
@pytest.mark.parametrize("held", [1, 9])
def test_a_warm_cache_goes_on_as_theirs(models, held):
    """Theirs is given the whole prompt and skips what its cache holds; ours is given the rest."""
    peer, model = models
    prompt = PROMPTS[3]
    memory = transformers.DynamicCache(config=peer.config)
    peer(torch.tensor([prompt[:held]]), cache=memory, use_cache=True)
    wanted = theirs(peer, [prompt], max_new_tokens=12, cache=memory)
    warm = kv_cache(model, batch=1, capacity=40)
    model(torch.tensor([prompt[:held]]), warm)
    rest = [prompt[held:]]
    assert ours(model, rest, max_new_tokens=12, eos=(), options={"cache": warm}) == wanted
    # And once more, over what the generation left there: its last token was not fed.
    assert memory.get_seq_length() == warm.length(0) == len(prompt) + 11
    longer = [*prompt, *wanted[0], 8, 9]
    again = theirs(peer, [longer], max_new_tokens=9, cache=memory)
    assert ours(model, [[wanted[0][-1], 8, 9]], max_new_tokens=9, eos=(), options={"cache": warm}) == again


def test_greedy_samples_are_all_alike_and_prompt_by_prompt_as_returned_sequences_are(models, whole):
    peer, model = models
    thrice = ours(model, max_new_tokens=16, eos=(), options={"n": 3, "store": "paged:4"})
    assert thrice == [row for row in whole for _ in range(3)]
    # Theirs refuses greedy copies; drawn from the likeliest alone they are that.
    with pytest.raises(ValueError, match="num_return_sequences"):
        theirs(peer, PROMPTS, num_return_sequences=3)
    drawn = theirs(peer, PROMPTS, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=16)
    assert drawn == thrice


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_log_probabilities_are_their_transition_scores(models, penalty):
    """`logits` are the model's alone, which ours are of; `scores`, theirs of the penalised."""
    peer, model = models
    ids, mask = left_padded(PROMPTS)
    out = peer.generate(
        ids,
        attention_mask=mask,
        pad_token_id=0,
        do_sample=False,
        max_new_tokens=10,
        repetition_penalty=penalty,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    wanted = peer.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    results = generate(
        model,
        PROMPTS,
        sampling=Sampling(temperature=0, repetition_penalty=penalty),
        stopping=Stopping(10, eos=()),
        alternatives=3,
    )
    for row, result in enumerate(results):
        assert list(result.ids) == out.sequences[row, ids.shape[1] :].tolist()
        assert result.logprobs == pytest.approx(wanted[row].tolist(), abs=2e-5)
        for place, likeliest in enumerate(result.alternatives):
            found = out.logits[place][row].log_softmax(-1).topk(3)
            assert [token for token, _ in likeliest] == found.indices.tolist()
            assert [value for _, value in likeliest] == pytest.approx(found.values.tolist(), abs=2e-5)
    penalised = peer.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert torch.equal(penalised, wanted) == (penalty == 1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_ours_errs_as_theirs_does_and_a_token_is_another_only_within_that(dtype):
    """Two orders of adding up round differently, so that a near tie may fall otherwise, and then the texts part.

    Both errors are against float32 at the ids theirs wrote.
    """
    exact, model = pair("Llama", GROUPS, grouped(rms_norm_eps=1e-5))
    half, model = copy.deepcopy(exact).to(dtype), model.to(dtype)
    parted = []
    for prompt in PROMPTS:
        (said,), (wanted,) = ours(model, [prompt], max_new_tokens=16, eos=()), theirs(half, [prompt], max_new_tokens=16)
        ids = torch.tensor([[*prompt, *wanted]])
        logits, rounded, mine = (of(ids)[0] if of is model else of(ids).logits[0] for of in (exact, half, model))
        noise, own = (rounded.float() - logits).abs(), (mine.float() - logits).abs()
        assert own.square().mean() <= 1.2 * noise.square().mean()
        if said != wanted:
            place = next(place for place, pair in enumerate(zip(said, wanted, strict=True)) if pair[0] != pair[1])
            parted.append(place)
            row = logits[len(prompt) + place - 1]
            assert row[wanted[place]] - row[said[place]] <= own.max() + noise.max()
    assert len(parted) <= 2


def test_streamed_ids_come_in_the_order_of_their_streamer(models):
    peer, model = models

    class Listener:
        """What `generate` puts and ends; the prompt comes first."""

        def __init__(self):
            self.heard = []

        def put(self, ids):
            self.heard.append(ids.flatten().tolist())

        def end(self):
            self.heard.append(None)

    listener = Listener()
    (wanted,) = theirs(peer, PROMPTS[:1], max_new_tokens=6, streamer=listener)
    tokens = list(stream(model, PROMPTS[:1], stopping=Stopping(6, eos=())))
    assert listener.heard == [PROMPTS[0], *[[token.id] for token in tokens], None]
    assert [token.id for token in tokens] == wanted
    assert [token.reason for token in tokens] == [None] * 5 + ["length"]
