// Small kernels around the sweeps of `sweep.cu`.
//
// Options, set on the compiler's command line: KW, the width of rows, 64 or 128; RULE as there; DECAY as there:
// L is given of a decay per head, l of one per token.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
constexpr int R = 1;

#include "instructions.cu"
#include "pairs.cu"
#include "denominator.cu"

// 1/D and δ = −dout·out·dD/dtotal of every row, by KW / 8 threads for each.
extern "C" __global__ void prepare(const bf16* grad, const bf16* out, const float* total, float* inverse,
                                   float* delta, long long g_b, long long g_h, long long g_t,
                                   long long o_b, long long o_h, long long o_t, long long rows,
                                   int heads, int length, int width, float eps) {
  const long long row = (blockIdx.x * 256ll + threadIdx.x) / (KW / 8);
  const int column = threadIdx.x % (KW / 8) * 8;
  const bool inside = row < rows && column < width;
  const long long head = row / length, t = row % length, b = head / heads, h = head % heads;
  const uint4 g = load16<false>(grad + b * g_b + h * g_h + t * g_t + column, inside);
  const uint4 o = load16<false>(out + b * o_b + h * o_h + t * o_t + column, inside);
  float dot = low(g.x) * low(o.x) + high(g.x) * high(o.x) + low(g.y) * low(o.y) + high(g.y) * high(o.y)
            + low(g.z) * low(o.z) + high(g.z) * high(o.z) + low(g.w) * low(o.w) + high(g.w) * high(o.w);
#pragma unroll
  for (int n = 1; n < KW / 8; n *= 2) dot += __shfl_xor_sync(~0u, dot, n);
  if (inside && column == 0) {
    inverse[row] = reciprocal(divisor(total[row], eps));
    delta[row] = -dot * slope(total[row], eps);
  }
}

// `states` holds what each piece of a segment adds to the state. Where a segment's first piece stood it gets the state
// before the segment; `last` gets the state after all of them. `start`, if given, is the state before the first segment.
constexpr int MOST = 64;  // pieces of all segments, as in `plan.py`
extern "C" __global__ void edges(float* states, const float* start, float* last, const void* decay,
                                 long long size, long long decay_b, long long decay_h, int heads, int length,
                                 int rows, int all_pieces, int pieces, int causal, int reverse) {
  const long long element = blockIdx.y * 256ll + threadIdx.x, head = blockIdx.x;
  const long long of_head = head / heads * decay_b + head % heads * decay_h;
  const double* all = (const double*)decay + of_head;  // L
  const float* sums = (const float*)decay + of_head;   // l
  __shared__ float whole[MOST];  // the sum of a piece's gates, to base 2
  if (DECAY == PER_TOKEN) {
    const int lane = threadIdx.x % 32;
    for (int s = threadIdx.x / 32; s < all_pieces; s += 8) {
      const int stop = min((s + 1) * rows, length);
      float sum = 0.f;
      for (int begin = s * rows + lane * 64; begin < stop; begin += 32 * 64) sum += sums[min(begin + 64, stop) - 1];
#pragma unroll
      for (int n = 1; n < 32; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
      if (lane == 0) whole[s] = sum;
    }
    __syncthreads();
  }
  if (element >= size) return;
  float sum = start ? start[head * size + element] : 0.f, before = sum;
  float* place = states + head * all_pieces * size + element;
  for (int from = 0; from < all_pieces; from += 8) {
    float added[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int s = reverse ? all_pieces - 1 - from - i : from + i;
      added[i] = from + i < all_pieces ? place[s * size] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int s = reverse ? all_pieces - 1 - from - i : from + i;
      if (s % pieces == (reverse ? pieces - 1 : 0)) before = sum;  // a segment begins
      if (causal && from + i < all_pieces && s % pieces == 0) place[s * size] = before;
      if (DECAY == PER_HEAD && from + i < all_pieces)
        sum *= exp_of((float)(all[min((s + 1) * rows, length) - 1] - (s ? all[s * rows - 1] : 0.)));
      if (DECAY == PER_TOKEN && from + i < all_pieces) sum *= exp2_of(whole[s]);
      sum += added[i];
    }
  }
  if (last) last[head * size + element] = sum;
}
