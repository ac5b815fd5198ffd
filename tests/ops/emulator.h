// A Hopper GPU's thread blocks on a CPU: what CUDA C++ and `instructions.cu` offer, for g++.
//
// Every thread of a block is a context of its own; blocks run one after the other, so that none can wait for another.
// Warps take turns in random order. A thread goes on until it waits, or, by chance, until it has told others something.
// Two things are as late as a GPU may have them: products by tensor cores are made when they are waited for, and tensor
// cores see what threads wrote to shared memory only after `to_tensor_cores`.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define INLINE inline
#define assert(right) ((right) ? (void)0 : emulated::stop())

struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Place3 { unsigned x = 0, y = 0, z = 0; };
__align__(1024) unsigned char memory[232448];  // the dynamic shared memory of a block

namespace emulated {

struct Product {
  int columns, trans_a, trans_b;
  bool add, from_registers;
  uint64_t a, b;
  uint32_t rows[4];
  float* sums;
};
constexpr size_t STACK = 1 << 16;  // bytes
struct Write { uint32_t at; uint32_t bytes; };
struct Thread {
  ucontext_t begin;
  jmp_buf here;  // where it goes on, once it has begun
  bool begun = false;
  std::unique_ptr<char[]> stack{new char[STACK]};
  Place3 place;
  bool done = false;
  std::vector<Write> writes;  // which tensor cores do not see yet
  std::vector<std::vector<Product>> groups{1};  // products that are not waited for; the last group is open
};
// Threads that wait for each other.
struct Meeting {
  int here = 0, left = 0;
  long long round = 0;
  uint64_t slots[32];
  int any = 0, found = 0;
};
struct Barrier { int count = 0, missing = 0, phase = 0; };

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Meeting> warps;
  std::vector<Meeting> groups;
  Meeting block;
  std::map<uint32_t, Barrier> barriers;
  std::vector<unsigned char> seen;  // shared memory as tensor cores see it
  jmp_buf scheduler;
  Thread* now = nullptr;
  std::function<void()> work;
  std::mt19937 chance{0};
  Place3 grid, size, at;
  bool stopped = false;
  long long turns = 0;  // since somebody made progress
};
static Machine machine;

inline Thread& self() { return *machine.now; }
inline void stop() { machine.stopped = true; }
inline void yield() {
  ++machine.turns;
  if (!_setjmp(self().here)) _longjmp(machine.scheduler, 1);
}
__attribute__((noinline)) inline void go_on(Thread& thread) {  // until it waits
  machine.now = &thread;
  if (_setjmp(machine.scheduler)) return;
  if (thread.begun) _longjmp(thread.here, 1);
  thread.begun = true;
  setcontext(&thread.begin);
}
template <class Holds> inline void until(Holds holds) {
  while (!holds()) yield();
  machine.turns = 0;
}
// Everybody of `count` arrives, one does `work`, and all go on.
template <class Work> inline void meet(Meeting& meeting, int count, Work work) {
  const long long round = meeting.round;
  if (++meeting.here == count) {
    work();
    meeting.here = 0, ++meeting.round;
    machine.turns = 0;
    return;
  }
  until([&] { return meeting.round != round; });
}
inline Meeting& warp() { return machine.warps[self().place.x / 32]; }
inline void start() {
  machine.work();
  self().done = true;
  _longjmp(machine.scheduler, 1);
}

inline float of_bf16(uint16_t a) {
  const uint32_t whole = (uint32_t)a << 16;
  float f;
  memcpy(&f, &whole, 4);
  return f;
}
// Element (mn, k) of an operand in shared memory, which consists of 8 × 8 blocks.
inline float element(uint64_t descriptor, int trans, int mn, int k) {
  const uint32_t at = (descriptor & 0x3FFF) << 4, along_k = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t along_mn = (descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t inside = trans ? k % 8 * 16 + mn % 8 * 2 : mn % 8 * 16 + k % 8 * 2;
  uint16_t bits;
  memcpy(&bits, &machine.seen[at + mn / 8 * along_mn + k / 8 * along_k + inside], 2);
  return of_bf16(bits);
}
// One product of a warpgroup: sums [64, N] += a [64, 16] b [16, N].
inline void multiply(int group, int which) {
  const Product& first = machine.threads[group * 128]->groups.front()[which];
  static float a[64][16], b[16][256];
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < first.columns; ++n) b[k][n] = element(first.b, first.trans_b, n, k);
    for (int m = 0; m < 64 && !first.from_registers; ++m) a[m][k] = element(first.a, first.trans_a, m, k);
  }
  for (int t = 0; t < 128; ++t) {
    const Product& mine = machine.threads[group * 128 + t]->groups.front()[which];
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    if (mine.columns != first.columns) stop();
    for (int i = 0; i < 4 && mine.from_registers; ++i)
      for (int half = 0; half < 2; ++half)
        a[row + i % 2 * 8][column + i / 2 * 8 + half] = of_bf16(mine.rows[i] >> 16 * half);
  }
  for (int t = 0; t < 128; ++t) {
    const Product& mine = machine.threads[group * 128 + t]->groups.front()[which];
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    for (int i = 0; i < mine.columns / 2; ++i) {
      float sum = mine.add ? mine.sums[i] : 0.f;
      const float* left = a[row + i / 2 % 2 * 8];
      for (int k = 0; k < 16; ++k) sum += left[k] * b[k][i / 4 * 8 + column + i % 2];
      mine.sums[i] = sum;
    }
  }
}
inline void wait_for_products(int left) {
  const int group = self().place.x / 128;
  meet(machine.groups[group], 128, [&] {
    auto& queue = machine.threads[group * 128]->groups;
    while ((int)queue.size() - 1 > left) {
      for (int n = 0; n < (int)queue.front().size(); ++n) multiply(group, n);
      for (int t = 0; t < 128; ++t) {
        auto& theirs = machine.threads[group * 128 + t]->groups;
        theirs.erase(theirs.begin());
      }
    }
  });
}
template <class Value> inline Value exchange(Value mine, int from) {
  Meeting& here = warp();
  memcpy(&here.slots[self().place.x % 32], &mine, sizeof mine);
  meet(here, 32, [] {});
  Value theirs;
  memcpy(&theirs, &here.slots[from & 31], sizeof theirs);
  meet(here, 32, [] {});
  return theirs;
}

// All threads of a block, until all have ended; false if one has stopped, or if they wait for each other for ever.
inline bool run_block(int threads) {
  auto& m = machine;
  m.warps.assign((threads + 31) / 32, {}), m.groups.assign((threads + 127) / 128, {}), m.block = {};
  m.barriers.clear();
  for (size_t i = 0; i < sizeof memory; ++i) memory[i] = 0xFF;  // nobody may read what nobody wrote
  m.seen.assign(memory, memory + sizeof memory);
  while ((int)m.threads.size() < threads) m.threads.push_back(std::make_unique<Thread>());
  for (int t = 0; t < threads; ++t) {
    Thread& thread = *m.threads[t];
    thread.place.x = t, thread.begun = thread.done = false, thread.writes.clear(), thread.groups.assign(1, {});
    getcontext(&thread.begin);
    thread.begin.uc_stack.ss_sp = thread.stack.get(), thread.begin.uc_stack.ss_size = STACK;
    thread.begin.uc_link = nullptr;
    makecontext(&thread.begin, start, 0);
  }
  std::vector<int> order(m.warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  m.turns = 0;
  for (int running = threads; running;) {
    std::shuffle(order.begin(), order.end(), m.chance);
    for (int warp : order)
      for (int t = warp * 32; t < min(warp * 32 + 32, threads); ++t) {
        if (m.threads[t]->done) continue;
        go_on(*m.threads[t]);
        if (self().done) --running, m.turns = 0;
      }
    if (m.stopped || m.turns > 1000ll * threads) return false;
  }
  return true;
}
template <class... Args, size_t... N>
inline void call(void (*kernel)(Args...), void** places, std::index_sequence<N...>) {
  kernel(*(typename std::remove_const<Args>::type*)places[N]...);
}
template <class... Args> inline int launch(void (*kernel)(Args...), unsigned x, unsigned y, int threads, void** places) {
  auto& m = machine;
  m.grid = {x, y, 1}, m.size = {(unsigned)threads, 1, 1}, m.stopped = false;
  m.work = [=] { call(kernel, places, std::index_sequence_for<Args...>()); };
  bool ended = true;
  for (m.at.y = 0; m.at.y < y && ended; ++m.at.y)
    for (m.at.x = 0; m.at.x < x && ended; ++m.at.x) ended = run_block(threads);
  m.threads.clear();  // there are many kernels, and 40 MB of stacks in each
  return ended ? 0 : m.stopped ? 710 : 719;
}

}  // namespace emulated

#define threadIdx (emulated::self().place)
#define blockIdx (emulated::machine.at)
#define blockDim (emulated::machine.size)
#define gridDim (emulated::machine.grid)

// ---- What CUDA C++ offers ----

inline uint32_t __float_as_uint(float a) { uint32_t b; memcpy(&b, &a, 4); return b; }
inline float __uint_as_float(uint32_t a) { float b; memcpy(&b, &a, 4); return b; }
inline int __popc(uint32_t a) { return __builtin_popcount(a); }
template <class Value> inline Value __shfl_sync(uint32_t, Value a, int from) { return emulated::exchange(a, from); }
template <class Value> inline Value __shfl_xor_sync(uint32_t, Value a, int by) {
  return emulated::exchange(a, threadIdx.x % 32 ^ by);
}
template <class Value> inline Value __shfl_up_sync(uint32_t, Value a, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::exchange(a, lane >= by ? lane - by : lane);
}
inline uint32_t __ballot_sync(uint32_t, bool a) {
  uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= (uint32_t)emulated::exchange((int)a, lane) << lane;
  return all;
}
inline void __syncwarp() { emulated::meet(emulated::warp(), 32, [] {}); }
inline void __syncthreads() { emulated::meet(emulated::machine.block, blockDim.x, [] {}); }
inline int __syncthreads_or(int a) {
  auto& block = emulated::machine.block;
  block.any |= a != 0;
  emulated::meet(block, blockDim.x, [&] { block.found = block.any, block.any = 0; });
  return block.found;
}
inline void* __cvta_shared_to_generic(uint32_t at) { return memory + at; }
