"""Linear attention on features taken number by number: the first one, and cosFormer's ablations."""

from dataclasses import replace

from cosformer.mechanisms.linear.family import LinearMechanism

ABLATION = "Qin et al., ICLR 2022, ablation"


class Linear(LinearMechanism):
    """Linear Transformer: features 1 + elu."""

    source = "Katharopoulos et al., ICML 2020"
    formula = "out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j), φ = 1 + elu"
    feature_map = "1+elu"


class Relu(LinearMechanism):
    """cosFormer without its cosine: features relu."""

    source = ABLATION
    formula = "out_i = Σ_j s_ij v_j / max(Σ_j s_ij, eps), s_ij = relu(q_i)·relu(k_j)"
    feature_map = "relu"


class LeakyRelu(LinearMechanism):
    """Leaky relu features; sums may be negative, and are kept eps away from zero."""

    source = ABLATION
    formula = "as relu with max(x, x/10); Σ_j s_ij within ±eps of 0 becomes ±eps"
    feature_map = "leaky_relu"
    rule = "signed"


class Identity(LinearMechanism):
    """No feature map; half of the sums are negative, and are kept eps away from zero."""

    source = ABLATION
    formula = "out_i = Σ_j q_i·k_j v_j / Σ_j q_i·k_j; a sum within ±eps of 0 becomes ±eps"
    rule = "signed"


class TransNormer(LinearMechanism):
    """Linear attention without a denominator: a norm after it bounds the output."""

    traits = replace(LinearMechanism.traits, normalised=False, norm_after=True)
    source = "Qin et al., EMNLP 2022"
    formula = "out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ, φ = elu; the layer's norm after it"
    feature_map = "elu"
    normaliser = "none"
