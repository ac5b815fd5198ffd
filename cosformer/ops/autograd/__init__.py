"""The one differentiable function around all implementations."""
