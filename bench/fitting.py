"""What fits into a budget beside the weights, with the sum that says so: the same for a no as for a yes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn_variants.dtypes import dtype_bytes

from .case import Subject
from .results import Row
from .tables import Column, size

CONTEXTS = tuple(2**power for power in range(12, 21))
"""Of the table over a budget: 4,096 to 1,048,576 tokens."""


@dataclass(frozen=True)
class Question:
    """What is asked of every subject.

    policy: None is `allocated` where a store can hold the subject, else `ideal`, as it is for several ranks and for
        budgets; see `attn_variants.cache.policies`.
    store: None is the policy's own.     codec: of our stores, over a plain kv_dtype.
    budget: bytes per rank, for weights and cache.
    weights: bytes of the whole model, `auto` to count them, None to leave them out.
    """

    batch: int
    context: int
    kv_dtype: str
    policy: str | None = None
    store: str | None = None
    codec: str = "plain"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    budget: int | None = None
    weights: int | str | None = None

    @property
    def split(self) -> dict[str, int]:
        """Ranks each way, as the figures take them."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp}

    @property
    def ranks(self) -> int:
        """In all."""
        return self.tp * self.pp * self.dp * self.cp


FITTING_COLUMNS = (Column("subject", "subject", right=False), Column("line", "sum", right=False))


def fitting(subject: Subject, question: Question, asked: dict[str, Any], measured: int | None) -> Row:
    """What fits into the budget beside the weights, a rank of tensor and pipeline parallelism holding its share.

    asked: the options of the figures.     measured: parameters, where transformers' own model was run.
    Weights that the budget does not hold leave room for no sequence.
    """
    assert question.budget is not None
    weights = _weights(subject, question, measured)
    # Ranks of dp and cp are taken to hold the same share each.
    share = None if weights is None else -(-weights // (question.tp * question.pp))
    left = question.budget - (share or 0)
    cache = subject.cache

    def batches(context: int) -> int | str:
        return 0 if left < 0 else _any(cache.max_batch(budget=left, context=context, **asked))

    row = {
        "budget": question.budget,
        "weights": share,
        "max_batch": batches(question.context),
        "max_context": 0 if left < 0 else _any(cache.max_context(budget=left, batch=question.batch, **asked)),
        "max_batch_by_context": {str(context): batches(context) for context in CONTEXTS},
    }
    one = cache.bytes(context=question.context, batch=1, **asked)
    lines = [*_counted(subject, question, weights), *_sum(question, weights, share, left, one, row["max_batch"])]
    return row | {"fitting": lines}


def _counted(subject: Subject, question: Question, weights: int | None) -> Iterator[str]:
    """What counted weights are made of: a checkpoint in fewer bits than the model's dtype is smaller."""
    if question.weights == "auto" and weights is not None:
        dtype = subject.cache.dtype
        numbers = weights // dtype_bytes(dtype)
        yield (
            f"weights: {numbers:,} numbers x {dtype_bytes(dtype)} B ({dtype}) = {weights:,}; "
            "of a quantised checkpoint give --weights BYTES"
        )


def _sum(question: Question, weights: int | None, share: int | None, left: int, one: int, most: Any) -> Iterator[str]:
    """The sum, a line per step."""
    if weights is not None and share is not None:
        whole = [f"{name} {ranks}" for name, ranks in (("dp", question.dp), ("cp", question.cp)) if ranks > 1]
        kept = f"; every rank of {' and '.join(whole)} holds that share" if whole else ""
        ways = f"tp {question.tp} x pp {question.pp}"
        yield f"weights {weights:,} / ({ways}) = {share:,} ({size(share)}){kept}"
        yield f"left: budget {question.budget:,} - weights {share:,} = {left:,} ({_signed(left)})"
    if left < 0:
        yield f"does not fit: the weights alone are {size(-left)} over the budget"
        return
    each = f" on each of {question.dp} ranks of dp" if question.dp > 1 else ""
    sizes = f"a sequence of {question.context:,} tokens {one:,} ({size(one)})"
    if most == "any":
        yield f"{sizes}: any number fits"
    elif most:
        yield f"{sizes}: {most // question.dp:,} fit{each} in {left:,}"
    else:
        yield f"does not fit: {sizes} is {size(one - left)} over what is left"


def _weights(subject: Subject, question: Question, measured: int | None) -> int | None:
    """Bytes of the whole model's weights: as given, counted, or, where no count is described, as measured."""
    if question.weights is None or isinstance(question.weights, int):
        return question.weights
    try:
        return subject.cache.weights()
    except ValueError:
        if measured is None:
            raise
    return measured * dtype_bytes(subject.cache.dtype)


def _signed(count: int) -> str:
    return size(count) if count >= 0 else f"-{size(-count)}"


def _any(most: int | None) -> int | str:
    return "any" if most is None else most
