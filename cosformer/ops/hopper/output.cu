// The output of every row: the sum over pairs within its chunk, plus what the state before the chunk gives.
//
// Under a strong decay, what the state gives is multiplied by the reader's factors first, and pairs are added to that.

// Adds the pairs' weights times z to `sums`; `add` says whether these hold something yet. The last four sums are of
// weights, if ONES; they take a product of their own, since the compiler finds no registers for both in one.
template <int N> INLINE void add_pairs(float (&sums)[N], const u32* weights, const Operand& z, int add) {
  constexpr int OF_Z = N - 4 * ONES;
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    Mma<2 * OF_Z>::template from_registers<1>((float(&)[OF_Z])sums, weights + 4 * k, z.at(k * 256, PITCH), add || k > 0);
  if (ONES)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Mma<8>::from_registers<1>((float(&)[4])sums[OF_Z - !ONES], weights + 4 * k,
                                z.at(OF_Z / 4 * PITCH + k * 256, PITCH), add || k > 0);
}

INLINE void give_out(const Params& p, const Place& at, int mine, u32 shared, u32 full, u32 empty,
                     u32 state_full, u32 state_empty) {
  const int thread = threadIdx.x % 128, lane = thread % 4;
  const int row = thread / 32 * 16 + thread % 32 / 4;  // and row + 8
  const int block = PAIRED ? mine : at.block;
  bf16* out = p.out + at.b * p.outs[0] + at.h * p.outs[1] + block * 64;
  const bf16* gate = p.gate + at.b * p.gs[0] + (int)at.h / p.reader_share * p.gs[1] + block * 64;
  const float* basis = p.basis + at.b * p.basis_s[0] + at.h * p.basis_s[1];
  float* total = p.total + at.head * p.length * (DOTS ? p.blocks : 1);
  const float* inverse = p.inverse + at.head * p.length;
  const unsigned char* mask = p.mask + at.b * p.mask_s;
  const int columns = p.columns - block * 64;
  const u32 stand = shared + OUT_AT + mine * 8 * PITCH;
  // A warp stores the 16 rows that it computed, 16 bytes per lane.
  const int line = thread % 32, piece = line % 8 * 8, top = thread / 32 * 16 + line / 8;
  // Where 16 rows of a warp meet the same 16 rows as columns: a bit mask of the pairs that causality allows.
  const int down = thread % 32 / 4 - lane * 2 - (STRICT ? REVERSE ? -1 : 1 : 0);
  const int warp = __shfl_sync(~0u, thread / 32, 0);
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
      if (!DECAY) load_psi(f[half], basis + (long long)i * R, i < at.stop);  // under a decay it is in shared memory
      if (DELTA == 1) scale[half] = load4(inverse + i, i < at.stop);
    }

    // The last four sums are of weights, if ONES. Under a strong decay, `joined` is the sum over the state and the pairs.
    float sums[OUT_F], joined[32 + 4 * ONES];
    u32 weights[16];  // of pairs within the chunk
    const u32 fades = x_tile + FADE_AT;
    auto read_state = [&](int add) {
      if (WRITE || c == begins) wait(state_full + buffer * 8, WRITE ? c / 2 & 1 : 0);
      mma_fence();
#pragma unroll
      for (int k = 0; k < XB / 2; ++k) {
        const u64 a = x.at(k * 2 * PITCH, 128);
        if (TURNED) Mma<OUT_N>::from_shared<0, 0>(sums, a, state.at(k * 2 * STATE_PITCH, 128), add || k > 0);
        else Mma<OUT_N>::from_shared<0, 1>(sums, a, state.at(k * 256, STATE_PITCH), add || k > 0);
      }
      mma_commit();
    };
    auto weigh_pairs = [&] {
      float scores[32];
      mma_fence();
#pragma unroll
      for (int k = 0; k < XB / 2; ++k)
        Mma<64>::from_shared<0, 0>(scores, x.at(k * 2 * PITCH, 128), y.at(k * 2 * PITCH, 128), k > 0);
      mma_commit();
      mma_wait<0>();
      hold(scores);
      if (STRONG) weigh(scores, fades, row, lane, warp);
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 16 columns that lie before the warp's own rows, among them, or after them
        const u32 all = (REVERSE ? k > warp : k < warp) ? ~0u : 0u, own = k == warp ? diagonal : all;
        const u32 sure = k == warp ? ~0u : all;
        const float* e = scores + k * 8;
        weights[k * 4] = pack(e[0], e[1]) & own;
        weights[k * 4 + 1] = pack(e[2], e[3]) & (REVERSE ? all : sure);
        weights[k * 4 + 2] = pack(e[4], e[5]) & (REVERSE ? sure : all);
        weights[k * 4 + 3] = pack(e[6], e[7]) & own;
      }
    };

    wait(full + stage * 8, c / STAGES & 1);
    if (DECAY) {
      const float end = whole(fades);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Fade reader(fades, row + half * 8);
        const float by = to_reader(reader.l, end);
#pragma unroll
        for (int r = 0; r < R; ++r) f[half][r] = R == 1 ? by : by * reader.psi[r];
      }
    }
    if (STRONG) {
      read_state(0);
      mma_wait<0>();
      hold(sums);
      if (threadIdx.x % 32 == 0) arrive(state_empty + buffer * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = f[half][0], b = f[half][R - 1];
#pragma unroll
        for (int i = half * 2; i < 32; i += 4)
#pragma unroll
          for (int j = i; j < i + 2; ++j) joined[j] = R == 1 ? sums[j] * a : sums[j] * a + sums[j + R * 32 - 32] * b;
        if (ONES) {
          const float* e = sums + OUT_F - 4 + half * 2;
          joined[32 + half * 2 * ONES] = R == 1 ? (e[0] + e[1]) * a : e[0] * a + e[1] * b;
          joined[33 * ONES + half * 2 * ONES] = 0.f;
        }
      }
      weigh_pairs();
      add_pairs(joined, weights, z, 1);
      mma_commit();
    } else {
      if (CAUSAL) weigh_pairs(), add_pairs(sums, weights, z, 0);
      read_state(CAUSAL);
    }
    uint4 gates[GATED ? 4 : 1], earlier[ADD ? 4 : 1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at_row = begin + top + i * 4;
      const bool inside = at_row < at.stop && piece < columns;
      if (GATED) gates[GATED ? i : 0] = load16<false>(gate + at_row * p.gs[2] + piece, inside);
      if (ADD) earlier[ADD ? i : 0] = load16<false>(out + at_row * p.outs[2] + piece, inside);
    }
    mma_wait<0>();
    if (STRONG) hold(joined);
    else hold(sums);
    give_back(empty + stage * 8);
    if (!STRONG && WRITE && threadIdx.x % 32 == 0) arrive(state_empty + buffer * 8);

    float mine[2][R], before[2] = {1.f, 1.f};  // factors of the sums, and of what was stored earlier
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float factor = RULE == 0 ? p.scale : DELTA == 1 ? scale[half] : 1.f;
      if (ONES) {
        const float* e = (STRONG ? joined + 32 * ONES : sums + OUT_F - 4) + half * 2;
        float t = STRONG ? e[0] + e[1]
                : R == 1 ? (e[0] + e[1]) * f[half][0] : e[0] * f[half][0] + e[1] * f[half][R - 1];
        t += __shfl_xor_sync(~0u, t, 1);
        t += __shfl_xor_sync(~0u, t, 2);
        const int i = begin + row + half * 8;
        const float first = ADD ? load4(inverse + i, i < at.stop) : 0.f;
        t += first;
        if (lane == 0 && i < at.stop && block == 0) total[i] = t;
        factor = reciprocal(divisor(t, p.eps));
        if (ADD) before[half] = divisor(first, p.eps) * factor;
      }
#pragma unroll
      for (int r = 0; r < R; ++r) mine[half][r] = STRONG ? factor : f[half][r] * factor;
    }
    const u32 rows = stand + (thread / 32 * 16 + line % 16) * 16;
    __syncwarp();  // the previous chunk's output has left this memory
    float dots[2] = {0.f, 0.f};
    if (DOTS) {  // φ(gate) goes where the output will be stored
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
        const float *s = (STRONG ? joined : sums) + n * 4 + i * 2, *g = mine[i & 1];
        float a = s[0] * g[0], b = s[1] * g[0];
        if (R > 1 && !STRONG) a += s[32] * g[R - 1], b += s[33] * g[R - 1];
        if (DOTS) dots[i & 1] += a * low(beside[i]) + b * high(beside[i]);
        pair[i] = pack(a, b);
      }
      if (DOTS) __syncwarp();  // all lanes have read φ(gate) from this memory
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
      if (ADD && ONES) {  // the lane that has the factor of this row
        const float factor = __shfl_sync(~0u, before[i / 2], (line / 8 + i % 2 * 4) * 4);
        earlier[ADD ? i : 0] = times(earlier[ADD ? i : 0], factor);
      }
      if (at_row >= at.stop || piece >= columns) continue;
      if (GATE) {
        const uint4 g = gates[GATED ? i : 0];
        v = make_uint4(gated<GATE>(v.x, g.x), gated<GATE>(v.y, g.y), gated<GATE>(v.z, g.z), gated<GATE>(v.w, g.w));
      }
      if (ADD) v = plus(v, earlier[ADD ? i : 0]);
      if (MASKED == 2 && !mask[at_row]) v = make_uint4(0, 0, 0, 0);
      *(uint4*)(out + at_row * p.outs[2] + piece) = v;
    }
  }
}
