// The producer: loads rows of x, y and z, applies φ, multiplies z by the basis functions and stores tiles in shared
// memory.

// The part of a tile [64, W] that one of THREADS threads loads, in pieces of 16 bytes. Rows and columns that do not
// exist, or that are masked, get the value that φ maps to 0.
template <int W, int THREADS, int MAP> struct Rows {
  static constexpr u32 NOTHING = MAP == 2 ? 0xFF80FF80u : 0u;  // −∞
  static constexpr int BLOCKS = W / 8, STEP = THREADS / BLOCKS, N = CHUNK / STEP;
  uint4 v[N];
  const bf16* next;
  INLINE static int row(int i) { return (threadIdx.x % THREADS) / BLOCKS + i * STEP; }
  INLINE static int block() { return threadIdx.x % BLOCKS; }

  INLINE void start(const bf16* p, long long stride) { next = p + row(0) * stride + block() * 8; }
  INLINE void move(long long stride) { next += (REVERSE ? -TEAMS : TEAMS) * CHUNK * stride; }
  // Only `left` rows and `width` columns exist.
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
  // Prefetches rows of a later chunk into the L2 cache.
  INLINE void announce(long long stride, int width) const {
    constexpr int LINES = W / 64, THERE = (REVERSE ? 1 - AHEAD : AHEAD - 1) * CHUNK;
    const int thread = threadIdx.x % THREADS, part = thread % LINES * 64;
    if (N <= 2) {  // a thread prefetches the rows that it will load itself
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (block() * 8 < width) prefetch(next + (THERE + i * STEP) * stride);
    } else if (thread < CHUNK * LINES && part < width) {  // one thread for each line of 128 bytes
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

INLINE void produce(const Params& p, const Place& at, u32 shared, u32 full, u32 empty) {
  const int thread = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
  const int width = p.contracted, columns = p.columns - at.block * 64;
  Rows<KW, TEAM, X_MAP> xs;
  Rows<KW, TEAM, Y_MAP> ys;
  Rows<64, TEAM, Z_MAP> zs;
  float psi[zs.N][R], scale[zs.N], l[zs.N], l_end, d;
  const long long from = at.begin(team);
  const long long reader = at.h / p.reader_share, writer = at.h / p.writer_share;
  if (READ) xs.start(p.x + at.b * p.xs[0] + reader * p.xs[1] + from * p.xs[2], p.xs[2]);
  if (WRITE) ys.start(p.y + at.b * p.ys[0] + writer * p.ys[1] + from * p.ys[2], p.ys[2]);
  if (WRITE) zs.start(p.z + at.b * p.zs[0] + writer * p.zs[1] + at.block * 64 + from * p.zs[2], p.zs[2]);
  const float* basis = p.basis + at.b * p.basis_s[0] + at.h * p.basis_s[1] + (from + zs.row(0)) * R;
  const float* inverse = p.inverse + at.head * p.length + from + zs.row(0);
  const float* delta = p.delta + at.head * p.length + from + thread;
  const double* decay = p.decay + at.b * p.decay_s[0] + at.h * p.decay_s[1];
  const unsigned char* mask = p.mask + at.b * p.mask_s;

  auto announced = [&](int c) {
    return c + AHEAD - 1 < at.chunks && at.begin(c + AHEAD - 1) + CHUNK <= at.stop;
  };
  auto load = [&](int c) {  // must be called for the chunks in their order: pointers move on
    const int begin = at.begin(c), left = at.stop - begin;
    constexpr int MOVE = (REVERSE ? -TEAMS : TEAMS) * CHUNK;
    if (READ) {
      xs.load(p.xs[2], left, width);
      if (announced(c)) xs.announce(p.xs[2], width);
      if (MASKED == 2) xs.hide(mask + begin, left);
      xs.move(p.xs[2]);
    }
    if (DELTA == 1 ? READ : DELTA == 2 && WRITE) d = load4(delta, thread < min(CHUNK, left)), delta += MOVE;
    if (WRITE) {
      ys.load(p.ys[2], left, width);
      zs.load(p.zs[2], left, columns);
      if (announced(c)) ys.announce(p.ys[2], width);
      if (announced(c)) zs.announce(p.zs[2], columns);
      if (MASKED == 1) ys.hide(mask + begin, left), zs.hide(mask + begin, left);
      ys.move(p.ys[2]), zs.move(p.zs[2]);
#pragma unroll
      for (int i = 0; i < zs.N; ++i) {
        const bool inside = zs.row(i) < left;
        if (!DECAY || R == 2) load_psi(psi[i], basis + i * zs.STEP * R, inside);
        if (SCALED) scale[i] = load4(inverse + i * zs.STEP, inside);
      }
      if (DECAY) {  // a packed sequence has no state before it, and L counts from its own start
        const double before = PACKED && begin == at.start ? decay[begin] : begin ? decay[begin - 1] : 0.;
        auto since = [&](int row) {  // rows that pad a chunk are as its last one
          return (float)(decay[begin + min(row, left - 1)] - before) * LOG_E;
        };
#pragma unroll
        for (int i = 0; i < zs.N; ++i) l[i] = since(zs.row(i));
        l_end = since(CHUNK - 1);
      }
      basis += MOVE * R, inverse += MOVE;
    }
  };

  if (team < at.chunks) load(team);
  for (int c = team; c < at.chunks; c += TEAMS) {
    const int stage = c % STAGES, use = c / STAGES;
    const u32 x_tile = shared + stage * STAGE_BYTES, y_tile = x_tile + X_BYTES;
    const u32 z_tile = y_tile + Y_BYTES;
    if (use) wait(empty + stage * 8, (use - 1) & 1);
    if (READ) xs.put(x_tile);
    if (WRITE) ys.put(y_tile);
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
        const u32 place = z_tile + zs.block() * PITCH + zs.row(i) * 16, fade = x_tile + FADE_AT + zs.row(i) * FADE_BYTES;
        const float fades = DECAY ? from_writer(l[i], l_end) : 1.f;
        if (DECAY && READ) {
          put16(place, SCALED ? times(w, scale[i]) : w);
          if (ONES && zs.block() == 0) put16(z_tile + OWN_ONES_AT * PITCH + zs.row(i) * 16, make_uint4(pack(1.f, 0.f), 0, 0, 0));
        }
        if (DECAY && zs.block() == 0) {
          if (R == 1) put4(fade, l[i]);
          else put16(fade, make_uint4(bits(l[i]), bits(psi[i][0]), bits(psi[i][R - 1]), 0));
        }
        float f[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          f[r] = DECAY && R == 1 ? fades : psi[i][r] * fades;
          put16(place + (COPIES - R + r) * 8 * PITCH, times(w, SCALED ? f[r] * scale[i] : f[r]));
        }
        if (ONES && zs.block() == 0) {
          const float a = f[0], b = f[R - 1];
          const u32 hi = pack(a, R == 1 ? a - rounded(a) : b);
          const u32 lo = R == 1 ? 0 : pack(a - rounded(a), b - rounded(b));
          put16(z_tile + ONES_AT * PITCH + zs.row(i) * 16, make_uint4(hi, lo, 0, 0));
        }
      }
    }
    to_tensor_cores();
    arrive(full + stage * 8);
    if (c + TEAMS < at.chunks) load(c + TEAMS);
  }
}
