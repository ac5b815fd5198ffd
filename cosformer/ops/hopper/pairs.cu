// Arithmetic on pairs of bfloat16 numbers that share 32 bits, and feature maps.

constexpr int PER_HEAD = 1, PER_TOKEN = 2;  // values of DECAY: one for each head, one for each token
constexpr float LOG_E = 1.44269504f;  // log₂ e

INLINE u32 bits(float a) { return __float_as_uint(a); }
INLINE float low(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
INLINE float exp_of(float a) { return exp2_of(a * LOG_E); }
INLINE float exp_of_negative(float a) { return exp_of(fminf(a, 0.f)); }
template <int MAP> INLINE float phi(float a) {
  if (MAP == 2) return fmaxf(a, 0.f) + exp_of_negative(a);
  if (MAP == 3) return a > 0.f ? a : LEAKY_SLOPE * a;
  return a > -0.01f ? a + fminf(a, 0.f) * a * 0.5f : exp_of(a) - 1.f;  // exp(a) − 1 cancels near 0: its series
}
template <int MAP> INLINE u32 mapped(u32 pair) {
  if (MAP == 0) return pair;
  if (MAP == 1) return relu(pair);
  return pack(phi<MAP>(low(pair)), phi<MAP>(high(pair)));
}
template <int MAP> INLINE uint4 mapped(uint4 v) {
  return make_uint4(mapped<MAP>(v.x), mapped<MAP>(v.y), mapped<MAP>(v.z), mapped<MAP>(v.w));
}
INLINE u32 times(u32 pair, float f) { return pack(low(pair) * f, high(pair) * f); }
INLINE uint4 times(uint4 v, float f) {
  return make_uint4(times(v.x, f), times(v.y, f), times(v.z, f), times(v.w, f));
}
INLINE u32 plus(u32 a, u32 b) { return pack(low(a) + low(b), high(a) + high(b)); }
INLINE uint4 plus(uint4 a, uint4 b) { return make_uint4(plus(a.x, b.x), plus(a.y, b.y), plus(a.z, b.z), plus(a.w, b.w)); }
INLINE u32 positive(u32 pair) {  // all bits set where a number is above 0
  return ((int)(pair << 16) > 0 ? 0xFFFFu : 0u) | ((int)(pair & 0xFFFF0000u) > 0 ? 0xFFFF0000u : 0u);
}
template <int MAP> INLINE u32 gated(u32 pair, u32 at) {  // pair · φ′(at)
  if (MAP == 1) return pair & positive(at);
  if (MAP == 3) return pair & positive(at) | times(pair, LEAKY_SLOPE) & ~positive(at);
  return pack(low(pair) * exp_of_negative(low(at)), high(pair) * exp_of_negative(high(at)));
}
INLINE float rounded(float a) { return low(pack(a, 0.f)); }
