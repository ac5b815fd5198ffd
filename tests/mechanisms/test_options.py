"""Every option of every mechanism: a wrong value is named with the rule that it breaks."""

import inspect

import pytest
import torch
from mechanism_cases import NAMES, OPTIONS

from cosformer.mechanisms import MECHANISMS, create

NOT_WHOLE = (2.5, "3", True, -1)
NOT_POSITIVE = (0.0, -1.0, float("nan"), float("inf"), "1", True)
WRONG = {
    "heads": (0, *NOT_WHOLE),
    "width": (0, *NOT_WHOLE),
    "key_heads": (0, 3, *NOT_WHOLE),
    "horizon": (0.0, -1.0, float("nan"), "far", True, [5.0, -1.0], [5.0], torch.ones(3)),
    "decay": (0.0, -1.0, 1.5, float("nan"), "fast", True, [0.5, 2.0], [0.5], torch.ones(3)),
    "learned": (1, "yes", None),
    "weight": ("plain", "sine", 3),
    "eps": NOT_POSITIVE,
    "features": (0, *NOT_WHOLE),
    "generator": (7, "random"),
    "temperature": NOT_POSITIVE,
    "realizations": (0, *NOT_WHOLE),
    "sines": (0, *NOT_WHOLE),
    "base": NOT_POSITIVE,
    "block": (0, *NOT_WHOLE),
    "window": (7, *NOT_WHOLE),
    "global_tokens": NOT_WHOLE,
    "impl": ("fast", None),
    "stride": (0, *NOT_WHOLE),
    "summary": (0, 10**6, *NOT_WHOLE),
    "random_blocks": NOT_WHOLE,
    "seed": (2**63, 2**70, *NOT_WHOLE),
    "bucket": (0, *NOT_WHOLE),
    "rounds": (0, *NOT_WHOLE),
    "max_length": (0, *NOT_WHOLE),
    "projected": (0, *NOT_WHOLE),
    "landmarks": (0, *NOT_WHOLE),
    "iterations": NOT_WHOLE,
    "kernel": (4, *NOT_WHOLE),
    "renormalise": (1, "no", None),
    "rank": (0, *NOT_WHOLE),
}
CASES = [
    (name, option) for name in NAMES for option in inspect.signature(MECHANISMS[name]).parameters
]


@pytest.mark.parametrize(("name", "option"), CASES)
def test_a_wrong_value_is_named_with_the_rule_it_breaks(name, option):
    for value in WRONG[option]:
        options = {"heads": 2, "width": 6, **OPTIONS.get(name, {}), option: value}
        with pytest.raises((ValueError, TypeError), match=rf"^{option}(\[\d\])? must .*got "):
            create(name, **options)


def test_horizons_per_head_are_options_and_no_cast_rounds_them():
    horizons = [4097.0, 5001.5]
    mechanism, other = (create("cosformer", 2, 6, horizon=horizons) for _ in range(2))
    assert not mechanism.state_dict()
    mechanism.bfloat16()
    assert mechanism.horizon.tolist() == horizons
    assert mechanism.traits.max_length == 4097
    other.load_state_dict(mechanism.state_dict())
    x = torch.randn(1, 2, 20, 6)
    tensor = create("cosformer", 2, 6, horizon=torch.tensor(horizons))
    for one in (other, tensor):
        assert torch.equal(one(x, x, x, causal=True)[0], mechanism(x, x, x, causal=True)[0])
