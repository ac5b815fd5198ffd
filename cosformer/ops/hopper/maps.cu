// f of W x: what features are, and where they go.
//
// Exponentials are e^(s (W x)_n − s² ‖x‖²/2 − level) by the level of a token, s = 64^−¼.

INLINE float sine_of(float a) {  // off by at most 2⁻²⁰, and by 2⁻²² of a: bfloat16 rounds to 2⁻⁹
  float b;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float cosine_of(float a) {
  float b;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float inverse_root(float a) {
  float b;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float inverse_of_sum(float a) {  // of powers, at least 1
  float b;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE u32 eighths(u32 pair) {  // φ is over √64; exact
  u32 y;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0x3E003E00));
  return y;
}
INLINE float inverse_norm(const u32 (&v)[8]) { return fminf(inverse_root(square_of(v)), 1e12f); }

// Four lanes' features of a row, in 32 columns.
INLINE void put_columns(u32 rows, const float* e) {
  u32 pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = pack(e[i * 2], e[i * 2 + 1]);
    if (PROJECT == 1) pair[i] = eighths(pair[i]);
    if (PROJECT == 3) pair[i] = relu(pair[i]);
  }
  put_blocks(rows, pair[0], pair[1], pair[2], pair[3]);
}
template <int HALF> INLINE u32 lines_of(u32 tile) {  // where a lane's rows of 8 × 8 blocks begin
  const int line = threadIdx.x % 32;
  return tile + (threadIdx.x % 128 / 32 * 16 + HALF * 8 + line % 8) * 16 + line / 8 * PITCH;
}

// Both parts of f, which may need all of a row.
struct Projected {
  float y[32], factor[2];  // W x, and 1/‖x‖ of both rows

  INLINE Projected(const u32 (&v)[2][8], u32 weights) {
    multiply<64>(y, v, weights);
    if (PROJECT == 1)
#pragma unroll
      for (int half = 0; half < 2; ++half) factor[half] = inverse_norm(v[half]);
    mma_wait<0>();
    hold(y);
  }

  // Features of one of the two rows.
  template <int HALF> INLINE void put(u32 tile) const {
    const u32 rows = lines_of<HALF>(tile);
    float a[16], one[16], two[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = y[i / 2 * 4 + HALF * 2 + i % 2];
    if (PROJECT == 2) softmaxes(a, one, two);
#pragma unroll
    for (int n = 0; n < 16; n += 8) {
      if (PROJECT == 1)
#pragma unroll
        for (int i = n; i < n + 8; ++i)
          one[i] = sine_of(a[i] * factor[HALF]), two[i] = cosine_of(a[i] * factor[HALF]);
      put_columns(rows + n / 2 * PITCH, one + n);
      put_columns(rows + (8 + n / 2) * PITCH, two + n);
    }
  }
  INLINE static void softmaxes(float (&a)[16], float (&one)[16], float (&two)[16]) {
    // Not in one with what follows, whose largest would then not be 0.
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = __fmul_rn(LOG_E, a[i]);
    float top = a[0], bottom = a[0], sum = 0.f, other = 0.f;
#pragma unroll
    for (int i = 1; i < 16; ++i) top = fmaxf(top, a[i]), bottom = fminf(bottom, a[i]);
    top = in_quad(top, fmaxf), bottom = in_quad(bottom, fminf);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      sum += one[i] = exp2_of(a[i] - top);
      other += two[i] = exp2_of(bottom - a[i]);
    }
    sum = inverse_of_sum(in_quad(sum, sum_of)), other = inverse_of_sum(in_quad(other, sum_of));
#pragma unroll
    for (int i = 0; i < 16; ++i) one[i] *= sum, two[i] *= other;
  }
};

// One part, where f takes rows of W singly: 32 at a time, and while f is made of them the next are multiplied.
struct Pieces {
  static constexpr int COUNT = KW / 32;
  float y[2][16], about[2];  // W x of two pieces; of both rows 1/(8 ‖x‖), or what exponents are relative to

  // Begins only; `end` waits for it.
  INLINE void begin(int piece, const u32 (&v)[2][8], u32 weights) {
    multiply<32>(y[piece % 2], v, weights + piece / 2 * WEIGHTS_BYTES + piece % 2 * 32 * 16);
  }
  INLINE void measure(const Unprojected& x, float gain) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      about[half] = EXPONENTIAL ? (square_of(x.v[half]) / 16.f + x.level[half]) * LOG_E - gain
                                : inverse_norm(x.v[half]) / 8.f;
  }
  INLINE void end(int piece, bool last) {
    if (last) mma_wait<0>();
    else mma_wait<1>();
    hold(y[piece % 2]);
  }
  // f in place of what it is of; columns beyond `width` are 0.
  INLINE void map(int piece, int width) {
    float (&e)[16] = y[piece % 2];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float own = about[i / 2 % 2];
      e[i] = EXPONENTIAL ? exp2_of(e[i] * (LOG_E * 0.353553391f) - own) : e[i] * own;
    }
    if (FILLED)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (piece * 32 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= width) e[i] = 0.f;
  }
  template <int HALF> INLINE void put(int piece, u32 tile) const {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = y[piece % 2][i / 2 * 4 + HALF * 2 + i % 2];
    put_columns(lines_of<HALF>(tile) + piece * 4 * PITCH, e);
  }
};
