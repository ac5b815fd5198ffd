"""The variants of the kernels: one per pass, as compile-time options."""

import functools
from typing import Any, NamedTuple

NONE, PER_HEAD, PER_TOKEN = range(3)  # values of DECAY
MAPS = {"identity": 0, "relu": 1, "1+elu": 2, "leaky_relu": 3, "elu": 4}
RULES = {"none": 0, "clamp": 1, "add": 2, "signed": 3}


class Sweep(NamedTuple):
    """The compile-time options of one variant; the head of `sweep.cu` explains each."""

    KW: int
    R: int
    TURNED: bool = False
    READ: bool = True
    WRITE: bool = True
    REVERSE: bool = False
    X_MAP: int = 0
    Y_MAP: int = 0
    Z_MAP: int = 0
    RULE: int = 0
    DELTA: int = 0
    SCALED: bool = False
    GATE: int = 0
    MASKED: int = 0
    PAIRED: bool = False
    DECAY: int = 0
    STRONG: bool = False
    DOTS: bool = False
    STRICT: bool = False
    ADD: bool = False
    PACKED: bool = False


class Around(NamedTuple):
    """The compile-time options of the small kernels in `around.cu`."""

    KW: int = 64
    RULE: int = 0
    DECAY: int = 0


class Gates(NamedTuple):
    """The compile-time options of the kernels in `gates.cu`, whose head explains each."""

    GATE: int = 0
    SUMMED: bool = True
    CLUSTER: int = 1


class Packing(NamedTuple):
    """The compile-time options of the kernel in `packing.cu`, whose head explains each."""

    WIDE: bool
    OWN: bool
    R: int


class Roles(NamedTuple):
    """One variant of the kernel for every pass of one problem.

    `gather` variants only sum states, `read` variants only read a state that is complete, and the
    others do both, which is what causal attention needs.
    """

    forward: Sweep
    gather: Sweep
    read: Sweep
    dq: Sweep
    dq_read: Sweep
    dk: Sweep
    dk_gather: Sweep
    dk_read: Sweep
    dv: Sweep
    dv_read: Sweep

    def reversed(self) -> "Roles":
        """The variants for the other direction of a decay: they add to what these have made."""

        def turned(role: Sweep) -> Sweep:
            return role._replace(REVERSE=not role.REVERSE, STRICT=role.READ, ADD=role.READ)

        return Roles(*map(turned, self))


@functools.cache
def roles_of(
    *, width: int, value_width: int, states: int, phi: int, rule: int, masked: bool, decay: int,
    dots: bool, packed: bool,
) -> Roles:  # fmt: skip
    """The variants for one problem, with a decay as `DECAY` has it; `dots`: it needs a gradient.

    The head of `sweep.cu` has the table of which tensor is which operand in each pass.
    """
    by_key = Sweep(64 if width <= 64 else 128, states, RULE=rule, DECAY=decay, PACKED=packed)
    by_value = by_key._replace(
        KW=64 if value_width <= 64 else 128, TURNED=True, GATE=phi, DOTS=dots
    )
    sums = rule != 0
    hidden, hides = 2 * masked, 1 * masked
    forward = by_key._replace(X_MAP=phi, Y_MAP=phi, MASKED=hides)
    dq = by_value._replace(Z_MAP=phi, DELTA=int(sums), MASKED=hides)
    dk = by_value._replace(Z_MAP=phi, DELTA=2 * sums, SCALED=sums, REVERSE=True, MASKED=hidden)
    dv = by_key._replace(X_MAP=phi, Y_MAP=phi, SCALED=sums, REVERSE=True, MASKED=hidden)
    by_values: dict[str, Any] = {"WRITE": False, "Y_MAP": 0, "PAIRED": value_width > 64}
    by_keys: dict[str, Any] = {"WRITE": False, "Z_MAP": 0, "PAIRED": width > 64}
    return Roles(
        forward, forward._replace(READ=False, X_MAP=0, STRONG=decay > 0),
        forward._replace(**by_values),
        dq, dq._replace(**by_keys),
        dk, dk._replace(READ=False, GATE=0, MASKED=0, DOTS=False, STRONG=decay > 0),
        dk._replace(**by_keys),
        dv, dv._replace(**by_values),
    )  # fmt: skip
