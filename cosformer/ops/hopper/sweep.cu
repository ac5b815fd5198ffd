// The sweep of `triton/kernels/sweep.py` in CUDA C++ for Hopper GPUs.
//
//     out_i = Σ_r f_r(i) Σ_j (x_i·y_j) f_r(j) z_j          j ≤ i, or j ≥ i in reverse
//
// Row i is the reader, row j the writer. There are R basis functions, so R states Σ_j y_j f_r(j) z_jᵀ.
// f_r is the basis function ψ_r at the row's position, times 1/D_j where the writer's rows were divided
// by their denominator D. The producer multiplies z by each f_r and puts the R copies side by side,
// [f_0 z | f_1 z], so that one wide product serves all states and all pairs within a chunk. Columns of
// ψ itself beside them give the denominator:
//
// | pass    | x        | y        | z              | state [M, N]          |
// |---------|----------|----------|----------------|-----------------------|
// | forward | φ(q)     | φ(k)     | [ψ_r v | ψ_r]  | [D, R·64 + 8]         |
// | dv      | φ(k)     | φ(q)     | [ψ_r dout/D]   | [D, R·64]             |
// | dq      | [dout δ] | [v 1]    | [ψ_r φ(k)]     | turned: [R·64, V + 8] |
// | dk      | [v 1]    | [dout δ] | [ψ_r φ(q)/D]   | turned: [R·64, V + 8] |
//
// where δ = −dout·out·dD/dtotal is the gradient of a row's total. bfloat16 is too coarse for ψ in the
// denominator, for the sums of it and for δ: each such number takes two columns, the number rounded to
// bfloat16 and the rounding error.
//
// A decay (DECAY; then R = 1 and ψ = 1) multiplies the weight of a pair by exp(L_i − L_j), j ≤ i, where L is the
// sum of the logarithms of the decay. Every exponent is at most 0, however strong the decay, because:
// - pairs within a chunk are weighed one by one;
// - for the state, z is multiplied by exp(L_end − L_j), where L_end is L at the last row of the chunk; the tile
//   holds z a second time, as it is, for the pairs;
// - a reader multiplies what the state gives by exp(L_i − L_before), where L_before is L just before the chunk;
// - the state is multiplied by exp(L_end − L_before) before a chunk is added to it.
// In reverse, readers and writers change places. The basis then holds l = (L − L_before) log₂ e in place of ψ
// (made by the kernel `since`), because the hardware's exponential is to base 2.
//
// A thread block has five warpgroups: two load rows (`producer.cu`), one or two keep the state (`state.cu`), and
// one or two compute the output (`output.cu`). It serves one head, one segment of the sequence and 64 columns of
// z; with PAIRED, which only reads, 128 columns, 64 for each warpgroup of the output.
// A tile in shared memory consists of 8 × 8 blocks of 128 bytes; column blocks lie PITCH bytes apart, so that
// a product can contract over rows or over columns, without bank conflicts.
//
// Options, set on the compiler's command line:
// - KW: width of x and y, 64 or 128. R: number of basis functions, 1 or 2.
// - TURNED: the state is stored transposed, as in the table.
// - READ: compute the output. WRITE: add to the state. Both: causal attention. REVERSE: from the last row.
// - X_MAP, Y_MAP, Z_MAP: φ of x, y, z: 0 identity, 1 relu, 2 1+elu, 3 leaky relu, 4 elu.
// - GATE: multiply the output by the derivative of this φ at `gate`.
// - RULE: how the denominator D is made of the total: 0 no division, 1 clamp, 2 add, 3 signed.
// - DELTA: who has δ: 0 nobody, 1 the reader, 2 the writer. SCALED: the writer's rows are divided by D.
// - MASKED: whose rows `mask` may hide: 0 nobody's, 1 the writer's, 2 the reader's.
// - PAIRED, DECAY: above. DOTS: also store φ(gate)·out of every row, for the gradient of the decay.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

struct Params {  // `POINTERS` and `TAIL` in plan.py list the same fields in the same order
  const bf16 *x, *y, *z, *gate;
  bf16* out;
  float* total;  // [B, H, T]: the sums that forward divides by; DOTS: [B, H, T, blocks]
  const float *inverse, *delta;  // 1/D and δ, [B, H, T] each
  const float* basis;  // ψ [b, h, T, R], or l under a decay
  const float* first;  // states [B, H, segments, R, D, V (+1)] before each segment
  float* last;  // and after each
  const unsigned char* mask;  // [B, T]
  long long xs[3], ys[3], zs[3], gs[3], outs[3], basis_s[2], mask_s;
  long long first_h, first_s, last_h, last_s;
  int heads, length, rows, segments, blocks, contracted, columns, pitch;
  float eps, scale;  // scale: multiplies the output under RULE 0
};

constexpr int CHUNK = 64, PITCH = CHUNK * 16 + 16;  // rows; bytes between column blocks of a tile
constexpr bool CAUSAL = READ && WRITE;
constexpr bool ONES = RULE != 0 && !TURNED && !SCALED;
constexpr bool AUGMENTED = DELTA != 0, GATED = GATE || DOTS;
constexpr int XB = KW / 8 + 2 * AUGMENTED;  // column blocks of x and of y
constexpr int COPIES = DECAY && READ ? 2 : R;  // copies of z in a tile; the last R of them are added to the state
constexpr int ONES_AT = COPIES * 8, OWN_ONES_AT = ONES_AT + (DECAY && READ);  // ones for the state, and for pairs
constexpr int ZB = ONES ? OWN_ONES_AT + 1 : COPIES * 8;
constexpr int OUT_N = R * 64, OUT_F = OUT_N / 2;  // columns of the output, and a thread's accumulators
constexpr int STATE_N = TURNED ? KW + 8 * AUGMENTED : (R * 8 + ONES) * 8, STATE_F = STATE_N / 2;
constexpr int STATE_M = TURNED ? R : KW / 64;  // state tiles of 64 rows
constexpr int STATE_PITCH = STATE_M * 1024 + 16;
constexpr int STATE_BYTES = (TURNED ? XB : STATE_N / 8) * STATE_PITCH;
constexpr int X_BYTES = READ ? XB * PITCH : 0, Y_BYTES = WRITE ? XB * PITCH : 0;
constexpr int Z_BYTES = WRITE ? ZB * PITCH : 0;
constexpr int SINCE_AT = X_BYTES + Y_BYTES + Z_BYTES;  // where l of the chunk's rows stands
constexpr int STAGE_BYTES = SINCE_AT + DECAY * CHUNK * 4;
// Warpgroups that keep the state (two if it is wide) and that compute the output (two otherwise, in turns).
constexpr int KEEPERS = WRITE && STATE_F * STATE_M > 80 && STATE_M == 2 ? 2 : 1, GIVERS = 3 - KEEPERS;
constexpr int LOADERS = 2;  // warpgroups that load: as one team, or as two teams in turns
constexpr int TEAMS = READ ? 1 : LOADERS, TEAM = LOADERS * 128 / TEAMS;
constexpr int STAGES = TEAMS > 1 ? 4 : KW == 64 ? 3 : 2;
// The rounded state is kept in registers and stored while the next chunk is added.
constexpr bool LATE = WRITE && KEEPERS == 1 && !TURNED && KW == 64;
// Registers of a thread in each kind of warpgroup. All five together start with 5 · 96 and may not have more.
constexpr int LOADER_REGISTERS = !READ ? 96 : KEEPERS == 2 ? 80 : LATE ? 64 : 72;
constexpr bool BUSY_GIVER = KEEPERS == 2 && (TURNED || SCALED), IDLE_KEEPER = !WRITE || (DECAY && !LATE && !ONES);
constexpr int KEEPER_REGISTERS =
    !READ ? 112 : BUSY_GIVER || IDLE_KEEPER ? 96 : LATE ? 128 : DECAY ? 112 : 104;
constexpr int GIVER_REGISTERS = !READ ? 24 : IDLE_KEEPER ? 120 : BUSY_GIVER ? 128 : 112;
static_assert(!DECAY || (WRITE && R == 1 && KEEPERS == 1), "");
static_assert(LOADERS * LOADER_REGISTERS + KEEPERS * KEEPER_REGISTERS + GIVERS * GIVER_REGISTERS <= 480, "");
constexpr int STATE_AT = STAGES * STAGE_BYTES;
// States in shared memory: of this chunk and the next, or of both halves of PAIRED.
constexpr int STATES = !READ ? 0 : WRITE || PAIRED ? 2 : 1;
constexpr int OUT_AT = STATE_AT + STATES * STATE_BYTES;
constexpr int BARRIERS_AT = OUT_AT + (READ ? 2 * 8 * PITCH : 0);
extern "C" __constant__ const int shared_bytes = BARRIERS_AT + 16 * 8;
constexpr int AHEAD = 1 + 2 * TEAMS;  // how many chunks ahead rows are prefetched into the L2 cache

#include "instructions.cu"

// ---- The denominator ----

INLINE float reciprocal(float a) {
  float b;
  asm("rcp.approx.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
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

// ---- Which part of the problem a thread block serves ----

struct Place {
  long long b, h, head;
  int segment, block, start, stop, chunks;
  INLINE Place(const Params& p) {
    int number = blockIdx.x;
    block = number % p.blocks;
    segment = number / p.blocks % p.segments;
    head = number / (p.blocks * p.segments);
    b = head / p.heads, h = head % p.heads;
    start = segment * p.rows;
    stop = min(start + p.rows, p.length);
    chunks = (stop - start + CHUNK - 1) / CHUNK;
  }
  INLINE int begin(int c) const { return start + (REVERSE ? chunks - 1 - c : c) * CHUNK; }
};

// Says that a stage may be filled again. One lane may say so for its warp, since the products of a warp end
// together; under a decay every lane says it, since every lane reads l for itself.
constexpr int VOICES = DECAY ? 32 : 1;
INLINE void give_back(u32 empty) {
  if (DECAY || threadIdx.x % 32 == 0) arrive(empty);
}

// ---- The decay within a chunk, from l of its rows in shared memory ----

INLINE float whole(u32 since) { return get4(since + (CHUNK - 1) * 4); }  // l of the chunk's last row
INLINE float from_writer(float l, float end) { return exp2_of(REVERSE ? l : end - l); }
INLINE float to_reader(float l, float end) { return exp2_of(REVERSE ? end - l : l); }
// Multiplies scores, distributed over threads as wgmma leaves them. Pairs that causality hides may become anything.
INLINE void weigh(float (&scores)[32], u32 since, float upper, float lower, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float theirs = get4(since + (n / 2 * 8 + lane * 2 + n % 2) * 4);
    float* e = scores + n / 2 * 4 + n % 2;
    e[0] *= exp2_of(REVERSE ? theirs - upper : upper - theirs);
    e[2] *= exp2_of(REVERSE ? theirs - lower : lower - theirs);
  }
}

#include "producer.cu"
#include "state.cu"
#include "output.cu"

extern "C" __global__ void __launch_bounds__(640, 1) sweep(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + BARRIERS_AT, empty = full + STAGES * 8;
  const u32 state_full = empty + STAGES * 8, state_empty = state_full + 16;
  if (AUGMENTED) {  // the last column block of x and y is zero for good
    for (int i = threadIdx.x; i < STAGES * CHUNK; i += blockDim.x) {
      const u32 tile = shared + i / CHUNK * STAGE_BYTES + (XB - 1) * PITCH + i % CHUNK * 16;
      if (READ) put16(tile, make_uint4(0, 0, 0, 0));
      if (WRITE) put16(tile + X_BYTES, make_uint4(0, 0, 0, 0));
    }
    for (int i = threadIdx.x; READ && TURNED && i < STATES * R * 64; i += blockDim.x)  // so is that of the state
      put16(shared + STATE_AT + i / (R * 64) * STATE_BYTES + (XB - 1) * STATE_PITCH + i % (R * 64) * 16,
            make_uint4(0, 0, 0, 0));
    to_tensor_cores();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(full + i * 8, TEAM);
      init_barrier(empty + i * 8, 4 * VOICES * (READ * (1 + PAIRED) + KEEPERS * WRITE));
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(state_full + i * 8, 128 * KEEPERS);
      init_barrier(state_empty + i * 8, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Place at(p);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so the compiler knows that a warp agrees
  if (group < LOADERS) {
    registers<LOADER_REGISTERS>();
    produce(p, at, shared, full, empty);
  } else if (group < LOADERS + KEEPERS) {
    registers<KEEPER_REGISTERS>();
    keep_state(p, at, group - LOADERS, shared, full, empty, state_full, state_empty);
  } else {
    registers<GIVER_REGISTERS>();
    if (READ) give_out(p, at, group - LOADERS - KEEPERS, shared, full, empty, state_full, state_empty);
  }
}

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

// l = (L − L_before) log₂ e of every row, where L_before is L just before the row's chunk. The rows that pad the last
// chunk get the value of the last row.
extern "C" __global__ void since(const double* decay, float* l, int length, int padded) {
  const int t = blockIdx.y * 256 + threadIdx.x, start = t / CHUNK * CHUNK;
  if (t >= padded) return;
  decay += blockIdx.x * (long long)length;
  const double gap = decay[min(t, length - 1)] - (start ? decay[start - 1] : 0.);
  l[blockIdx.x * (long long)padded + t] = (float)(gap * 1.4426950408889634);
}

// `states` holds what each segment adds to the state, and gets the state before each segment; `last` gets the state
// after all of them. `start`, if given, is the state before the first segment.
extern "C" __global__ void edges(float* states, const float* start, float* last, const double* decay,
                                 long long size, long long decay_b, long long decay_h, int heads, int length,
                                 int rows, int segments, int causal, int reverse) {
  const long long element = blockIdx.y * 256ll + threadIdx.x, head = blockIdx.x;
  if (element >= size) return;
  float sum = start ? start[head * size + element] : 0.f;
  float* place = states + head * segments * size + element;
  decay += head / heads * decay_b + head % heads * decay_h;
  for (int from = 0; from < segments; from += 8) {
    float added[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int s = reverse ? segments - 1 - from - i : from + i;
      added[i] = from + i < segments ? place[s * size] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int s = reverse ? segments - 1 - from - i : from + i;
      if (causal && from + i < segments) place[s * size] = sum;
      if (DECAY && from + i < segments)
        sum *= exp_of((float)(decay[min((s + 1) * rows, length) - 1] - (s ? decay[s * rows - 1] : 0.)));
      sum += added[i];
    }
  }
  if (last) last[head * size + element] = sum;
}
