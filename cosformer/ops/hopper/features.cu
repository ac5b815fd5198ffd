// Features of projections, φ(x) = f(W x̂), made where the sweep wants them (PROJECT: 1 waves, 2 softmaxes,
// 3 relu, 4 exponentials, 5 the same with columns of zeros behind them). Here is W x; f is in `maps.cu`.
//
// A warpgroup multiplies 64 rows of x, from registers, with W in shared memory: there W stands once as it
// is rounded to 16 bits and, where it is float32 (SPLIT), once more as what that took away, so that 17
// of its 24 bits count. What f makes of it goes to the tile, 64 columns for each of f's parts. Exponentials
// have a block of 64 rows of W for every 64 columns, which x and y share.
//
// A thread loads 16 bytes of a row at a time, which are not what wgmma expects of it, but any order of
// columns will do that x and W have in common: at 8 b + 2 j + i stands column 32 (b/4) + 8 j + 2 (b%4) + i.

INLINE void loaders_meet() { asm volatile("bar.sync 1, %0;" ::"n"(LOADERS * 128) : "memory"); }
template <class F> INLINE float in_quad(float a, F join) {  // of the four lanes that share a row
  a = join(a, __shfl_xor_sync(~0u, a, 1));
  return join(a, __shfl_xor_sync(~0u, a, 2));
}
INLINE float sum_of(float a, float b) { return a + b; }

// W [64, 64] of a head, as all loaders together leave it in a tile, or two.
struct Weights {
  static constexpr int PIECES = 64 * 8 / (LOADERS * 128);
  float w[PIECES][8];
  INLINE static int row(int n) { return (threadIdx.x + n * LOADERS * 128) / 8; }
  INLINE static int block() { return threadIdx.x % 8; }

  // EXPONENTIAL: of the block `matrix` of 64 rows, of which there are `rows` in all.
  INLINE void load(const void* all, int matrix, int rows) {
#pragma unroll
    for (int n = 0; n < PIECES; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int column = block() / 4 * 32 + i / 2 * 8 + block() % 4 * 2 + i % 2;
        const int place = (matrix * 64 + row(n)) * 64 + column;
        if (FILLED && matrix * 64 + row(n) >= rows) w[n][i] = 0.f;
        else w[n][i] = SPLIT ? ((const float*)all)[place] : low(((const bf16*)all)[place]);
      }
  }
  INLINE void put(u32 tile) const {
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      u32 near[4], rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = w[n][i * 2], b = w[n][i * 2 + 1];
        near[i] = pack(a, b), rest[i] = pack(a - rounded(a), b - rounded(b));
      }
      const u32 at = tile + block() * PITCH + row(n) * 16;
      put16(at, make_uint4(near[0], near[1], near[2], near[3]));
      if (SPLIT) put16(at + 8 * PITCH, make_uint4(rest[0], rest[1], rest[2], rest[3]));
    }
  }
};

INLINE void put_weights(const Params& p, const Place& at, u32 tiles) {
  Weights x, y;  // EXPONENTIAL: the first block and the second
  constexpr bool FIRST = EXPONENTIAL || READ, SECOND = EXPONENTIAL ? KW == 128 : WRITE;
  if (FIRST) x.load(p.x_weight, EXPONENTIAL ? 0 : (int)at.h / p.x_shared, p.contracted);
  if (SECOND) y.load(p.y_weight, EXPONENTIAL ? 1 : (int)at.h / p.y_shared, p.contracted);
  if (FIRST) x.put(tiles);
  if (SECOND) y.put(tiles + FIRST * WEIGHTS_BYTES);
  to_tensor_cores();
  loaders_meet();
}

// 64 rows of x or of y: where both are wanted, a warpgroup has one of them.
struct Unprojected {
  u32 v[2][8];  // columns of two rows, 8 apart
  const bool asks;  // has x
  const long long stride;
  const bf16* next;
  const unsigned char* mask;
  const float* levels;
  float level[2];
  INLINE static int row(int half) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8; }
  INLINE static int column() { return threadIdx.x % 4 * 8; }

  INLINE Unprojected(const Params& p, const Place& at, int team)
      : asks(PROJECT && READ && (!WRITE || __shfl_sync(~0u, threadIdx.x / 128, 0) == 0)),
        stride(asks ? p.xs[2] : p.ys[2]), mask(p.mask + at.b * p.mask_s) {
    const long long* step = asks ? p.xs : p.ys;
    levels = (asks ? p.inverse : p.delta) + at.head * p.length;
    next = (asks ? p.x : p.y) + at.b * step[0] + at.h * step[1] + (at.begin(team) + row(0)) * stride + column();
  }
  // Called for one chunk after the other, and for one that is not there.
  INLINE void load(const Place& at, int c, bool announced) {
    const int begin = at.begin(c), left = at.stop - begin;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 w = load16<false>(next + i / 2 * 8 * stride + i % 2 * 32, row(i / 2) < left);
      u32* to = v[i / 2] + i % 2 * 4;
      to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
    }
    const int thread = threadIdx.x % 128;
    if (announced && thread < CHUNK)  // a row is a line of 128 bytes
      prefetch(next + ((AHEAD - 1) * CHUNK + thread - row(0)) * stride - column());
    if (MASKED == 1 && !asks)
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (row(i / 8) < left && !mask[begin + row(i / 8)]) v[i / 8][i % 8] = 0;
    next += TEAMS * CHUNK * stride;
    if (EXPONENTIAL)
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // a masked 0 relative to another's level might be infinite
        const int i = begin + row(half);
        level[half] = load4(levels + i, i < at.stop && (MASKED != 1 || asks || mask[i]));
      }
  }
};

// W x by N rows of W, as wgmma deals it out; begins only.
template <int N> INLINE void multiply(float (&y)[N / 2], const u32 (&v)[2][8], u32 weights) {
  const Operand w(weights, PITCH);
  mma_fence();
#pragma unroll
  for (int i = 0; i < 4 * (1 + SPLIT); ++i) {
    const int k = i % 4;
    const u32 a[4] = {v[0][k * 2], v[1][k * 2], v[0][k * 2 + 1], v[1][k * 2 + 1]};
    Mma<N>::template from_registers<0>(y, a, w.at(i / 4 * 8 * PITCH + k * 2 * PITCH, 128), i > 0);
  }
  mma_commit();
}
INLINE float square_of(const u32 (&v)[8]) {  // ‖x‖² of a quad's row
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = low(v[i]), b = high(v[i]);
    square += a * a + b * b;
  }
  return in_quad(square, sum_of);
}

#include "maps.cu"
