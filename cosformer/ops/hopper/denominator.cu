// The denominator D of a row, as RULE makes it of the row's total, and dD/dtotal.

INLINE float divisor(float total, float eps) {
  if (RULE == 1) return fmaxf(total, eps);
  if (RULE == 2) return total + eps;
  return total < 0 ? fminf(total, -eps) : fmaxf(total, eps);
}
INLINE float slope(float total, float eps) {
  if (RULE == 1) return total > eps ? 1.f : 0.f;
  if (RULE == 2) return 1.f;
  return fabsf(total) > eps ? 1.f : 0.f;
}
