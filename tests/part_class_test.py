"""Parts that are classes: options with ranges, traits, requirements, help."""

from typing import Annotated, Literal

import jax.numpy as jnp
import pytest

from decjax import registry
from decjax.options import Count, Decay, Range, Share
from decjax.registry import Requirement

ROUND = Requirement("channel", "a round channel", lambda channel: channel != "square", "use a round one")


@pytest.fixture(autouse=True)
def halving(forgotten_parts):
    class Halving(registry.Part, kind="reducer", name="halving"):
        """Halve everything.

        Attributes:
            channel: how it travels.
            rounds: R, how often
                in a step.
            share: of what is left; None: derived.
        """

        exact = True
        requires = (ROUND,)

        channel: str = "circle"
        rounds: Count = 1
        share: Share | None = None
        decay: Annotated[Decay, "what remains"] = 0.5
        block: Annotated[int, Range(8, multiple=8)] = 64
        rounding: Literal["up", "down"] = "up"

        def reduce(self, x):
            return x * self.share

    return Halving


def test_its_fields_are_the_options_with_ranges_and_help():
    entry = registry.part("reducer", "halving")
    assert list(entry.options) == ["rounds", "share", "decay", "block", "rounding"] and entry.summary == "Halve everything."
    assert entry.options["rounds"].help == "R, how often in a step." and entry.options["decay"].help == "what remains"
    assert entry.options["rounds"].type == "int, at least 1"
    assert entry.options["share"].type == "float, more than 0 and at most 1, or none"
    assert entry.traits == {"exact": True, "needs": "a round channel"}


def test_it_is_made_by_name_and_by_its_class(halving):
    made = registry.make("reducer", "halving(share=0.5,rounds=2)", channel="circle")
    assert made == halving(share=0.5, rounds=2) and made.reduce(4.0) == 2.0 and str(made) == "reducer 'halving'"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rounds": 0}, "reducer 'halving': rounds=0 must be at least 1"),
        ({"share": 0.0}, "reducer 'halving': share=0.0 must be more than 0 and at most 1"),
        ({"decay": 1.0}, "reducer 'halving': decay=1.0 must be at least 0 and less than 1"),
        ({"block": 12}, "reducer 'halving': block=12 must be at least 8 and a multiple of 8"),
        ({"rounding": "off"}, "reducer 'halving': rounding='off' is unknown; use one of up, down"),
        ({"channel": "square"}, "reducer 'halving' needs a round channel, got channel 'square'; use a round one"),
    ],
)
def test_what_its_declarations_do_not_allow_is_refused(options, complaint, halving):
    with pytest.raises(ValueError) as error:
        halving(**options)
    assert str(error.value) == complaint
    with pytest.raises(ValueError) as error:
        registry.make("reducer", "halving", **options)
    assert str(error.value) == complaint


def test_traced_numbers_are_not_checked(halving):
    assert halving(decay=jnp.float32(2.0)).decay == 2.0
