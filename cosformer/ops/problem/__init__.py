"""Arguments become one checked value: positions, weights, decays, feature map and rule."""

from cosformer.ops.problem.build import LONGEST, PROBLEMS, build
from cosformer.ops.problem.decay import (
    GATE_RULE,
    decay_gradient,
    least_gate,
    running_sum,
    total_gate,
)
from cosformer.ops.problem.features import FEATURE_MAPS, LEAKY_SLOPE
from cosformer.ops.problem.given import (
    Asked,
    Constants,
    Given,
    Gradients,
    Grads,
    Options,
    Results,
    Swept,
    room_for_outputs,
)
from cosformer.ops.problem.heads import (
    for_each_query_head,
    into_first_of_group,
    of_first_in_group,
    per_head,
    summed_over_groups,
)
from cosformer.ops.problem.horizon import (
    Horizon,
    check_horizon,
    check_length,
    read_horizon,
    same_numbers,
    vanishes,
    vanishing_decay,
    whole_limit,
    written,
)
from cosformer.ops.problem.normaliser import DENOMINATORS, FOLLOWS, divisor, quotient, with_ones
from cosformer.ops.problem.placement import (
    CONVENTIONS,
    Packed,
    Placement,
    check_decays_there,
    check_placement,
)
from cosformer.ops.problem.problem import WEIGHTS, Problem, basis, with_basis, zero_masked
from cosformer.ops.problem.weights import (
    Rates,
    angle_of,
    angles,
    as_kept,
    as_numbers,
    check_gates,
    check_one_decay,
    check_weight,
    cosine_angle,
    decaying_by_token,
    decaying_evenly,
    is_one,
    kind_of,
    kind_within,
    log_rates,
    quarter_turn_over,
    sizes_of,
)
