"""Figures printed beside those of caches that our code does not recompute, each with the reason.

The facts are those of tests/data/paper_tables.json, whose other entries are recomputed in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass

QUALITY = "a measured quality: it takes a training run, and no bytes follow from it"
SPEED = "a measured speed, of one machine and one program"
OPERATIONS = "counts operations, or operations per byte: this project counts bytes and measures time"
UNPRINTED = "the sizes it is a ratio of are not printed"
UNEXPLAINED = (
    "does not follow from its own inputs: it is above a cache of every layer at full length, and several times the "
    "cache that the windows leave"
)


@dataclass(frozen=True)
class Printed:
    """A figure as printed, and why it is not recomputed.

    number: its id in tests/data/paper_tables.json.     preset: the model to compare it with, at `context` tokens.
    """

    number: int
    source: str
    claim: str
    value: float
    unit: str
    reason: str
    preset: str | None = None
    context: int = 0


PRINTED = (
    Printed(
        12,
        "DeepSeek-V2 (arXiv 2405.04434)",
        "max generation throughput 5.76x DeepSeek 67B (8xH800, FP8 weights, 6-bit KV, >50K tok/s)",
        5.76,
        "x",
        SPEED,
    ),
    Printed(
        14, "DeepSeek-V2 (arXiv 2405.04434)", "7B dense MMLU with GQA-8, 1.33T tokens", 41.2, "MMLU 5-shot", QUALITY
    ),
    Printed(15, "DeepSeek-V2 (arXiv 2405.04434)", "7B dense MMLU with MHA, 1.33T tokens", 45.2, "MMLU 5-shot", QUALITY),
    Printed(
        43,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "MLA arithmetic intensity, h_q=128",
        256,
        "FLOP/byte",
        OPERATIONS,
    ),
    Printed(
        44,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "GLA-2 arithmetic intensity, h_q=128",
        128,
        "FLOP/byte",
        OPERATIONS,
    ),
    Printed(
        45,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "H100 SXM BF16 ridge point",
        295,
        "FLOP/byte",
        OPERATIONS,
    ),
    Printed(
        46,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "MHA 1.471B FineWeb-Edu val ppl (50B tokens)",
        10.311,
        "perplexity",
        QUALITY,
    ),
    Printed(
        48,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "GTA-4 1.471B FineWeb-Edu val ppl (50B tokens)",
        10.129,
        "perplexity",
        QUALITY,
    ),
    Printed(
        49,
        "Hardware-Efficient Attention for Fast Decoding GTA/GLA (arXiv 2505.21487)",
        "GLA-2 1.471B FineWeb-Edu val ppl (50B tokens)",
        10.218,
        "perplexity",
        QUALITY,
    ),
    Printed(
        72,
        "Step-3 (arXiv 2507.19427)",
        "DSv3 (MLA): attention FLOPs (no projections) per decoded token at 8192",
        1.47e11,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        74,
        "Step-3 (arXiv 2507.19427)",
        "Kimi K2 (MLA): attention FLOPs (no projections) per decoded token at 8192",
        7.37e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        76,
        "Step-3 (arXiv 2507.19427)",
        "Qwen3 MoE 235B (GQA): attention FLOPs (no projections) per decoded token at 8192",
        2.52e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        82,
        "Step-3 (arXiv 2507.19427)",
        "MiniMax-M1 (lightning hybrid): attention FLOPs (no projections) per decoded token at 8192",
        3.42e9,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        84,
        "Step-3 (arXiv 2507.19427)",
        "ERNIE 4.5 (GQA): attention FLOPs (no projections) per decoded token at 8192",
        1.45e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        88,
        "Step-3 (arXiv 2507.19427)",
        "Step-3 (MFA): attention FLOPs (no projections) per decoded token at 8192",
        3.27e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        92,
        "Step-3 (arXiv 2507.19427)",
        "Kimi K2 (MLA): attention FLOPs (no projections) per decoded token at 32768",
        2.95e11,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        96,
        "Step-3 (arXiv 2507.19427)",
        "Qwen3 32B (GQA): attention FLOPs (no projections) per decoded token at 32768",
        6.87e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        98,
        "Step-3 (arXiv 2507.19427)",
        "Llama 4 Maverick (iRoPE chunked): attention FLOPs (no projections) per decoded token at 32768",
        1.41e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        100,
        "Step-3 (arXiv 2507.19427)",
        "MiniMax-M1 (lightning hybrid): attention FLOPs (no projections) per decoded token at 32768",
        1.15e10,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        106,
        "Step-3 (arXiv 2507.19427)",
        "Step-3 (MFA): attention FLOPs (no projections) per decoded token at 32768",
        1.31e11,
        "FLOPs/token",
        OPERATIONS,
    ),
    Printed(
        107,
        "Step-3 (arXiv 2507.19427)",
        "MLA arithmetic intensity with FP8 KV, 128 heads",
        512,
        "FLOP/byte",
        OPERATIONS,
    ),
    Printed(
        116,
        "MLRA Multi-Head Low-Rank Attention (arXiv 2603.02188, ICLR 2026)",
        "MHA 2.9B avg ppl over 7 sets, 98.3B tokens FineWeb-Edu",
        13.86,
        "perplexity",
        QUALITY,
    ),
    Printed(
        117,
        "MLRA Multi-Head Low-Rank Attention (arXiv 2603.02188, ICLR 2026)",
        "GQA 2.9B avg ppl over 7 sets, 98.3B tokens FineWeb-Edu",
        14.139,
        "perplexity",
        QUALITY,
    ),
    Printed(
        119,
        "MLRA Multi-Head Low-Rank Attention (arXiv 2603.02188, ICLR 2026)",
        "GLA-2 2.9B avg ppl over 7 sets, 98.3B tokens FineWeb-Edu",
        13.779,
        "perplexity",
        QUALITY,
    ),
    Printed(
        120,
        "MLRA Multi-Head Low-Rank Attention (arXiv 2603.02188, ICLR 2026)",
        "MLRA-4 2.9B avg ppl over 7 sets, 98.3B tokens FineWeb-Edu",
        13.672,
        "perplexity",
        QUALITY,
    ),
    Printed(132, "TransMLA (arXiv 2502.07864)", "10.6x speedup at 8K context LLaMA-2-7B", 10.6, "x", SPEED),
    Printed(
        164, "DeepSeek-V4 report (arXiv 2606.19348)", "V4-Pro decode FLOPs 27% of V3.2 at 1M", 0.27, "ratio", OPERATIONS
    ),
    Printed(
        172, "GQA (arXiv 2305.13245)", "MQA-XXL inference s/sample on TPUv4; avg score 46.6", 0.24, "s/sample", SPEED
    ),
    Printed(
        173, "GQA (arXiv 2305.13245)", "GQA-8-XXL inference s/sample on TPUv4; avg score 47.1", 0.28, "s/sample", SPEED
    ),
    Printed(174, "GQA (arXiv 2305.13245)", "GQA-8 speedup over MHA-XXL", 5.4, "x", SPEED),
    Printed(
        196,
        "MFA (arXiv 2412.19255)",
        "MFA cuts KV 56%, MFA-KR 93.7% (vs MLA/MHA respectively)",
        0.937,
        "fraction",
        UNPRINTED,
    ),
    Printed(
        197,
        "Gemma 3 (arXiv 2503.19786)",
        "27B KV memory at 32768 (bf16 column, +KV minus weights)",
        18.7,
        "GB",
        UNEXPLAINED,
        preset="gemma-3-27b",
        context=32768,
    ),
    Printed(
        198,
        "Gemma 3 (arXiv 2503.19786)",
        "12B KV memory at 32768 (bf16 column, +KV minus weights)",
        14.9,
        "GB",
        UNEXPLAINED,
        preset="gemma-3-12b",
        context=32768,
    ),
)
