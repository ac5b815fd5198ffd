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
// A decay (DECAY) multiplies the weight of a pair by exp(L_i − L_j), j ≤ i, where L is the sum of the logarithms of
// the decay. L counts from just before the chunk: l = (L − L_before) log₂ e, since the hardware's exponential is to
// base 2; l_end belongs to the last row of the chunk. Of gates, `sum_gates` in `gates.cu` has made l; of a decay per
// head l is made where it is needed. Where it is near enough to 0 in every chunk of a segment,
// - a writer's f_r(j) is ψ_r(j) 2^(−l_j), a reader's f_r(i) is ψ_r(i) 2^(l_i), and neither is too large or too small;
// - the state is multiplied by 2^l_end after a chunk is added to it.
// So all else is as without a decay. Segments with a stronger decay are left to the variant with STRONG, all of whose
// exponents are at most 0:
// - pairs within a chunk are weighed one by one, by 2^(l_i − l_j) Σ_r ψ_r(i) ψ_r(j), so they need z as it is;
// - for the state, ψ_r z is multiplied by 2^(l_end − l_j); a tile then holds [z | ψ_0 z 2^(l_end − l) | ψ_1 z …];
// - a reader multiplies what the state gives by 2^l_i, and adds the pairs to that;
// - the state is multiplied by 2^l_end before a chunk is added to it.
// In reverse, readers and writers change places. Without causality a decay takes two sweeps, one in each direction;
// the second (STRICT, ADD) leaves out pairs of a row with itself, and adds to what the first has stored.
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
// - DECAY: 0 none, 1 PER_HEAD, 2 PER_TOKEN.
// - PAIRED, STRONG, STRICT, ADD: above. DOTS: also store φ(gate)·out of every row, for the gradient of the decay.
// - PACKED: sequences lie end to end, and each is a segment of its own.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

struct Params {  // `POINTERS` and `TAIL` in plan.py list the same fields in the same order
  const bf16 *x, *y, *z, *gate;
  bf16* out;
  float* total;  // [B, H, T]: the sums that forward divides by; DOTS: [B, H, T, blocks]
  const float *inverse, *delta;  // 1/D and δ, [B, H, T] each; forward with ADD: `inverse` is the first sweep's total
  const float* basis;  // ψ [b, h, T, R]
  const void* decay;  // PER_HEAD: L [b, h, T], double, of which the first of each head is read; PER_TOKEN: l [B, H, T], float
  const float* first;  // states [B, H, segments, R, D, V (+1)] before each segment
  float* last;  // and after each
  const unsigned char* mask;  // [B, T]
  const int* bounds;  // where each packed sequence begins, and where the last one ends
  long long xs[3], ys[3], zs[3], gs[3], outs[3], basis_s[2], decay_s[2], mask_s;
  long long first_h, first_s, last_h, last_s;
  int heads, length, rows, segments, blocks, contracted, columns, pitch;
  int skipped;  // segments that come before the first of this launch
  int reader_share, writer_share;  // how many query heads share a head of x and `gate`, and of y and z
  float eps, scale;  // scale: multiplies the output under RULE 0
};

constexpr int CHUNK = 64, PITCH = CHUNK * 16 + 16;  // rows; bytes between column blocks of a tile
constexpr bool CAUSAL = READ && WRITE;
constexpr bool ONES = RULE != 0 && !TURNED && !SCALED;
constexpr bool AUGMENTED = DELTA != 0, GATED = GATE || DOTS;
constexpr int XB = KW / 8 + 2 * AUGMENTED;  // column blocks of x and of y
// Columns of a tile of z: under a strong decay z itself and a column of ones, for pairs; then R copies of z, and what
// sums their weights.
constexpr bool OWN = STRONG && READ;
constexpr int STATE_Z = OWN ? 8 + ONES : 0, ZB = STATE_Z + R * 8 + ONES;  // column blocks
constexpr int OUT_N = R * 64 + ONES * 8, OUT_F = OUT_N / 2;  // columns of the output, and a thread's accumulators
constexpr int STATE_N = TURNED ? KW + 8 * AUGMENTED : (R * 8 + ONES) * 8, STATE_F = STATE_N / 2;
constexpr int STATE_M = TURNED ? R : KW / 64;  // state tiles of 64 rows
constexpr int STATE_PITCH = STATE_M * 1024 + 16;
constexpr int STATE_BYTES = (TURNED ? XB : STATE_N / 8) * STATE_PITCH;
constexpr int X_BYTES = READ ? XB * PITCH : 0, Y_BYTES = WRITE ? XB * PITCH : 0;
constexpr int Z_BYTES = WRITE ? ZB * PITCH : 0;
constexpr int FADE_AT = X_BYTES + Y_BYTES + Z_BYTES;  // under a decay: l of the chunk's rows, or l, ψ_0 and ψ_1
constexpr int FADE_BYTES = R == 1 ? 4 : 16, STAGE_BYTES = FADE_AT + (DECAY != 0) * CHUNK * FADE_BYTES;
// Warpgroups that keep the state (two if it is wide) and that compute the output (two otherwise, in turns).
constexpr int KEEPERS = WRITE && STATE_F * STATE_M > 80 && STATE_M == 2 ? 2 : 1, GIVERS = 3 - KEEPERS;
constexpr int LOADERS = 2;  // warpgroups that load: as one team, or as two teams in turns
constexpr int TEAMS = READ ? 1 : LOADERS, TEAM = LOADERS * 128 / TEAMS;
constexpr int STAGES = TEAMS > 1 ? 4 : KW == 64 ? 3 : 2;
// The rounded state is kept in registers and stored while the next chunk is added.
constexpr bool LATE = WRITE && KEEPERS == 1 && !TURNED && KW == 64 && !(DECAY && R == 2);
// Registers of a thread in each kind of warpgroup. All five together start with 5 · 96 and may not have more.
constexpr int LOADER_REGISTERS = !READ ? 96 : KEEPERS == 2 ? 80 : LATE && !DECAY ? 64 : 72;
constexpr bool BUSY_GIVER = KEEPERS == 2 && (TURNED || SCALED);
constexpr int KEEPER_REGISTERS = !READ ? 112 : BUSY_GIVER || !WRITE ? 96 : LATE && !DECAY ? 128 : 104;
constexpr int GIVER_REGISTERS = !READ ? 24 : !WRITE ? 120 : BUSY_GIVER ? 128 : 112;
static_assert(!DECAY || WRITE, "");
static_assert(LOADERS * LOADER_REGISTERS + KEEPERS * KEEPER_REGISTERS + GIVERS * GIVER_REGISTERS <= 480, "");
constexpr int STATE_AT = STAGES * STAGE_BYTES;
// States in shared memory: of this chunk and the next, or of both halves of PAIRED.
constexpr int STATES = !READ ? 0 : WRITE || PAIRED ? 2 : 1;
constexpr int OUT_AT = STATE_AT + STATES * STATE_BYTES;
constexpr int BARRIERS_AT = OUT_AT + (READ ? 2 * 8 * PITCH : 0);
extern "C" __constant__ const int shared_bytes = BARRIERS_AT + 16 * 8;
constexpr int AHEAD = 1 + 2 * TEAMS;  // how many chunks ahead rows are prefetched into the L2 cache
constexpr int MOVE = (REVERSE ? -TEAMS : TEAMS) * CHUNK;  // rows from one chunk of a team to its next

#include "instructions.cu"
#include "pairs.cu"
#include "denominator.cu"

// ---- Which part of the problem a thread block serves ----

struct Place {
  long long b, h, head;
  int segment, block, start, stop, chunks;
  INLINE Place(const Params& p, int* note) {
    int number = blockIdx.x;
    block = number % p.blocks;
    segment = number / p.blocks % p.segments;
    head = number / (p.blocks * p.segments);
    b = head / p.heads, h = head % p.heads;
    if (PACKED) {
      segment = longest(p, segment, note);
      start = p.bounds[segment], stop = p.bounds[segment + 1];
    } else {
      segment += p.skipped;
      start = segment * p.rows, stop = min(start + p.rows, p.length);
    }
    chunks = (stop - start + CHUNK - 1) / CHUNK;
  }
  INLINE int begin(int c) const { return start + (REVERSE ? chunks - 1 - c : c) * CHUNK; }
  // The sequence that `rank` others are longer than: the longest are begun first, so that all end together. With very
  // many sequences their order would take longer to find than it saves.
  INLINE static int longest(const Params& p, int rank, int* note) {
    if (p.segments > 256) return rank;
    constexpr int LANES = 256 / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int lengths[LANES];  // every warp has all of them
#pragma unroll
    for (int n = 0; n < LANES; ++n) {
      const int s = n * 32 + lane;
      lengths[n] = s < p.segments ? p.bounds[s + 1] - p.bounds[s] : -1;
    }
#pragma unroll
    for (int n = 0; n < LANES; ++n) {
      for (int from = warp; from < min(p.segments - n * 32, 32); from += 640 / 32) {
        const int mine = __shfl_sync(~0u, lengths[n], from);
        int longer = 0;
#pragma unroll
        for (int m = 0; m < LANES; ++m) {
          if (m * 32 >= p.segments) break;
          const bool before = m < n || (m == n && lane < from);
          longer += __popc(__ballot_sync(~0u, before ? lengths[m] >= mine : lengths[m] > mine));
        }
        if (longer == rank && lane == 0) *note = n * 32 + from;
      }
    }
    __syncthreads();
    return *note;
  }
};

// Says that a stage may be filled again. One lane may say so for its warp, since the products of a warp end
// together; under a decay every lane says it, since every lane reads l for itself.
constexpr int VOICES = DECAY ? 32 : 1;
INLINE void give_back(u32 empty) {
  if (DECAY || threadIdx.x % 32 == 0) arrive(empty);
}

// ---- The decay within a chunk: l of its rows, and ψ if R = 2, stand in shared memory ----

struct Fade {
  float l, psi[R];
  INLINE Fade(u32 rows, int row) {
    if (R == 1) l = get4(rows + row * FADE_BYTES);
    else {
      const uint4 all = get16(rows + row * FADE_BYTES);
      l = __uint_as_float(all.x), psi[0] = __uint_as_float(all.y), psi[R - 1] = __uint_as_float(all.z);
    }
  }
  // The weight of the pair of a reader with this writer.
  INLINE float weight(const Fade& reader) const {
    const float fades = exp2_of(REVERSE ? l - reader.l : reader.l - l);
    return R == 1 ? fades : fades * (psi[0] * reader.psi[0] + psi[R - 1] * reader.psi[R - 1]);
  }
};
INLINE float whole(u32 rows) { return get4(rows + (CHUNK - 1) * FADE_BYTES); }  // l of the chunk's last row
INLINE float from_writer(float l, float end) {
  return exp2_of(STRONG ? REVERSE ? l : end - l : REVERSE ? l - end : -l);
}
INLINE float to_reader(float l, float end) { return exp2_of(REVERSE ? end - l : l); }
// Multiplies the scores of 16 rows of a warp, distributed over threads as wgmma leaves them. Pairs that causality hides
// may become anything, and whole blocks of them stay as they are.
INLINE void weigh(float (&scores)[32], u32 rows, int row, int lane, int warp) {
  const Fade upper(rows, row), lower(rows, row + 8);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (REVERSE ? n < 2 * warp : n > 2 * warp + 1) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Fade writer(rows, n * 8 + lane * 2 + i);
      scores[n * 4 + i] *= writer.weight(upper);
      scores[n * 4 + 2 + i] *= writer.weight(lower);
    }
  }
}

// What is known of the decay of a head: the logarithm of an even one to base 2, and l of gates.
INLINE float even_rate(const Params& p, const Place& at) {
  return (float)((const double*)p.decay)[at.b * p.decay_s[0] + at.h * p.decay_s[1]] * LOG_E;
}
INLINE const float* gate_sums(const Params& p, const Place& at) {
  return (const float*)p.decay + at.b * p.decay_s[0] + at.h * p.decay_s[1];
}
// Whether a decay of the segment is too strong for factors of single rows. All threads ask together.
constexpr float STRONG_END = -65.f;  // half of the weight lost at each of 64 rows is not strong
INLINE bool is_strong(const Params& p, const Place& at) {
  if (DECAY == PER_HEAD) return !(even_rate(p, at) * CHUNK >= STRONG_END);
  const float* sums = gate_sums(p, at);
  bool strong = false;
  for (int c = threadIdx.x; c < at.chunks; c += blockDim.x) {
    strong |= !(sums[min(at.start + (c + 1) * CHUNK, at.stop) - 1] >= STRONG_END);
  }
  return __syncthreads_or(strong);
}

#include "producer.cu"
#include "state.cu"
#include "output.cu"

extern "C" __global__ void __launch_bounds__(640, 1) sweep(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + BARRIERS_AT, empty = full + STAGES * 8;
  const u32 state_full = empty + STAGES * 8, state_empty = state_full + 16;
  const Place at(p, (int*)(memory + BARRIERS_AT + 15 * 8));
  if (DECAY && READ && is_strong(p, at) != STRONG) return;  // the other variant serves this segment
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
  if (OWN && ONES) {  // ones that belong to z itself
    for (int i = threadIdx.x; i < STAGES * CHUNK; i += blockDim.x)
      put16(shared + i / CHUNK * STAGE_BYTES + X_BYTES + Y_BYTES + 8 * PITCH + i % CHUNK * 16,
            make_uint4(pack(1.f, 0.f), 0, 0, 0));
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
    barriers_are_ready();
  }
  __syncthreads();
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
