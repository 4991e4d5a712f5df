"""How many numbers a decoder's weights are, from its config.json.

What a checkpoint holds of the decoder alone: token embedding, layers, final norm and head, a head tied to the embedding
once; with what a router keeps besides its projection. Towers for pictures and sound and layers of multi-token
prediction do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config_file import Source, load
from .family import FALSE
from .fields import Fields
from .formula import evaluate, names
from .reader import Architecture, decoder_fields, layer_fields
from .weight_parts import TIED, TIED_AROUND, Weights
from .weights import WEIGHTS


def parameters(source: Source) -> int:
    """Weights of the decoder of a config.json, given as a file, a folder, a dict or a preset's name.

    Raises ValueError in one line for a config that cannot be read and for a model_type whose weights nobody has
    described: a size is then to be given in bytes, or measured.
    """
    config, name = load(source)
    try:
        model_type, fields = decoder_fields(config)
        return _count(_described(model_type, config, fields))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _described(model_type: str, config: Mapping[str, Any], fields: Fields) -> tuple[Weights, Fields]:
    """The weights' entry, and the fields as it and its family mean them."""
    if model_type not in WEIGHTS:
        raise ValueError(
            f"the weights of model_type {model_type!r} are not described: give their bytes, or let --measure count them"
        )
    weights, family = WEIGHTS[model_type], fields.family
    described = fields.of(
        replace(
            family,
            fields={TIED: FALSE, **family.fields, **weights.fields},
            aliases={**family.aliases, **weights.aliases},
            requires={**family.requires, **weights.requires},
        )
    )
    described[TIED] = _tied(config, described)
    return weights, described


def _tied(config: Mapping[str, Any], fields: Fields) -> bool:
    """Whether the head is the embedding; a model of pictures or sound says so for its decoder too."""
    if not fields.prefix:
        return bool(fields[TIED])
    if isinstance(config.get(TIED), bool):
        return bool(config[TIED])
    return bool(fields[TIED]) or (config["model_type"] in TIED_AROUND and not fields.given(TIED))


def _count(described: tuple[Weights, Fields]) -> int:
    weights, fields = described
    total = 0
    for index, of_layer in enumerate(layer_fields(fields)):
        of_layer["i"] = index
        mixer = weights.mixers.get(fields["kinds"][index], weights.mixer)
        total += sum(of_layer.whole(formula, least=0) for formula in (mixer, weights.mlp, weights.norms))
    total += sum(fields.whole(formula, least=0) for formula in (weights.embedding, weights.outside))
    return total if fields[TIED] else total + fields.whole(weights.head)


def mlp_widths(architecture: Architecture) -> frozenset[tuple[str, int, bool]]:
    """The widths of MLPs: the fields they come from, the width, and whether the model has no experts.

    None of a model_type that is not described, nor where config.json leaves a width to its class.
    """
    fields = architecture.fields
    if fields is None or architecture.model_type not in WEIGHTS:
        return frozenset()
    formula = WEIGHTS[architecture.model_type].mlp
    sizes = [name for name in names(formula) if any(part in name for part in ("intermediate", "ffn", "n_inner"))]
    try:
        weights, described = _described(architecture.model_type, architecture.config, fields)
        if not sizes or not all(described.given(name) for name in sizes):
            return frozenset()
        found: set[int] = set()

        def of_width(hidden: int, inner: int, bias: bool = False) -> int:
            found.add(inner)
            return 0

        for index, of_layer in enumerate(layer_fields(described)):
            of_layer["i"] = index
            of_layer["mlp"] = of_layer["gated_mlp"] = of_width
            evaluate(weights.mlp, of_layer)
    except ValueError:
        return frozenset()
    spelled = " or ".join(described.names_in(" + ".join(sizes)))
    return frozenset((spelled, width, "num_experts" not in names(formula)) for width in found)
