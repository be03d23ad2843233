"""Parameters, operations and bytes of a decoder-only transformer. NumPy only.

Counts are per layer and per device of the tensor axis, which splits the heads, the hidden width and the vocabulary
(Megatron's layout). Letters: B sequences of T tokens in a microbatch, D width, F hidden width, H heads, V vocabulary.

    parameters of a layer             4D² + 2DF                  and 2D of norms
    operations of its forward pass    BT (8D² + 4DF) + 4BT²D     8D²: queries, keys, values, output; 4BT²D: attention scores and sums
    operations of the head            2BTDV
    operations of a backward pass     twice those of the forward pass; three times if activations are recomputed
"""

from collections.abc import Iterator
import dataclasses
from typing import Annotated

from decjax.costmodel.profile import Amount, Rate, Size, check_divides
from decjax.options import Range, checked_class

# Values that a layer keeps for each token until its backward pass, by remat: multiples of D on every device, multiples of D and of F
# that the tensor axis splits, and whether attention scores are kept, before and after the softmax. For "none" and "products" the sums
# are those that XLA's memory analysis gives for `decjax.models` without and with rematerialization.
KEPT = {"none": (6, 12, 6, True), "products": (2, 3, 1, False), "layers": (1, 0, 0, False)}


def low_rank_ratio(rows: float, columns: float, rank: int) -> float:
    """Return IJ / (R(I + J)): the number of values of an I×J matrix ÷ that of its two factors of rank R.

    Examples:
        >>> [round(low_rank_ratio(*view, 16), 1) for view in [(1024, 1920), (1024, 3072), (8192, 1920)]]
        [41.7, 48.0, 97.2]
    """
    return rows * columns / (rank * (rows + columns))


@checked_class
@dataclasses.dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder-only transformer, and of the batch of one iteration.

    Args:
        depth: L, number of layers.
        width: D, values of a token between layers.
        heads: H, a divisor of the width.
        vocabulary: V, number of different tokens.
        context: T, tokens in a sequence.
        batch_size: sequences in an iteration, over all workers.
        hidden: F, values of a token inside the feed-forward block; 0: 4D.
        tied: whether the head is the embedding's transpose.
        value_bytes: bytes of a value that is computed, or sent between devices of a worker: 4 for float32, 2 for half precision.
        gradient_bytes: bytes per parameter of its gradient, kept and sent.
        parameter_bytes: bytes per parameter that a device keeps: 4 for float32; 6 with a half-precision copy.
        moment_bytes: bytes per parameter that the optimizer keeps: 8 for the two moments of Adam.
    """

    depth: Size
    width: Size
    heads: Size
    vocabulary: Size
    context: Size
    batch_size: Size
    hidden: Annotated[int, Range(0, 2**40)] = 0
    tied: bool = False
    value_bytes: Rate = 4.0
    gradient_bytes: Rate = 4.0
    parameter_bytes: Rate = 4.0
    moment_bytes: Amount = 8.0

    def __post_init__(self):
        if self.hidden == 0:
            object.__setattr__(self, "hidden", 4 * self.width)
        check_divides("width", self.width, f"heads={self.heads}", self.heads)

    @property
    def embedding_parameters(self) -> int:
        """VD, the number of parameters of the embedding."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.depth * int(self.layer_parameters_on(1)) + self.width + (1 if self.tied else 2) * self.embedding_parameters

    def matrices(self, tensor: int = 1) -> Iterator[tuple[float, float]]:
        """Yield the sizes (I, J) of a layer's matrices on one of `tensor` devices; their columns or their rows are split."""
        yield self.width, 3 * self.width / tensor
        yield self.width / tensor, self.width
        yield self.width, self.hidden / tensor
        yield self.hidden / tensor, self.width

    def layer_parameters_on(self, tensor: int) -> float:
        """Return the number of parameters of a layer on one of `tensor` devices; each of them holds all norms."""
        return sum(rows * columns for rows, columns in self.matrices(tensor)) + 2 * self.width

    def layer_flops(self, microbatch_size: int) -> float:
        """Return the floating-point operations of a layer's forward pass on a microbatch."""
        tokens = microbatch_size * self.context
        return 2 * tokens * (4 * self.width**2 + 2 * self.width * self.hidden) + 4 * tokens * self.context * self.width

    def head_flops(self, microbatch_size: int) -> float:
        """Return the floating-point operations of the head's forward pass on a microbatch."""
        return 2 * microbatch_size * self.context * self.embedding_parameters

    def boundary_bytes(self, microbatch_size: int) -> float:
        """Return the bytes of a layer's output on a microbatch, B·T·D values."""
        return microbatch_size * self.context * self.width * self.value_bytes

    def activation_bytes(self, microbatch_size: int, tensor: int = 1, remat: str = "none") -> float:
        """Return the bytes that a layer keeps of one microbatch for its backward pass, on one device.

        Args:
            microbatch_size: B, in sequences.
            tensor: devices of the tensor axis.
            remat: "none"; "products": a layer's input and the results of its matrix products are kept and the rest is recomputed, as
                in `decjax.models`; "layers": only its input is kept.
        """
        undivided, split, of_hidden, scores = KEPT[remat]
        values = undivided * self.width + (split * self.width + of_hidden * self.hidden) / tensor
        if scores:
            values += 2 * self.heads * self.context / tensor
        return microbatch_size * self.context * values * self.value_bytes

    def low_rank_ratio(self, rank: int, tensor: int = 1) -> float:
        """Return the number of values of a layer's matrices on one device ÷ the number that PowerSGD of that rank sends for them.

        Matrices with (I + J)R ≥ IJ are sent uncompressed, as in `reduce.powersgd`.

        Examples:
            >>> gpt = Transformer(52, 1920, 24, 51200, 1024, 512)
            >>> round(gpt.low_rank_ratio(128, tensor=8), 1)
            4.1
        """
        views = [(rows * columns, rank * (rows + columns)) for rows, columns in self.matrices(tensor)]
        return sum(dense for dense, _ in views) / sum(min(low, dense) for dense, low in views)
