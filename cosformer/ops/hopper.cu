// The sweep of `kernels.py` for Hopper: warpgroups that load, keep the state and give out, and `wgmma`.
//
//     out_i = Σ_r f_r(i) Σ_j (x_i·y_j) f_r(j) z_j          j ≤ i, or j ≥ i in reverse
//
// f_r(j) = ψ_r(j), times 1/D_j where the writer's rows were divided. Scaling z makes R copies of it,
// [f_0 z | f_1 z], and with it one wide product takes care of all states, of the pairs within a
// chunk and, by columns that hold ψ itself, of the denominator:
//
// | pass    | x     | y     | z                 | state [M, N]        |
// |---------|-------|-------|-------------------|---------------------|
// | forward | φ(q)  | φ(k)  | [ψ_r v | ψ_r]     | [D, R·64 + 8]       |
// | dv      | φ(k)  | φ(q)  | [ψ_r dout/D]      | [D, R·64]           |
// | dq      | [dout δ] | [v 1] | [ψ_r φ(k)]     | turned: [R·64, V + 8] |
// | dk      | [v 1] | [dout δ] | [ψ_r φ(q)/D]   | turned: [R·64, V + 8] |
//
// with δ = −dout·out·dD/dtotal. Where sums and totals go out apart (RULE 4), nothing is divided, and δ is
// what comes back as the gradient of the total. Numbers that must not lose bits (ψ for the denominator, its sums,
// δ) stand in two columns: rounded to 16 bits, and the rest.
//
// A decay (DECAY: no denominator, ψ = 1) weighs pairs by exp(L_i − L_j), j ≤ i. No exponent is positive,
// however strong a gate: pairs within a chunk are weighed one by one, and z stands there twice, as it is
// for them, and for the state times exp(L_end − L_j), L_end being L at the chunk's last row. Readers take
// the state times exp(L_i − L_before); in reverse the two change places. Before a chunk is added, the
// state is multiplied by exp(L_end − L_before). In place of ψ stands l = L − L_before (`since`).
//
// A block takes a head, a segment and 64 columns of z; where it only reads (PAIRED) 128, a giver each half.
// Tiles lie in shared memory as 8 × 8 blocks of 128 bytes, column blocks a PITCH apart, so that either
// direction can be the contracted one and nobody meets in a bank.
//
// Set by the compiler's command line: KW (64 or 128, width of x and y), R (1 or 2), TURNED, READ,
// WRITE, REVERSE, X_MAP, Y_MAP, Z_MAP (φ: 0 identity, 1 relu, 2 1+elu, 3 leaky relu, 4 elu), RULE (0 none,
// 1 clamp, 2 add, 3 signed, 4 apart), DELTA (0 none, 1 the reader's, 2 the writer's), SCALED (the writer's
// rows are divided by D), GATE (times φ′), MASKED (0 nobody, 1 writer, 2 reader), PAIRED, DECAY, DOTS
// (φ(gate)·out of every row, for the decay's gradient), PROJECT and SPLIT (`hopper_features.cu`: x and y are
// features that the producer makes of 64 columns; ψ = 1).

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

struct Params {
  const bf16 *x, *y, *z, *gate;
  bf16* out;
  float* total;  // [B, H, T], like those below: what forward divides by; DOTS: [B, H, T, blocks]
  const float *inverse, *delta, *basis, *first;  // 1/D and δ: backward's; ψ [b, h, T, R], or l
  float* last;  // states [B, H, segments, R, D, V (+1)]
  const unsigned char* mask;  // [B, T]
  const void *x_weight, *y_weight;  // PROJECT: W [h, 64, 64]
  long long xs[3], ys[3], zs[3], gs[3], outs[3], basis_s[2], mask_s;
  long long first_h, first_s, last_h, last_s;
  int heads, x_shared, y_shared;  // heads in all, and that share a W
  int length, rows, segments, blocks, contracted, columns, pitch;
  float eps;
};

constexpr int CHUNK = 64, PITCH = CHUNK * 16 + 16;  // bytes between column blocks of a tile
constexpr bool CAUSAL = READ && WRITE;
constexpr bool ONES = RULE != 0 && !TURNED && !SCALED;
constexpr bool APART = RULE == 4, AUGMENTED = DELTA != 0, GATED = GATE || DOTS;
constexpr int XB = KW / 8 + 2 * AUGMENTED;  // column blocks of x and of y
constexpr int COPIES = DECAY && READ ? 2 : R;  // of z; the last R of them make the state
constexpr int ZB = COPIES * 8 + ONES;
constexpr int OUT_N = R * 64, OUT_F = OUT_N / 2;  // columns, and accumulators of a thread
constexpr int STATE_N = TURNED ? KW + 8 * AUGMENTED : (R * 8 + ONES) * 8, STATE_F = STATE_N / 2;
constexpr int STATE_M = TURNED ? R : KW / 64;  // tiles of 64 rows
constexpr int STATE_PITCH = STATE_M * 1024 + 16;
constexpr int STATE_BYTES = (TURNED ? XB : STATE_N / 8) * STATE_PITCH;
constexpr int X_BYTES = READ ? XB * PITCH : 0, Y_BYTES = WRITE ? XB * PITCH : 0;
constexpr int Z_BYTES = WRITE ? ZB * PITCH : 0;
constexpr int SINCE_AT = X_BYTES + Y_BYTES + Z_BYTES;  // l of the chunk's rows
constexpr int STAGE_BYTES = SINCE_AT + DECAY * CHUNK * 4;
// Wide states are kept by two warpgroups, else two give out, taking turns.
constexpr int KEEPERS = WRITE && STATE_F * STATE_M > 80 && STATE_M == 2 ? 2 : 1, GIVERS = 3 - KEEPERS;
constexpr int LOADERS = 2;  // warpgroups that load: together, or in turns where registers allow it
constexpr int TEAMS = CAUSAL || (READ && !PROJECT) ? 1 : LOADERS, TEAM = LOADERS * 128 / TEAMS;
constexpr int STAGES = TEAMS > 1 ? 4 : KW == 64 || PROJECT ? 3 : 2;
// The state is stored while the next is summed: takes registers.
constexpr bool LATE = WRITE && KEEPERS == 1 && !TURNED && KW == 64;
// Registers of a thread; in sum over the five warpgroups at most the 5 · 96 they begin with.
constexpr int MAKER_REGISTERS = CAUSAL ? 96 : READ ? 104 : 128;  // of a loader that makes features
constexpr int LOADER_REGISTERS = PROJECT ? MAKER_REGISTERS : !READ ? 96 : KEEPERS == 2 ? 80 : LATE ? 64 : 72;
constexpr bool BUSY_GIVER = KEEPERS == 2 && (TURNED || SCALED), IDLE_KEEPER = !WRITE || (DECAY && !LATE);
constexpr int KEEPER_REGISTERS = !READ ? 112 : BUSY_GIVER || IDLE_KEEPER ? 96 : LATE ? 128 : 104;
constexpr int GIVER_REGISTERS = !READ ? 24 : PROJECT ? 88 : IDLE_KEEPER ? 120 : BUSY_GIVER ? 128 : 112;
static_assert(!DECAY || (WRITE && R == 1 && RULE == 0 && KEEPERS == 1), "");
static_assert(!PROJECT || (KW == 128 && R == 1 && !TURNED && !REVERSE && !SCALED && !PAIRED && !DECAY), "");
static_assert(LOADERS * LOADER_REGISTERS + KEEPERS * KEEPER_REGISTERS + GIVERS * GIVER_REGISTERS <= 480, "");
constexpr int STATE_AT = STAGES * STAGE_BYTES;
constexpr int STATES = !READ ? 0 : WRITE || PAIRED ? 2 : 1;  // of this chunk and the next, or of either half
constexpr int OUT_AT = STATE_AT + STATES * STATE_BYTES;
constexpr int WEIGHTS_AT = OUT_AT + (READ ? 2 * 8 * PITCH : 0), WEIGHTS_BYTES = PROJECT ? (1 + SPLIT) * 8 * PITCH : 0;
constexpr int BARRIERS_AT = WEIGHTS_AT + (READ + WRITE) * WEIGHTS_BYTES;
extern "C" __constant__ const int shared_bytes = BARRIERS_AT + 16 * 8;
constexpr int AHEAD = 1 + 2 * TEAMS;  // chunks that are on their way to the L2 cache

// ---- Hopper's instructions ----

#define INLINE __device__ __forceinline__

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INLINE void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
INLINE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra done; bra again; done: }"
      ::"r"(barrier), "r"(parity) : "memory");
}
INLINE void to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N> INLINE void registers() {
  if (N <= 96) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> INLINE void hold(float (&f)[N]) {  // the compiler may not move these across
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(f[i])::"memory");
}

// Describes an operand: where it begins, and the bytes between its 8 × 8 blocks along K and along M or N.
struct Operand {
  u32 low;
  INLINE Operand(u32 address, int along_k) : low((address & 0x3FFFF) >> 4 | along_k >> 4 << 16) {}
  INLINE u64 at(int bytes, int along_mn) const { return (u64)(along_mn >> 4) << 32 | (low + (bytes >> 4)); }
};

template <int N> struct Mma;  // sums [64, N] += a [64, 16] b [16, N]
//@MMA

INLINE float low(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
INLINE u32 pack(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}
INLINE u32 relu(u32 pair) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(0));
  return y;
}
constexpr float LOG_E = 1.44269504f;  // to base 2
INLINE float exp2_of(float a) {
  float b;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float exp_of(float a) { return exp2_of(a * LOG_E); }
INLINE float exp_of_negative(float a) { return exp_of(fminf(a, 0.f)); }
template <int MAP> INLINE float phi(float a) {
  if (MAP == 2) return fmaxf(a, 0.f) + exp_of_negative(a);
  if (MAP == 3) return a > 0.f ? a : LEAKY_SLOPE * a;
  return a > -0.01f ? a + fminf(a, 0.f) * a * 0.5f : exp_of(a) - 1.f;  // the series, where nothing is left of exp
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
INLINE u32 positive(u32 pair) {  // a mask
  return ((int)(pair << 16) > 0 ? 0xFFFFu : 0u) | ((int)(pair & 0xFFFF0000u) > 0 ? 0xFFFF0000u : 0u);
}
template <int MAP> INLINE u32 gated(u32 pair, u32 at) {  // times φ′
  if (MAP == 1) return pair & positive(at);
  if (MAP == 3) return pair & positive(at) | times(pair, LEAKY_SLOPE) & ~positive(at);
  return pack(low(pair) * exp_of_negative(low(at)), high(pair) * exp_of_negative(high(at)));
}
INLINE float rounded(float a) { return low(pack(a, 0.f)); }
template <bool ALL> INLINE uint4 load16(const void* p, bool inside, u32 outside = 0) {
  uint4 v;
  if (ALL)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; mov.u32 %0, %6; mov.u32 %1, %6; mov.u32 %2, %6; mov.u32 %3, %6;"
        " @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((u32)inside), "r"(outside));
  return v;
}
INLINE float load4(const float* p, bool inside) {
  float v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.f32 %0, [%1]; }"
               : "=&f"(v) : "l"(p), "r"((u32)inside));
  return v;
}
INLINE void load_psi(float (&psi)[R], const float* place, bool inside) {
  if (PROJECT) psi[0] = inside ? 1.f : 0.f;
  else if (R == 2)
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
                 " @p ld.global.v2.f32 {%0, %1}, [%2]; }"
                 : "=&f"(psi[0]), "=&f"(psi[R - 1]) : "l"(place), "r"((u32)inside));
  else psi[0] = load4(place, inside);
}
INLINE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
INLINE void put16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
INLINE uint4 get16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
INLINE void put4(u32 at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
INLINE float get4(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
// 8 × 8 blocks of 16-bit numbers as a warp's accumulators hold them; every lane names a row of one.
INLINE void get_blocks(u32 at, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}
INLINE void put_blocks(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE void put_blocks(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

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

// ---- Where a block stands ----

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

// ---- The decay within a chunk, by l of its rows in shared memory ----

INLINE float whole(u32 since) { return get4(since + (CHUNK - 1) * 4); }  // L_end − L_before
INLINE float from_writer(float l, float end) { return exp_of(REVERSE ? l : end - l); }
INLINE float to_reader(float l, float end) { return exp_of(REVERSE ? end - l : l); }
// Scores as wgmma deals them out; those of pairs that do not meet may become anything.
INLINE void weigh(float (&scores)[32], u32 since, float upper, float lower, int lane) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float theirs = get4(since + (n / 2 * 8 + lane * 2 + n % 2) * 4);
    float* e = scores + n / 2 * 4 + n % 2;
    e[0] *= exp_of(REVERSE ? theirs - upper : upper - theirs);
    e[2] *= exp_of(REVERSE ? theirs - lower : lower - theirs);
  }
}

// ---- The producer: loads rows, maps and scales them, and leaves tiles ----

// Of a tile [64, W], 16 bytes at a time: what one of THREADS holds, and where its next ones are.
// Where nothing is, stands what φ maps to 0.
template <int W, int THREADS, int MAP> struct Rows {
  static constexpr u32 NOTHING = MAP == 2 ? 0xFF80FF80u : 0u;  // −∞
  static constexpr int BLOCKS = W / 8, STEP = THREADS / BLOCKS, N = CHUNK / STEP;
  uint4 v[N];
  const bf16* next;
  INLINE static int row(int i) { return (threadIdx.x % THREADS) / BLOCKS + i * STEP; }
  INLINE static int block() { return threadIdx.x % BLOCKS; }

  INLINE void start(const bf16* p, long long stride) { next = p + row(0) * stride + block() * 8; }
  INLINE void move(long long stride) { next += (REVERSE ? -TEAMS : TEAMS) * CHUNK * stride; }
  // `left` rows and `width` columns exist.
  INLINE void load(long long stride, int left, int width) {
    if (left >= CHUNK && width >= W) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = load16<true>(next + i * STEP * stride, true);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        v[i] = load16<false>(next + i * STEP * stride, row(i) < left && block() * 8 < width, NOTHING);
    }
  }
  INLINE void announce(long long stride, int width) const {
    constexpr int LINES = W / 64, THERE = (REVERSE ? 1 - AHEAD : AHEAD - 1) * CHUNK;
    const int thread = threadIdx.x % THREADS, part = thread % LINES * 64;
    if (N <= 2) {  // its own rows, from the pointer that is at hand
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (block() * 8 < width) prefetch(next + (THERE + i * STEP) * stride);
    } else if (thread < CHUNK * LINES && part < width) {  // a line of 128 bytes
      prefetch(next + (THERE + thread / LINES - row(0)) * stride + part - block() * 8);
    }
  }
  INLINE void hide(const unsigned char* mask, int left) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (row(i) < left && !mask[row(i)]) v[i] = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
  }
  INLINE void put(u32 tile) const {
#pragma unroll
    for (int i = 0; i < N; ++i) put16(tile + block() * PITCH + row(i) * 16, mapped<MAP>(v[i]));
  }
};

//@FEATURES

INLINE void produce(const Params& p, const Place& at, u32 shared, u32 full, u32 empty) {
  const int thread = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
  const int width = p.contracted, columns = p.columns - at.block * 64;
  Rows<KW, TEAM, X_MAP> xs;
  Rows<KW, TEAM, Y_MAP> ys;
  Rows<64, TEAM, Z_MAP> zs;
  Unprojected own(p, at, team);  // in place of xs and ys
  float psi[zs.N][R], scale[zs.N], d, end;
  const long long from = at.begin(team);
  if (READ) xs.start(p.x + at.b * p.xs[0] + at.h * p.xs[1] + from * p.xs[2], p.xs[2]);
  if (WRITE) ys.start(p.y + at.b * p.ys[0] + at.h * p.ys[1] + from * p.ys[2], p.ys[2]);
  if (WRITE) zs.start(p.z + at.b * p.zs[0] + at.h * p.zs[1] + at.block * 64 + from * p.zs[2], p.zs[2]);
  const float* basis = p.basis + at.b * p.basis_s[0] + at.h * p.basis_s[1] + (from + zs.row(0)) * R;
  const float* inverse = p.inverse + at.head * p.length + from + zs.row(0);
  const float* delta = p.delta + at.head * p.length + from + thread;
  const unsigned char* mask = p.mask + at.b * p.mask_s;

  auto announced = [&](int c) {
    return c + AHEAD - 1 < at.chunks && at.begin(c + AHEAD - 1) + CHUNK <= at.stop;
  };
  auto load = [&](int c) {  // one after the other
    const int begin = at.begin(c), left = at.stop - begin;
    constexpr int MOVE = (REVERSE ? -TEAMS : TEAMS) * CHUNK;
    if (READ && !PROJECT) {
      xs.load(p.xs[2], left, width);
      if (announced(c)) xs.announce(p.xs[2], width);
      if (MASKED == 2) xs.hide(mask + begin, left);
      xs.move(p.xs[2]);
    }
    if (DELTA == 1 ? READ : DELTA == 2 && WRITE) d = load4(delta, thread < min(CHUNK, left)), delta += MOVE;
    if (WRITE) {
      if (!PROJECT) ys.load(p.ys[2], left, width);
      zs.load(p.zs[2], left, columns);
      if (announced(c) && !PROJECT) ys.announce(p.ys[2], width);
      if (announced(c)) zs.announce(p.zs[2], columns);
      if (MASKED == 1) ys.hide(mask + begin, left), zs.hide(mask + begin, left);
      ys.move(p.ys[2]), zs.move(p.zs[2]);
#pragma unroll
      for (int i = 0; i < zs.N; ++i) {
        const bool inside = zs.row(i) < left;
        const bool counts = inside && (!PROJECT || MASKED != 1 || mask[begin + zs.row(i)]);  // φ of 0 is not 0
        load_psi(psi[i], basis + i * zs.STEP * R, DECAY || counts);  // l is known of rows beyond the last
        if (SCALED) scale[i] = load4(inverse + i * zs.STEP, inside);
      }
      if (DECAY) end = load4(basis + CHUNK - 1 - zs.row(0), true);
      basis += MOVE * R, inverse += MOVE;
    }
  };

  if (PROJECT) own.load(at, team, announced(team));
  if (team < at.chunks) load(team);
  if (PROJECT) put_weights(p, at, shared + WEIGHTS_AT);
  for (int c = team; c < at.chunks; c += TEAMS) {
    const int stage = c % STAGES, use = c / STAGES;
    const u32 x_tile = shared + stage * STAGE_BYTES, y_tile = x_tile + X_BYTES;
    const u32 z_tile = y_tile + Y_BYTES;
    if (PROJECT) {
      const Projected features(own.v, shared + WEIGHTS_AT + (own.asks ? 0 : READ * WEIGHTS_BYTES));
      const u32 tile = own.asks ? x_tile : y_tile;
      if (use) wait(empty + stage * 8, (use - 1) & 1);
      features.put<0>(tile);
      own.load(at, c + TEAMS, announced(c + TEAMS));  // now that half of the registers are free
      features.put<1>(tile);
    } else {
      if (use) wait(empty + stage * 8, (use - 1) & 1);
      if (READ) xs.put(x_tile);
      if (WRITE) ys.put(y_tile);
    }
    if (AUGMENTED && thread < CHUNK) {
      const uint4 ones = make_uint4(pack(1.f, 1.f), 0, 0, 0);
      const u32 both = pack(d, d - rounded(d)), beside = (XB - 2) * PITCH + thread * 16;
      const uint4 deltas = make_uint4(both, DELTA == 1 ? both & 0xFFFFu : 0, 0, 0);
      if (READ) put16(x_tile + beside, DELTA == 1 ? deltas : ones);
      if (WRITE) put16(y_tile + beside, DELTA == 2 ? deltas : ones);
    }
    if (WRITE) {
#pragma unroll
      for (int i = 0; i < zs.N; ++i) {
        const uint4 w = mapped<Z_MAP>(zs.v[i]);
        const u32 place = z_tile + zs.block() * PITCH + zs.row(i) * 16;
        if (DECAY) {
          if (READ) put16(place, w);
          put16(place + (COPIES - 1) * 8 * PITCH, times(w, from_writer(psi[i][0], end)));
          if (zs.block() == 0) put4(x_tile + SINCE_AT + zs.row(i) * 4, psi[i][0]);
        } else if (PROJECT) {
          put16(place, w);
        } else {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const float f = SCALED ? psi[i][r] * scale[i] : psi[i][r];
            put16(place + r * 8 * PITCH, times(w, f));
          }
        }
        if (ONES && zs.block() == 0) {
          const float a = psi[i][0], b = psi[i][R - 1];
          const u32 hi = pack(a, PROJECT ? 0.f : R == 1 ? a - rounded(a) : b);  // 1 has no rest
          const u32 lo = R == 1 ? 0 : pack(a - rounded(a), b - rounded(b));
          put16(z_tile + R * 8 * PITCH + zs.row(i) * 16, make_uint4(hi, lo, 0, 0));
        }
      }
    }
    to_tensor_cores();
    arrive(full + stage * 8);
    if (c + TEAMS < at.chunks) load(c + TEAMS);
  }
}

// ---- The state: sums over the chunks so far, for the output warpgroup to read ----

struct State {
  static constexpr int TILES = WRITE ? STATE_M / KEEPERS : 1;  // of 64 rows, in the hands of one warpgroup
  static constexpr bool EXTRA = TURNED ? AUGMENTED : ONES;
  static constexpr int BLOCKS = STATE_N / 8 - EXTRA;
  float f[TILES][STATE_F];  // a thread's share, as wgmma deals it out
  u32 pairs[TILES][LATE ? BLOCKS * 2 : 1], extra[TILES][2];  // the same as 16-bit operand
  const int tile, row, lane;

  INLINE State(int mine)
      : tile(mine), row(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), lane(threadIdx.x % 4) {}

  // Where element (a, n + rest) of a tile [64, STATE_N] stands in the state [R, D, V (+1)]; -1: nowhere.
  INLINE int place(const Params& p, const Place& at, int m, int a, int n, int rest) const {
    const int from = at.block * 64;
    int r, d, v;
    bool known;
    if (TURNED) {
      r = tile + m, d = from + a, v = n < KW ? n + rest : p.contracted;
      known = d < p.columns && (n < KW ? v < p.contracted : AUGMENTED && rest == 0);
    } else {
      const bool sums = n >= R * 64;
      r = sums ? rest : n / 64, d = (tile + m) * 64 + a, v = sums ? p.columns : from + n % 64 + rest;
      known = d < p.contracted && r < R && (sums || v < p.columns);
    }
    return known ? (r * (TURNED ? p.columns : p.contracted) + d) * p.pitch + v : -1;
  }
  INLINE void load(const Params& p, const Place& at) {
    const float* from = p.first ? p.first + at.head * p.first_h + at.segment * p.first_s : nullptr;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < STATE_F; ++i) {
        const int here = place(p, at, m, row + (i & 2) * 4, i / 4 * 8, lane * 2 + (i & 1));
        f[m][i] = load4(from + here, from && here >= 0);
      }
    hold_all();
  }
  // Through shared memory, 16 rows a warp: as the accumulators lie, they would be written piecemeal.
  INLINE void save(const Params& p, const Place& at, float* to, float* room) {
    const int line = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
    join();
    room += (tile * 4 + threadIdx.x % 128 / 32) * 16 * STATE_N;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < STATE_F; i += 2)
        *(float2*)(room + (line / 4 + (i & 2) * 4) * STATE_N + i / 4 * 8 + lane * 2) = make_float2(f[m][i], f[m][i + 1]);
      __syncwarp();
      for (int a = 0; a < 16; ++a)
#pragma unroll
        for (int n = 0; n < STATE_N; n += 32) {
          const int here = place(p, at, m, first + a, n + line / 8 * 8, line % 8);
          const bool twice = !TURNED && n >= R * 64 && at.block;  // every block has these sums
          if (n + line < STATE_N && here >= 0 && !twice) to[here] = room[a * STATE_N + n + line];
        }
    }
  }
  INLINE void multiply(float by) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int i = 0; i < STATE_F; ++i) f[m][i] *= by;
    hold_all();
  }
  INLINE void hold_all() {
#pragma unroll
    for (int m = 0; m < TILES; ++m) hold(f[m]);
  }

  // The two columns of a number become one.
  INLINE void join() {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        float* e = f[m] + STATE_F - 4 + half;
        if (TURNED ? DELTA == 2 : ONES && R == 1) e[0] += e[1], e[1] = 0.f;
        if (!TURNED && ONES && R == 2) {
          const float a = __shfl_xor_sync(~0u, e[0], 1), b = __shfl_xor_sync(~0u, e[1], 1);
          e[0] = lane == 0 ? e[0] + a : 0.f, e[1] = lane == 0 ? e[1] + b : 0.f;
        }
      }
  }
  INLINE void round() {
    join();
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
      for (int i = 0; i < (LATE ? BLOCKS * 2 : 0); ++i) pairs[m][i] = pack(f[m][2 * i], f[m][2 * i + 1]);
      if (EXTRA)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* e = f[m] + STATE_F - 4 + half * 2;
          const float c = __shfl_sync(~0u, e[0], threadIdx.x & 28), d = __shfl_sync(~0u, e[1], threadIdx.x & 28);
          const float rest = c - rounded(c);
          u32 pair;
          if (TURNED && DELTA == 1) pair = lane == 0 ? pack(c, c) : lane == 1 ? pack(rest, 0.f) : 0;
          else if (TURNED || R == 1) pair = lane == 0 ? pack(c, rest) : 0;
          else pair = lane == 0 ? pack(c, d) : lane == 1 ? pack(rest, d - rounded(d)) : 0;
          extra[m][half] = pair;
        }
    }
  }
  INLINE void put(u32 at) const {
    const int line = threadIdx.x % 32;
    at += (tile * 64 + threadIdx.x % 128 / 32 * 16 + line % 16) * 16;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const u32 rows = at + m * 1024;
#pragma unroll
      for (int n = 0; n < BLOCKS; n += 2) {
        u32 e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          e[i] = LATE ? pairs[m][LATE ? n * 2 + i : 0] : pack(f[m][n * 4 + i * 2], f[m][n * 4 + i * 2 + 1]);
        put_blocks(rows + (n + line / 16) * STATE_PITCH, e[0], e[1], e[2], e[3]);
      }
      if (EXTRA) put_blocks(rows + BLOCKS * STATE_PITCH, extra[m][0], extra[m][1]);
    }
  }
};

// Where nothing is added, one state serves all chunks.
INLINE void fetch_state(const Params& p, const Place& at, int half, u32 shared, u32 state_full) {
  Place there = at;
  if (PAIRED) there.block = half;
  for (int m = 0; m < STATE_M; ++m) {
    State state(m);
    state.load(p, there);
    state.round();
    state.put(shared + STATE_AT + half * STATE_BYTES);
  }
  to_tensor_cores();
  arrive(state_full + half * 8);
}

INLINE void keep_state(const Params& p, const Place& at, int mine, u32 shared, u32 full, u32 empty,
                       u32 state_full, u32 state_empty) {
  if (!WRITE) {  // givers with a half each fetch it themselves, at the same time
    if (!PAIRED) fetch_state(p, at, 0, shared, state_full);
    return;
  }
  State state(mine);
  state.load(p, at);
  auto publish = [&](int c) {
    const int buffer = c & 1, use = c / 2;
    if (use) wait(state_empty + buffer * 8, (use - 1) & 1);
    if (!LATE) state.round();
    state.put(shared + STATE_AT + buffer * STATE_BYTES);
    to_tensor_cores();
    arrive(state_full + buffer * 8);
  };
  if (READ && LATE) state.round();
  if (READ && !LATE) publish(0);
  for (int c = 0; c < at.chunks; ++c) {
    const int stage = c % STAGES;
    const u32 y_tile = shared + stage * STAGE_BYTES + X_BYTES, z_tile = y_tile + Y_BYTES + (COPIES - R) * 8 * PITCH;
    const Operand a((TURNED ? z_tile : y_tile) + mine * 8 * PITCH, 128), b(TURNED ? y_tile : z_tile, 128);
    wait(full + stage * 8, c / STAGES & 1);
    if (DECAY) state.multiply(exp_of(whole(shared + stage * STAGE_BYTES + SINCE_AT)));
    mma_fence();
#pragma unroll
    for (int m = 0; m < state.TILES; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma<STATE_N>::from_shared<1, 1>(state.f[m], a.at(m * 8 * PITCH + k * 256, PITCH), b.at(k * 256, PITCH), 1);
    mma_commit();
    if (READ && LATE) publish(c);  // what stood there before
    mma_wait<0>();
    state.hold_all();
    if (DECAY) __syncwarp();  // one speaks for all that have read l
    if (threadIdx.x % 32 == 0) arrive(empty + stage * 8);
    if (READ && c + 1 < at.chunks) {
      if (LATE) state.round();
      else publish(c + 1);
    }
  }
  if (!p.last) return;
  for (int s = 0; s < min(STAGES, at.chunks); ++s)  // nobody needs the tiles any more
    wait(empty + s * 8, (at.chunks - 1 - s) / STAGES & 1);
  float* room = (float*)__cvta_shared_to_generic(shared);
  state.save(p, at, p.last + at.head * p.last_h + at.segment * p.last_s, room);
}

// ---- The output ----

INLINE void give_out(const Params& p, const Place& at, int mine, u32 shared, u32 full, u32 empty,
                     u32 state_full, u32 state_empty) {
  const int thread = threadIdx.x % 128, lane = thread % 4;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and row + 8
  const int block = PAIRED ? mine : at.block;
  bf16* out = p.out + at.b * p.outs[0] + at.h * p.outs[1] + block * 64;
  const bf16* gate = p.gate + at.b * p.gs[0] + at.h * p.gs[1] + block * 64;
  const float* basis = p.basis + at.b * p.basis_s[0] + at.h * p.basis_s[1];
  float* total = p.total + at.head * p.length * (DOTS ? p.blocks : 1);
  const float* inverse = p.inverse + at.head * p.length;
  const unsigned char* mask = p.mask + at.b * p.mask_s;
  const int columns = p.columns - block * 64;
  const u32 stand = shared + OUT_AT + mine * 8 * PITCH;
  // A warp stores the 16 rows that it computed, 16 bytes a lane.
  const int line = thread % 32, piece = line % 8 * 8, top = thread / 32 * 16 + line / 8;
  // Of 16 rows of a warp and 16 columns that meet: pairs on the diagonal, as a mask.
  const int down = thread % 32 / 4 - lane * 2, warp = __shfl_sync(~0u, thread / 32, 0);
  const u32 diagonal = REVERSE ? (down <= 0 ? 0xFFFFu : 0u) | (down <= 1 ? 0xFFFF0000u : 0u)
                               : (down >= 0 ? 0xFFFFu : 0u) | (down >= 1 ? 0xFFFF0000u : 0u);
  if (PAIRED) fetch_state(p, at, mine, shared, state_full);
  const int begins = PAIRED ? 0 : mine, step = PAIRED ? 1 : GIVERS;
  for (int c = begins; c < at.chunks; c += step) {
    const int stage = c % STAGES, begin = at.begin(c), buffer = WRITE ? c & 1 : PAIRED ? mine : 0;
    const u32 x_tile = shared + stage * STAGE_BYTES, y_tile = x_tile + X_BYTES;
    const Operand x(x_tile, PITCH), y(y_tile, PITCH), z(y_tile + Y_BYTES, 128);
    const Operand state(shared + STATE_AT + buffer * STATE_BYTES, TURNED ? STATE_PITCH : 128);
    if (GATE && GIVERS == 1 && c + 1 < at.chunks && thread < CHUNK) {
      const int next = at.begin(c + 1) + thread;
      if (next < at.stop) prefetch(gate + next * p.gs[2]);
    }
    float f[2][R], scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = begin + row + half * 8;
      if (!DECAY) load_psi(f[half], basis + (long long)i * R, i < at.stop);
      if (!APART && DELTA == 1) scale[half] = load4(inverse + i, i < at.stop);
    }

    float sums[OUT_F], totals[4], more[32];  // under a decay, more is what the state gives
    u32 weights[16];  // of pairs within the chunk
    wait(full + stage * 8, c / STAGES & 1);
    if (CAUSAL) {
      float scores[32];
      mma_fence();
#pragma unroll
      for (int k = 0; k < XB / 2; ++k)
        Mma<64>::from_shared<0, 0>(scores, x.at(k * 2 * PITCH, 128), y.at(k * 2 * PITCH, 128), k > 0);
      mma_commit();
      mma_wait<0>();
      hold(scores);
      if (DECAY) {
        const u32 since = x_tile + SINCE_AT;
        const float upper = get4(since + row * 4), lower = get4(since + row * 4 + 32), end = whole(since);
        f[0][0] = to_reader(upper, end), f[1][0] = to_reader(lower, end);
        weigh(scores, since, upper, lower, lane);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 16 columns: before the warp's own rows, among them, or after
        const u32 all = (REVERSE ? k > warp : k < warp) ? ~0u : 0u, own = k == warp ? diagonal : all;
        const u32 sure = k == warp ? ~0u : all;
        const float* e = scores + k * 8;
        weights[k * 4] = pack(e[0], e[1]) & own;
        weights[k * 4 + 1] = pack(e[2], e[3]) & (REVERSE ? all : sure);
        weights[k * 4 + 2] = pack(e[4], e[5]) & (REVERSE ? sure : all);
        weights[k * 4 + 3] = pack(e[6], e[7]) & own;
      }
      mma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma<OUT_N>::from_registers<1>(sums, weights + 4 * k, z.at(k * 256, PITCH), k > 0);
      if (ONES)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          Mma<8>::from_registers<1>(totals, weights + 4 * k, z.at(OUT_N / 8 * PITCH + k * 256, PITCH), k > 0);
    }
    if (WRITE || c == begins) wait(state_full + buffer * 8, WRITE ? c / 2 & 1 : 0);
    mma_fence();
#pragma unroll
    for (int k = 0; k < XB / 2; ++k) {
      const u64 a = x.at(k * 2 * PITCH, 128);
      const int add = CAUSAL || k > 0;
      if (DECAY && TURNED) Mma<64>::from_shared<0, 0>(more, a, state.at(k * 2 * STATE_PITCH, 128), k > 0);
      else if (DECAY) Mma<64>::from_shared<0, 1>(more, a, state.at(k * 256, STATE_PITCH), k > 0);
      else if (TURNED) Mma<OUT_N>::from_shared<0, 0>(sums, a, state.at(k * 2 * STATE_PITCH, 128), add);
      else Mma<OUT_N>::from_shared<0, 1>(sums, a, state.at(k * 256, STATE_PITCH), add);
      if (ONES) Mma<8>::from_shared<0, 1>(totals, a, state.at(OUT_N / 8 * STATE_PITCH + k * 256, STATE_PITCH), add);
    }
    mma_commit();
    uint4 gates[GATED ? 4 : 1];
    if (GATED)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at_row = begin + top + i * 4;
        gates[GATED ? i : 0] = load16<false>(gate + at_row * p.gs[2] + piece, at_row < at.stop && piece < columns);
      }
    mma_wait<0>();
    hold(sums);
    if (ONES) hold(totals);
    if (DECAY) hold(more);
    if (DECAY) __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(empty + stage * 8);
      if (WRITE) arrive(state_empty + buffer * 8);
    }

    if (ONES || (!APART && DELTA == 1)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (ONES) {
          const float* e = totals + half * 2;
          float t = R == 1 ? (e[0] + e[1]) * f[half][0] : e[0] * f[half][0] + e[1] * f[half][R - 1];
          t += __shfl_xor_sync(~0u, t, 1);
          t += __shfl_xor_sync(~0u, t, 2);
          const int i = begin + row + half * 8;
          if (lane == 0 && i < at.stop && block == 0) total[i] = t;
          if (!APART) scale[half] = reciprocal(divisor(t, p.eps));
        }
#pragma unroll
        for (int r = 0; r < (APART ? 0 : R); ++r) f[half][r] *= scale[half];
      }
    }
    const u32 rows = stand + (thread / 32 * 16 + line % 16) * 16;
    __syncwarp();  // the last chunk has been taken from here
    float dots[2] = {0.f, 0.f};
    if (DOTS) {  // φ(gate) to where the output will stand
#pragma unroll
      for (int i = 0; i < 4; ++i)
        put16(stand + piece / 8 * PITCH + (top + i * 4) * 16, mapped<GATE>(gates[GATED ? i : 0]));
      __syncwarp();
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      u32 pair[4], beside[4];
      if (DOTS) get_blocks(rows + (n + line / 16) * PITCH, beside);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *s = sums + n * 4 + i * 2, *t = more + n * 4 + i * 2, *g = f[i & 1];
        float a = DECAY ? s[0] + t[0] * g[0] : s[0] * g[0], b = DECAY ? s[1] + t[1] * g[0] : s[1] * g[0];
        if (R > 1) a += s[32] * g[R - 1], b += s[33] * g[R - 1];
        if (DOTS) dots[i & 1] += a * low(beside[i]) + b * high(beside[i]);
        pair[i] = pack(a, b);
      }
      if (DOTS) __syncwarp();  // φ(gate) has been taken from here
      put_blocks(rows + (n + line / 16) * PITCH, pair[0], pair[1], pair[2], pair[3]);
    }
    if (DOTS)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float t = dots[half];
        t += __shfl_xor_sync(~0u, t, 1);
        t += __shfl_xor_sync(~0u, t, 2);
        const int i = begin + row + half * 8;
        const bool hidden = MASKED == 2 && i < at.stop && !mask[i];
        if (lane == 0 && i < at.stop) total[(long long)i * p.blocks + block] = hidden ? 0.f : t;
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at_row = begin + top + i * 4;
      uint4 v = get16(stand + piece / 8 * PITCH + (top + i * 4) * 16);
      if (at_row >= at.stop || piece >= columns) continue;
      if (GATE) {
        const uint4 g = gates[GATED ? i : 0];
        v = make_uint4(gated<GATE>(v.x, g.x), gated<GATE>(v.y, g.y), gated<GATE>(v.z, g.z), gated<GATE>(v.w, g.w));
      }
      if (MASKED == 2 && !mask[at_row]) v = make_uint4(0, 0, 0, 0);
      *(uint4*)(out + at_row * p.outs[2] + piece) = v;
    }
  }
}

extern "C" __global__ void __launch_bounds__(640, 1) sweep(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + BARRIERS_AT, empty = full + STAGES * 8;
  const u32 state_full = empty + STAGES * 8, state_empty = state_full + 16;
  if (AUGMENTED) {  // the last column block of x and y is never written again
    for (int i = threadIdx.x; i < STAGES * CHUNK; i += blockDim.x) {
      const u32 tile = shared + i / CHUNK * STAGE_BYTES + (XB - 1) * PITCH + i % CHUNK * 16;
      if (READ) put16(tile, make_uint4(0, 0, 0, 0));
      if (WRITE) put16(tile + X_BYTES, make_uint4(0, 0, 0, 0));
    }
    for (int i = threadIdx.x; READ && TURNED && i < STATES * R * 64; i += blockDim.x)  // and of the state
      put16(shared + STATE_AT + i / (R * 64) * STATE_BYTES + (XB - 1) * STATE_PITCH + i % (R * 64) * 16,
            make_uint4(0, 0, 0, 0));
    to_tensor_cores();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(full + i * 8, TEAM);
      init_barrier(empty + i * 8, 4 * (READ * (1 + PAIRED) + KEEPERS * WRITE));
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(state_full + i * 8, 128 * KEEPERS);
      init_barrier(state_empty + i * 8, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Place at(p);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler learns that a warp agrees
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

// 1/D and δ = −dout·out·dD/dtotal of every row: KW / 8 threads each.
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

// L since the chunk of each row began; rows that fill the last chunk have what the last row has.
extern "C" __global__ void since(const double* decay, float* l, int length, int padded) {
  const int t = blockIdx.y * 256 + threadIdx.x, start = t / CHUNK * CHUNK;
  if (t >= padded) return;
  decay += blockIdx.x * (long long)length;
  l[blockIdx.x * (long long)padded + t] = (float)(decay[min(t, length - 1)] - (start ? decay[start - 1] : 0.));
}

// What each segment starts with, in place of what each adds; `last` gets the sum of all.
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
