"""Skips the update of a worker whose gradient is not finite, while the worker goes on communicating."""

import optax

from decjax.optim.memories import check_outermost


def apply_if_finite(inner: optax.GradientTransformation, max_consecutive_errors: int) -> optax.GradientTransformationExtraArgs:
    """An optimizer that skips the update where the gradient is not finite, for use inside `decentralize` and its like.

    It is `optax.apply_if_finite` with a check: the worker leaves out its own update d_i and still communicates. In `decentralize`,
    order "awc":

        x_i ← Σ_j w_ij x_j − α d_i     if ∇F_i is finite, else     x_i ← Σ_j w_ij x_j

    Args:
        inner: an optimizer that does not communicate.
        max_consecutive_errors: how many updates in a row may be skipped; the next one is applied even if it is not finite.

    Raises:
        ValueError: from `init`, if `inner` communicates: a worker that skips would leave the others waiting for its message.

    Example:
        >>> mixer = decjax.gossip.exact(decjax.topology.make("ring", 8))
        >>> tx = decjax.decentralize(decjax.apply_if_finite(optax.adamw(1e-3), 5), mixer)
    """
    wrapped = optax.apply_if_finite(inner, max_consecutive_errors)

    def init(params):
        state = wrapped.init(params)
        check_outermost(state)
        return state

    return optax.GradientTransformationExtraArgs(init, wrapped.update)
