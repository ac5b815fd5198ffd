// What `instructions.cu` offers, for `emulator.h`.

inline u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - memory); }
inline void init_barrier(u32 barrier, u32 count) { emulated::machine.barriers[barrier] = {(int)count, (int)count, 0}; }
inline void barriers_are_ready() {}
inline void arrive(u32 barrier) {
  auto& it = emulated::machine.barriers.at(barrier);
  if (--it.missing == 0) it.missing = it.count, it.phase ^= 1, emulated::machine.turns = 0;
  if (emulated::machine.chance() & 1) emulated::yield();  // others may be quicker with what they were told
}
inline void wait(u32 barrier, u32 parity) {
  auto& it = emulated::machine.barriers.at(barrier);
  emulated::until([&] { return it.phase != (int)parity; });
}
inline void to_tensor_cores() {
  for (const auto& [at, bytes] : emulated::self().writes) memcpy(&emulated::machine.seen[at], memory + at, bytes);
  emulated::self().writes.clear();
}
inline void mma_fence() {}
inline void mma_commit() { emulated::self().groups.emplace_back(); }
template <int N> inline void mma_wait() { emulated::wait_for_products(N); }
template <int N> inline void registers() {}
template <int N> inline void hold(float (&)[N]) {}

struct Operand {
  u32 low;
  Operand(u32 address, int along_k) : low((address & 0x3FFFF) >> 4 | along_k >> 4 << 16) {}
  u64 at(int bytes, int along_mn) const { return (u64)(along_mn >> 4) << 32 | (low + (bytes >> 4)); }
};
template <int N> struct Mma {
  template <int TA, int TB> static void from_shared(float (&d)[N / 2], u64 a, u64 b, int add) {
    emulated::self().groups.back().push_back({N, TA, TB, add != 0, false, a, b, {}, d});
  }
  template <int TB> static void from_registers(float (&d)[N / 2], const u32* a, u64 b, int add) {
    emulated::self().groups.back().push_back({N, 0, TB, add != 0, true, 0, b, {a[0], a[1], a[2], a[3]}, d});
  }
};

inline u32 bf16_of(float a) {
  const u32 all = __float_as_uint(a);
  if (a != a) return 0x7FFF;
  return (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
inline u32 pack(float a, float b) { return bf16_of(a) | bf16_of(b) << 16; }
inline u32 relu(u32 pair) {
  auto one = [](u32 a) { return (a & 0x7FFF) > 0x7F80 ? 0x7FFF : a & 0x8000 ? 0 : a; };
  return one(pair & 0xFFFF) | one(pair >> 16) << 16;
}
inline float exp2_of(float a) { return std::exp2(a); }
inline float reciprocal(float a) { return 1.f / a; }
inline float from_half(bf16 bits) { _Float16 a; memcpy(&a, &bits, 2); return a; }
inline bf16 to_half(float a) { const _Float16 half = a; bf16 bits; memcpy(&bits, &half, 2); return bits; }

template <bool ALL> inline uint4 load16(const void* p, bool inside, u32 outside = 0) {
  if (!ALL && !inside) return make_uint4(outside, outside, outside, outside);
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline float load4(const float* p, bool inside) { return inside ? *p : 0.f; }
inline void load_psi(float (&psi)[R], const float* place, bool inside) {
  for (int r = 0; r < R; ++r) psi[r] = inside ? place[r] : 0.f;
}
inline void prefetch(const void*) {}
inline void put(u32 at, const void* from, u32 bytes) {
  memcpy(memory + at, from, bytes);
  emulated::self().writes.push_back({at, bytes});
}
inline void put16(u32 at, uint4 v) { put(at, &v, 16); }
inline void put4(u32 at, float v) { put(at, &v, 4); }
inline uint4 get16(u32 at) { uint4 v; memcpy(&v, memory + at, 16); return v; }
inline float get4(u32 at) { float v; memcpy(&v, memory + at, 4); return v; }
// Lane l gives the address of row l % 8 of block l / 8, and holds numbers l % 4 * 2 and the next of row l / 4 of each.
template <int N> inline void put_rows(u32 at, const u32 (&v)[N]) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < 4; ++i) {
      const u32 pair = emulated::exchange(v[n], lane % 8 * 4 + i);
      if (lane / 8 == n) put(at + i * 4, &pair, 4);
    }
}
inline void put_blocks(u32 at, u32 a, u32 b, u32 c, u32 d) { put_rows<4>(at, {a, b, c, d}); }
inline void put_blocks(u32 at, u32 a, u32 b) { put_rows<2>(at, {a, b}); }
inline void get_blocks(u32 at, u32 (&v)[4]) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < 4; ++n) memcpy(&v[n], memory + emulated::exchange(at, n * 8 + lane / 4) + lane % 4 * 4, 4);
}
inline void meet_cluster() { emulated::stop(); }  // blocks run one after the other
inline void get_from_block(const void*, int, double&, double&) { emulated::stop(); }
