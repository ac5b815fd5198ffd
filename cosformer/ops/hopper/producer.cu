// The producer: loads rows of x, y and z, applies φ, multiplies z by the basis functions and stores tiles in shared
// memory. All else waits for it, so its loop is kept short: chunks that are whole take a path without questions.

// The part of a tile [64, W] that one of TEAM threads loads, in pieces of 16 bytes. Rows and columns that do not
// exist, or that are masked, get the value that φ maps to 0.
template <int W, int MAP> struct Rows {
  static constexpr u32 NOTHING = MAP == 2 ? 0xFF80FF80u : 0u;  // −∞
  static constexpr int BLOCKS = W / 8, STEP = TEAM / BLOCKS, N = CHUNK / STEP;
  uint4 v[N];
  const bf16* next;
  INLINE static int row(int i) { return (threadIdx.x % TEAM) / BLOCKS + i * STEP; }
  INLINE static int block() { return threadIdx.x % BLOCKS; }

  INLINE void start(const bf16* p, long long stride) { next = p + row(0) * stride + block() * 8; }
  // With ALL the chunk is whole; otherwise only `left` rows and `width` columns exist.
  template <bool ALL> INLINE void load(long long stride, int left, int width) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      v[i] = load16<ALL>(next + i * STEP * stride, row(i) < left && block() * 8 < width, NOTHING);
    next += MOVE * stride;
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

struct Producer {
  Rows<KW, X_MAP> xs;
  Rows<KW, Y_MAP> ys;
  Rows<64, Z_MAP> zs;
  static constexpr int N = Rows<64, Z_MAP>::N;
  float psi[N][R], scale[N], d, l[N], l_end, rate;
  const float *basis, *inverse, *delta;
  const float* sums;  // l of gates
  const unsigned char* mask;
  const bf16* ahead;  // the row of a later chunk that this thread prefetches into the L2 cache
  long long ahead_stride;
  int ahead_width, thread;

  INLINE Producer(const Params& p, const Place& at, int team)
      : ahead(nullptr), ahead_stride(0), ahead_width(0), thread(threadIdx.x % TEAM) {  // 0: who prefetches nothing stays there
    const long long from = at.begin(team), reader = (int)at.h / p.reader_share, writer = (int)at.h / p.writer_share;
    const bf16* x = p.x + at.b * p.xs[0] + reader * p.xs[1] + from * p.xs[2];
    const bf16* y = p.y + at.b * p.ys[0] + writer * p.ys[1] + from * p.ys[2];
    const bf16* z = p.z + at.b * p.zs[0] + writer * p.zs[1] + from * p.zs[2] + at.block * 64;
    if (READ) xs.start(x, p.xs[2]);
    if (WRITE) ys.start(y, p.ys[2]), zs.start(z, p.zs[2]);
    // Threads 0 to 63 prefetch rows of x, the next 64 of y, and the next of z.
    const int which = thread / CHUNK + !READ;
    if (which < (WRITE ? 3 : 1)) {
      ahead = which == 0 ? x : which == 1 ? y : z;
      ahead_stride = which == 0 ? p.xs[2] : which == 1 ? p.ys[2] : p.zs[2];
      ahead_width = which == 2 ? 64 : p.contracted;
      ahead += (thread % CHUNK + (AHEAD - 1) * (REVERSE ? -CHUNK : CHUNK)) * ahead_stride;
    }
    basis = p.basis + at.b * p.basis_s[0] + at.h * p.basis_s[1] + (from + zs.row(0)) * R;
    inverse = p.inverse + at.head * p.length + from + zs.row(0);
    delta = p.delta + at.head * p.length + from + thread;
    if (DECAY == PER_HEAD) rate = even_rate(p, at);
    if (DECAY == PER_TOKEN) sums = gate_sums(p, at);
    if (DECAY == PER_TOKEN && which == 3 && thread % 32 == 0) {  // two of the last threads prefetch l
      ahead = (const bf16*)(sums + from + thread % CHUNK + (AHEAD - 1) * (REVERSE ? -CHUNK : CHUNK));
      ahead_stride = sizeof(float) / sizeof(bf16), ahead_width = 0;
    }
    mask = p.mask + at.b * p.mask_s;
  }

  // Must be called for the chunks in their order: pointers move on.
  template <bool ALL> INLINE void load(const Params& p, const Place& at, int c) {
    const int begin = at.begin(c), left = at.stop - begin;
    if (READ) {
      xs.load<ALL>(p.xs[2], left, p.contracted);
      if (MASKED == 2) xs.hide(mask + begin, left);
    }
    if (DELTA == 1 ? READ : DELTA == 2 && WRITE) d = load4(delta, thread < min(CHUNK, left)), delta += MOVE;
    if (WRITE) {
      ys.load<ALL>(p.ys[2], left, p.contracted);
      zs.load<ALL>(p.zs[2], left, p.columns - at.block * 64);
      if (MASKED == 1) ys.hide(mask + begin, left), zs.hide(mask + begin, left);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool inside = ALL || zs.row(i) < left;
        if (!DECAY || R == 2) load_psi(psi[i], basis + i * zs.STEP * R, inside);
        if (SCALED) scale[i] = load4(inverse + i * zs.STEP, inside);
      }
      basis += MOVE * R, inverse += MOVE;
    }
    if (ahead && c + AHEAD - 1 < at.chunks && at.begin(c + AHEAD - 1) + CHUNK <= at.stop) {
      prefetch(ahead);
      if (KW > 64 && ahead_width > 64) prefetch(ahead + 64);
    }
    ahead += MOVE * ahead_stride;
    if (DECAY) count<ALL>(p, at, begin, left);
  }

  // l of this thread's rows and of the chunk's last row; rows that pad a chunk are as its last one.
  template <bool ALL> INLINE void count(const Params& p, const Place& at, int begin, int left) {
    const int last = ALL ? CHUNK : min(CHUNK, left);
    if (DECAY == PER_HEAD) {
#pragma unroll
      for (int i = 0; i < N; ++i) l[i] = rate * (ALL ? zs.row(i) + 1 : min(zs.row(i) + 1, last));
      l_end = rate * last;
    } else {
      const float* here = sums + begin;
#pragma unroll
      for (int i = 0; i < N; ++i) l[i] = here[ALL ? zs.row(i) : min(zs.row(i), last - 1)];
      l_end = here[last - 1];
    }
  }

  INLINE void put(u32 x_tile) const {
    const u32 y_tile = x_tile + X_BYTES, z_tile = y_tile + Y_BYTES;
    if (READ) xs.put(x_tile);
    if (WRITE) ys.put(y_tile);
    if (AUGMENTED && thread < CHUNK) {
      const uint4 ones = make_uint4(pack(1.f, 1.f), 0, 0, 0);
      const u32 both = pack(d, d - rounded(d)), beside = (XB - 2) * PITCH + thread * 16;
      const uint4 deltas = make_uint4(both, DELTA == 1 ? both & 0xFFFFu : 0, 0, 0);
      if (READ) put16(x_tile + beside, DELTA == 1 ? deltas : ones);
      if (WRITE) put16(y_tile + beside, DELTA == 2 ? deltas : ones);
    }
    if (!WRITE) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint4 w = mapped<Z_MAP>(zs.v[i]);
      const u32 place = z_tile + zs.block() * PITCH + zs.row(i) * 16;
      if (OWN) put16(place, SCALED ? times(w, scale[i]) : w);
      const float fades = DECAY ? from_writer(l[i], l_end) : 1.f;
      float f[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        f[r] = DECAY && R == 1 ? fades : psi[i][r] * fades;
        put16(place + (STATE_Z + r * 8) * PITCH, times(w, SCALED ? f[r] * scale[i] : f[r]));
      }
      // Two of the threads of a row also store what belongs to the row as a whole.
      const u32 ones = z_tile + (STATE_Z + R * 8) * PITCH + zs.row(i) * 16;
      const u32 fade = x_tile + FADE_AT + zs.row(i) * FADE_BYTES;
      if (ONES && zs.block() == 0) {
        const float a = f[0], b = f[R - 1];
        const u32 hi = pack(a, R == 1 ? a - rounded(a) : b);
        put16(ones, make_uint4(hi, R == 1 ? 0 : pack(a - rounded(a), b - rounded(b)), 0, 0));
      }
      if (DECAY && zs.block() == 1) {
        if (R == 1) put4(fade, l[i]);
        else put16(fade, make_uint4(bits(l[i]), bits(psi[i][0]), bits(psi[i][R - 1]), 0));
      }
    }
  }
};

INLINE void produce(const Params& p, const Place& at, u32 shared, u32 full, u32 empty) {
  const int team = threadIdx.x / TEAM;
  const bool wide = p.contracted >= KW && (!WRITE || p.columns - at.block * 64 >= 64);
  Producer rows(p, at, team);
  auto load = [&](int c) {
    if (wide && at.begin(c) + CHUNK <= at.stop) rows.load<true>(p, at, c);
    else rows.load<false>(p, at, c);
  };
  if (team < at.chunks) load(team);
  for (int c = team; c < at.chunks; c += TEAMS) {
    const int stage = c % STAGES, use = c / STAGES;
    if (use) wait(empty + stage * 8, (use - 1) & 1);
    rows.put(shared + stage * STAGE_BYTES);
    to_tensor_cores();
    arrive(full + stage * 8);
    if (c + TEAMS < at.chunks) load(c + TEAMS);
  }
}
