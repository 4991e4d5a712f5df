"""Whole decoders over a cache that is used in any order: what it holds is what lists of tokens would hold."""

import pytest
import torch

from tests.tiny import decoder, error, kv_cache, static, variants


@variants
@static
@pytest.mark.parametrize("seed", range(2))
def test_a_cache_is_a_list_of_sequences(variant, static, seed):
    """Thirty operations in any order leave exactly what a list of lists of tokens would hold."""
    model, generator = decoder(variant), torch.Generator().manual_seed(seed)
    store, said = kv_cache(model, batch=3, capacity=13, static=static), [[], [], []]

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(30):
        choice = draw(0, 10)
        if choice == 0:
            drops = [draw(0, len(row) + 1) for row in said]
            store.rewind(drops)
            said = [row[: len(row) - drop] for row, drop in zip(said, drops, strict=True)]
        elif choice == 1:
            order = [draw(0, 3) for _ in range(3)]
            store.reorder(order)
            said = [said[row] for row in order]
        elif choice == 2:
            freed = draw(0, 3)
            store.free([freed])
            said[freed] = []
        elif choice == 3:
            order = [draw(0, 3) for _ in range(3)]
            store = store.fork(order)
            said = [said[row] for row in order]
        else:
            rows = torch.randperm(3, generator=generator)[: draw(1, 4)].tolist()
            room = [13 - len(said[row]) for row in rows]
            longest = draw(1, 5)
            mask = torch.rand(len(rows), longest, generator=generator) < 0.7
            if choice < 7:
                mask[:] = True
            for row in range(len(rows)):
                mask[row] &= mask[row].cumsum(0) <= room[row]
            if not mask.any():
                continue
            ids = torch.randint(0, 50, (len(rows), longest), generator=generator)
            every = rows == [0, 1, 2]
            with torch.no_grad():
                logits = model(ids, store, mask=None if mask.all() else mask, rows=None if every else rows)
            for index, row in enumerate(rows):
                new = ids[index, mask[index]].tolist()
                said[row] = said[row] + new
                if new:
                    with torch.no_grad():
                        alone = model(torch.tensor([said[row]]))[0, -len(new) :]
                    assert error(logits[index, mask[index]], alone) < 1e-9
        assert store.lengths.tolist() == [len(row) for row in said]
