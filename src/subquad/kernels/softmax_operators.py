"""The operator of softmax attention. Letters: b batch, h heads, n queries, m keys, d channels of a head."""

from subquad.kernels.declaring import operator

PAIRS = "?b ?h ?n ?m"

# Σ softmax(s q·k + bias) v, where a query sees no key that is forbidden to it; zeros where it sees none
softmax_attention = operator(
    "softmax attention",
    "softmax_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? forbidden)",
    {"q": "b h n d", "k": "b h m d", "v": "b h m d", "bias": PAIRS, "forbidden": PAIRS},
    lambda q, k, *rest: 4 * q[0] * q[1] * q[2] * k[2] * q[3],
    sums_in_fp32=True,
)
