// Decays per token (gates): what the sweeps of `sweep.cu` read of them, and the gradient of a decay.
//
// The sweeps count l, the sum of gates to base 2, from just before each chunk of 64 rows. So no sum crosses a chunk,
// and one launch serves any length. The gradient of a gate is the sum of dL from its token on; that sum crosses all
// tokens, and the blocks of a row, a cluster of CLUSTER, exchange theirs through shared memory.
//
// Options, set on the compiler's command line:
// - GATE: the type of gates: 0 float32, 1 bfloat16, 2 float16, 3 float64. `sum_gates` with 4 is given L itself, float64.
// - SUMMED: the gradient is that of gates; without it, that of L, in float64.
// - CLUSTER: how many blocks share a row in `decay_gradient`.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;
constexpr int R = 1, CHUNK = 64, THREADS = 512;

#include "instructions.cu"
#include "pairs.cu"

#ifndef assert
#define assert(right) ((right) ? (void)0 : __trap())
#endif

template <int TYPE> struct Gate {
  typedef bf16 type;
};
template <> struct Gate<0> {
  typedef float type;
};
template <> struct Gate<3> {
  typedef double type;
};
template <> struct Gate<4> {
  typedef double type;
};
typedef Gate<GATE>::type Stored;
constexpr float LEAST = -110.f;  // `least_gate`: its exponential is 0 already

INLINE float read(const Stored* p) {
  if (GATE == 1) return __uint_as_float((u32)*(const bf16*)p << 16);
  if (GATE == 2) return from_half(*(const bf16*)p);
  return (float)*p;
}
INLINE void write(Stored* p, double value) {
  const float a = (float)value;
  if (GATE == 1) *(bf16*)p = (bf16)(pack(a, 0.f) & 0xFFFFu);
  else if (GATE == 2) *(bf16*)p = to_half(a);
  else *p = (Stored)value;
}

// l [B, H, T] of every token. A block has 512 tokens of a head, or a packed sequence; a warp has a chunk. A packed
// sequence has nothing before it that its first gate could close.
extern "C" __global__ void __launch_bounds__(256)
sum_gates(const Stored* __restrict__ gates, float* __restrict__ sums, const int* __restrict__ bounds, long long g_b,
          long long g_h, long long g_t, int heads, int length, int blocks) {
  const long long head = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, lane = threadIdx.x % 32;
  const int start = bounds ? bounds[block] : block * 512, stop = bounds ? bounds[block + 1] : min(start + 512, length);
  gates += head / heads * g_b + head % heads * g_h;
  sums += head * length;
  for (int begin = start + threadIdx.x / 32 * CHUNK; begin < stop; begin += 8 * CHUNK) {
    double before = 0.;  // where L is given
    if (GATE == 4) before = bounds && begin == start ? (double)gates[begin * g_t]
                          : begin ? (double)gates[(begin - 1) * g_t] : 0.;
    float l[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = begin + half * 32 + lane;
      l[half] = 0.f;
      if (token < stop) {
        if (GATE == 4) l[half] = (float)((double)gates[token * g_t] - before) * LOG_E;
        else {
          const float gate = read(gates + token * g_t);
          assert(gate <= 0.f && "log_decay must be at most 0");
          if (!(bounds && token == start)) l[half] = (gate < LEAST ? LEAST : gate) * LOG_E;
        }
      }
    }
    if (GATE != 4) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float earlier = __shfl_up_sync(~0u, l[half], step);
          if (lane >= step) l[half] += earlier;
        }
      l[1] += __shfl_sync(~0u, l[0], 31);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (begin + half * 32 + lane < stop) sums[begin + half * 32 + lane] = l[half];
  }
}

// ---- The gradient ----

struct Pair {
  double grad, size;  // dL of a token or of several, and the squares of what it is the difference of
  INLINE Pair operator+(const Pair& other) const { return {grad + other.grad, size + other.size}; }
};
INLINE Pair shuffled(const Pair& a, int from) {
  return {__shfl_sync(~0u, a.grad, from), __shfl_sync(~0u, a.size, from)};
}

// The sums over the threads of a block that come after this one, and over all of them.
struct After {
  Pair later, all;
  INLINE After(Pair mine, Pair (&room)[THREADS / 32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Pair sum = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const Pair other = shuffled(sum, (lane + step) % 32);
      if (lane + step < 32) sum = sum + other;
    }
    __syncthreads();  // the last sums have been read
    if (lane == 0) room[warp] = sum;
    __syncthreads();
    later = shuffled(sum, (lane + 1) % 32);
    if (lane == 31) later = {0., 0.};
    all = {0., 0.};
#pragma unroll
    for (int w = THREADS / 32 - 1; w >= 0; --w) {
      if (w == warp) later = later + all;
      all = all + room[w];
    }
  }
};

// Four tokens of a thread.
struct Tokens {
  Pair each[4], sum;
  INLINE Tokens(const float* by_query, const float* by_key, const float* less_query, const float* less_key, int query_n,
                int key_n, int from, int stop) {
    sum = {0., 0.};
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const long long t = from + i;
      float q = 0.f, k = 0.f;
      if (t < stop) {
        for (int n = 0; n < query_n; ++n) q += by_query[t * query_n + n] - (less_query ? less_query[t * query_n + n] : 0.f);
        for (int n = 0; n < key_n; ++n) k += by_key[t * key_n + n] - (less_key ? less_key[t * key_n + n] : 0.f);
      }
      each[i] = {(double)q - (double)k, (double)q * q + (double)k * k};
      sum = sum + each[i];
    }
  }
};

INLINE Pair of_block(const Pair& mine, int rank) {
  Pair found;
  get_from_block(&mine, rank, found.grad, found.size);
  return found;
}

// dL_t = φ(q_t)·dφ(q_t) − φ(k_t)·dφ(k_t), of two sweeps the difference, corrected by each token's share of the squares
// so that it sums to `at_start`, as it must; `at_end` comes with the last token. Both are [B, H], 0 where not given.
extern "C" __global__ void __launch_bounds__(THREADS) __cluster_dims__(CLUSTER, 1, 1)
decay_gradient(const float* by_query, const float* by_key, const float* less_query, const float* less_key,
               const Stored* gates, const float* at_start, const float* at_end, void* found, long long g_b,
               long long g_h, long long g_t, int heads, int length, int query_n, int key_n) {
  __shared__ Pair room[THREADS / 32];
  __shared__ __align__(16) Pair mine;
  constexpr int TILE = THREADS * 4;
  const long long head = blockIdx.x / CLUSTER;
  const int rank = blockIdx.x % CLUSTER, tiles = (length + TILE - 1) / TILE, share = (tiles + CLUSTER - 1) / CLUSTER;
  const int first = min(rank * share, tiles), last = min(first + share, tiles);
  by_query += head * length * query_n, by_key += head * length * key_n;
  if (less_query) less_query += head * length * query_n, less_key += head * length * key_n;
  gates += head / heads * g_b + head % heads * g_h;
  const double start = at_start ? (double)at_start[head] : 0., end = at_end ? (double)at_end[head] : 0.;
  auto tokens = [&](int tile) {
    return Tokens(by_query, by_key, less_query, less_key, query_n, key_n, tile * TILE + threadIdx.x * 4, length);
  };
  Pair sum = {0., 0.};
  for (int tile = first; tile < last; ++tile) sum = sum + tokens(tile).sum;
  const After block(sum, room);
  Pair all = block.all, later = {0., 0.};  // of the row; of the tokens after this block's
  if (CLUSTER > 1) {
    if (threadIdx.x == 0) mine = block.all;
    meet_cluster();
    all = {0., 0.};
#pragma unroll
    for (int other = CLUSTER - 1; other >= 0; --other) {
      if (other == rank) later = all;
      all = all + of_block(mine, other);
    }
    meet_cluster();  // nobody ends before all have read
  }
  // 1e-300 is below the square of any float32 but 0
  const double excess = all.size > 1e-300 ? (all.grad + end - start) / all.size : 0.;
  for (int tile = last - 1; tile >= first; --tile) {
    const Tokens here = tokens(tile);
    const After threads(here.sum, room);
    Pair after = threads.later + later;
    later = later + threads.all;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const int t = tile * TILE + threadIdx.x * 4 + i;
      after = after + here.each[i];
      if (t >= length) continue;
      if (SUMMED) {
        const double grad = after.grad + end - excess * after.size;
        write((Stored*)found + head * length + t, read(gates + t * g_t) < LEAST ? 0. : grad);
      } else {
        const double grad = here.each[i].grad + (t == length - 1 ? end : 0.) - excess * here.each[i].size;
        ((double*)found)[head * length + t] = grad;
      }
    }
  }
}
