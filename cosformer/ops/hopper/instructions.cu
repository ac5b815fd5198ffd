// Wrappers of Hopper's instructions: all assembler of these kernels but `wgmma`, which `source.py` writes.
// `tests/ops/emulated_instructions.h` has the same functions for a CPU.

#define INLINE __device__ __forceinline__

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

INLINE void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
INLINE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
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
template <int N> INLINE void hold(float (&f)[N]) {  // keeps the compiler from moving these values across this point
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(f[i])::"memory");
}

// The descriptor of an operand in shared memory that wgmma takes: its address, and the bytes between its 8 × 8
// blocks along the contracted dimension K and along the other one, M or N.
struct Operand {
  u32 low;
  INLINE Operand(u32 address, int along_k) : low((address & 0x3FFFF) >> 4 | along_k >> 4 << 16) {}
  INLINE u64 at(int bytes, int along_mn) const { return (u64)(along_mn >> 4) << 32 | (low + (bytes >> 4)); }
};

template <int N> struct Mma;  // sums [64, N] += a [64, 16] b [16, N]
//@MMA

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
INLINE float exp2_of(float a) {
  float b;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float reciprocal(float a) {
  float b;
  asm("rcp.approx.f32 %0, %1;" : "=f"(b) : "f"(a));
  return b;
}
INLINE float from_half(bf16 half) {  // 16 bits that hold a float16
  float a;
  asm("cvt.f32.f16 %0, %1;" : "=f"(a) : "h"(half));
  return a;
}
INLINE bf16 to_half(float a) {
  bf16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(a));
  return half;
}
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
  if (R == 2)
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
// Loads and stores of 8 × 8 blocks of bfloat16, distributed over a warp as wgmma distributes its sums. Every lane
// gives the address of one row of a block.
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
// Blocks of a cluster.
INLINE void meet_cluster() {  // what they wrote is seen
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
INLINE void get_from_block(const void* mine, int rank, double& a, double& b) {  // the same variable of another block
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f64 {%0, %1}, [%2];" : "=d"(a), "=d"(b) : "r"(there) : "memory");
}
