"""The argument of a config file."""

import pytest

from configs import gpt_optimus, lm, shorthand
from decjax.registry import Option

OWN = {"model": Option("a", str, False, ("a", "b"))}


def test_values_and_commas_within_brackets():
    given = shorthand.parse("workers=4,codec=topk(fraction=0.1,values=int4),smoke", OWN)
    assert given == dict(workers=4, codec="topk(fraction=0.1,values=int4)", smoke=True)
    assert shorthand.parse("smoke=false, method=local", OWN) == dict(smoke=False, method="local")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("workers=4,workers=2", "'workers' is given twice; leave one out"),
        ("smoke,smoke=false", "'smoke' is given twice"),
        ("workers", "needs a value"),
        ("workers=", "needs a value"),
        ("workers=many", "must be a whole number"),
        ("model=other", "use one of a, b"),
        ("smoke=2", "must be True or False"),
    ],
)
def test_mistakes_are_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        shorthand.parse(text, OWN)


def test_an_option_is_set_in_one_place():
    assert lm.get_config("method=slowmo,every=3").method.every == lm.get_config("method=slowmo(every=3)").method.every == 3
    with pytest.raises(ValueError, match=r"every=3: method=slowmo\(every=4\) has it, too; leave one out"):
        lm.get_config("method=slowmo(every=4),every=3")


def test_a_config_on_top_of_another_overrides_it():
    assert gpt_optimus.get_config("size=tiny,workers=1,fused=false").workers == 1
    for get_config in (lm.get_config, gpt_optimus.get_config):
        with pytest.raises(ValueError, match="'workers' is given twice"):
            get_config("workers=4,workers=2")
