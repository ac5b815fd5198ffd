// The state: sums over the chunks so far, kept in registers, and copied to shared memory for the output.

struct State {
  static constexpr int TILES = WRITE ? STATE_M / KEEPERS : 1;  // tiles of 64 rows that one warpgroup keeps
  static constexpr bool EXTRA = TURNED ? AUGMENTED : ONES;
  static constexpr int BLOCKS = STATE_N / 8 - EXTRA;
  float f[TILES][STATE_F];  // a thread's part, distributed as wgmma leaves it
  u32 pairs[TILES][LATE ? BLOCKS * 2 : 1], extra[TILES][2];  // the same, rounded to bfloat16
  const int tile, row, lane;

  INLINE State(int mine)
      : tile(mine), row(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), lane(threadIdx.x % 4) {}

  // The index, in the state [R, D, V (+1)], of element (a, n + rest) of tile m [64, STATE_N]; -1 if it is padding.
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
  // Stores through shared memory, 16 rows per warp at a time, so that a warp writes neighbouring numbers.
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
          const bool twice = !TURNED && n >= R * 64 && at.block;  // all blocks have these sums: the first stores them
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

  // Adds the two columns of numbers that were written as a rounded value and its rounding error.
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

// For passes that only read: one state serves all chunks.
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
  if (!WRITE) {  // with PAIRED, both output warpgroups fetch their half themselves
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
    const u32 y_tile = shared + stage * STAGE_BYTES + X_BYTES, z_tile = y_tile + Y_BYTES + STATE_Z * PITCH;
    const Operand a((TURNED ? z_tile : y_tile) + mine * 8 * PITCH, 128), b(TURNED ? y_tile : z_tile, 128);
    wait(full + stage * 8, c / STAGES & 1);
    const float fades = DECAY ? exp2_of(whole(shared + stage * STAGE_BYTES + FADE_AT)) : 1.f;
    if (DECAY && STRONG) state.multiply(fades);
    mma_fence();
#pragma unroll
    for (int m = 0; m < state.TILES; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Mma<STATE_N>::from_shared<1, 1>(state.f[m], a.at(m * 8 * PITCH + k * 256, PITCH), b.at(k * 256, PITCH), 1);
    mma_commit();
    if (READ && LATE) publish(c);  // the state before this chunk
    mma_wait<0>();
    state.hold_all();
    give_back(empty + stage * 8);
    if (DECAY && !STRONG) state.multiply(fades);
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
