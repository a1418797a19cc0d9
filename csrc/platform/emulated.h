// The emulated machine, under the names platform.h lists. This header is all that kernels and transports see of it;
// the runtime itself is csrc/emulated/ (docs/architecture.md, "The emulated machine").
//
// A kernel's block is a fiber. It runs until it waits (spin) and, under the random and the adversarial schedule, is
// also interrupted after fences, flags and barriers. Its store_sys and store_flag then pass through a store buffer that
// empties in any order until a fence; plain stores through pointers are immediate. Only one thread at a time runs
// devices, so nothing here needs more than relaxed atomics against the host's own reads and writes of pinned memory.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "../include/allreduce.h"

#define AR_DEVICE inline
#define AR_HOST_DEVICE inline

namespace AR_NS {

using namespace ar;

// Handles are numbers that are never used twice and never looked through, so a dead one is an error code.
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Graph = struct GraphHandle*;
using GraphExec = struct GraphExecHandle*;
using Code = int;
constexpr Code kOk = 0;
constexpr bool kSimulated = true;
constexpr int kBackend = 2;  // AR_BACKEND_EMULATED

// CUDA's numbers where the sense is the same; 9001 on are the emulator's own.
enum : Code {
  kInvalidValue = 1,
  kMemory = 2,
  kInvalidDevice = 101,
  kPeerUnsupported = 217,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kMisaligned = 716,
  kLaunchFailure = 719,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kDeadlock = 9001,       // nothing can ever run again: ar_emulated_report() has every waiter
  kInjectedFault = 9002,  // asked for by ar_emulated_fail
  kMachineReplaced = 9003,
  kHazard = 9004,  // two accesses that nothing orders: ar_emulated_report() names both
};

struct CaptureInfo {
  Capturing state = Capturing::none;
  unsigned long long id = 0;
  Graph graph = nullptr;
};

const char* code_text(Code c);
inline bool code_is_memory(Code c) { return c == kMemory; }
inline bool code_is_lost(Code c) { return c == kIllegalAddress || c == kMisaligned || c == kLaunchFailure; }
inline bool code_is_argument(Code c) { return c == kInvalidValue || c == kInvalidHandle; }
inline bool code_is_deadlock(Code c) { return c == kDeadlock; }
inline bool code_is_hazard(Code c) { return c == kHazard; }
bool drive_is_stepped();
const void* emulated_nccl_host();  // emulated/nccl.h

int runtime_version();
Code device_count(int* n);
Code set_device(int d);
Code get_device(int* d);
Code device_info(int d, DeviceInfo* out);
Code can_access_peer(int* can, int device, int peer);
Code enable_peer(int device, int peer);

Code malloc_device(void** p, size_t bytes);
Code free_device(void* p);
Code malloc_exported(void** p, size_t bytes);
Code ipc_export(void* p, uint8_t* handle);
Code ipc_open(void** p, const uint8_t* handle);
Code ipc_close(void* p);
Code malloc_pinned(void** p, size_t bytes);
Code free_pinned(void* p);
Code register_pinned(void* p, size_t bytes);
Code unregister_pinned(void* p);
Code host_to_device(void** dev, void* host);
bool check_range(const void* p, size_t bytes, int device);

Code stream_create(Stream* s);
Code stream_destroy(Stream s);
uint64_t stream_identity(Stream s);
Code stream_query(Stream s, bool* done);
Code stream_synchronize(Stream s);
Code device_synchronize();

Code event_create(Event* e, bool timing);
Code event_destroy(Event e);
Code event_record(Event e, Stream s);
Code event_query(Event e, bool* done);
Code event_synchronize(Event e);
Code event_elapsed_us(double* us, Event a, Event b);
Code stream_wait(Stream s, Event e);

Code copy_async(void* dst, const void* src, size_t n, CopyKind k, Stream s);
Code copy_blocking(void* dst, const void* src, size_t n, CopyKind k);
Code fill_async(void* dst, int byte, size_t n, Stream s);
Code host_call(Stream s, void (*fn)(void*), void* arg);

Code capture_info(Stream s, CaptureInfo* out);
Code capture_begin(Stream s);
Code capture_end(Stream s, Graph* g);
Code graph_retain(const CaptureInfo& info, void* arg, void (*drop)(void*));
Code graph_instantiate(GraphExec* x, Graph g);
Code graph_launch(GraphExec x, Stream s);
Code graph_destroy(Graph g);
Code graph_exec_destroy(GraphExec x);

// Captures are relaxed here, so allocation is always allowed beside them.
class RelaxedCapture {
 public:
  RelaxedCapture() {}
  ~RelaxedCapture() {}
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
};

// ---- ordering primitives: counted, and one of them taken out by ar_emulated_mutate ------------------------------

struct OrderState {
  std::atomic<int> mutated{0};
  std::atomic<int64_t> passes[static_cast<int>(Order::count)] = {};
  std::atomic<int64_t> drop[2] = {};  // ar_emulated_drop_store: of data, of flags; counts down
};
extern OrderState g_orders;

// Whether this store is the one that gets lost.
inline bool store_dropped(int flag) {
  std::atomic<int64_t>& n = g_orders.drop[flag];
  return n.load(std::memory_order_relaxed) > 0 && n.fetch_sub(1, std::memory_order_relaxed) == 1;
}

inline bool ordered(Order o) {
  return o == Order::none || g_orders.mutated.load(std::memory_order_relaxed) != static_cast<int>(o);
}
// Counts the pass; false if this primitive is taken out.
inline bool order_pass(Order o) {
  g_orders.passes[static_cast<int>(o)].fetch_add(1, std::memory_order_relaxed);
  return ordered(o);
}
inline Code order_wait(Order o, Stream s, Event e) { return order_pass(o) ? stream_wait(s, e) : kOk; }

// ---- device side ------------------------------------------------------------------------------------------------

typedef uint64_t __attribute__((may_alias)) Word64;

struct Release;  // emulated/hazards.h: what a store tells whoever sees it
using ReleaseRef = std::shared_ptr<const Release>;

// What is kept of the last store to a 64-byte line: when it was made, and what it tells.
struct Line {
  double us = -1e300;
  ReleaseRef release;
};
// A store that other processors cannot see yet.
struct BufferedStore {
  uintptr_t address;
  uint64_t value;
  int bytes;  // 4 or 8
  Line* line;
  ReleaseRef release;
};
// The lines of one allocation.
struct NearMemory {
  uintptr_t base = 0, bytes = 0;
  Line* lines = nullptr;
};
constexpr int kLineShift = 6;

// What the runtime keeps of a block where kernels' inlined code reaches it.
struct BlockCore {
  int index = 0, count = 1, threads = 1;
  bool shared = false;  // the machine has memory that other processes write, too
  bool weak = false;    // stores pass through the buffer, and the block may be interrupted
  double clock_us = 0;  // block-local simulated time
  double flag_us = 0;   // how long a store takes to be seen by another processor
  NearMemory near[4];
  int near_next = 0;
  std::vector<BufferedStore> stores;
  struct BlockRun* run = nullptr;
};

class Block;
void block_touch(Block& b, const void* p, int64_t bytes, bool write);  // cost, validity, hazards
void block_took(Block& b, const void* p, int64_t bytes);               // hazards of words that carried their flags
void block_uses(Block& b, const void* p, int64_t bytes, bool write);   // hazards alone, on whatever device
Line* block_line(Block& b, uintptr_t address);                         // slow path of line_of
ReleaseRef block_tells(Block& b);                                      // what a store made now tells; null: nothing
void block_learns(Block& b, const ReleaseRef& release);                // a satisfied wait
void block_told(const void* p, const ReleaseRef& release);             // a store to memory that other processes see
void block_heard(Block& b, const void* p);  // a satisfied wait for a store of another process
void block_fence(Block& b);
void block_buffer(Block& b, void* p, const void* value, int bytes);
uint64_t block_forward(const Block& b, uintptr_t address, int bytes, uint64_t value);
void block_flush(Block& b);
void block_interrupt(Block& b);  // perhaps lets others run first
[[noreturn]] void block_trap(Block& b, Code code, const void* address, const char* what);
Spin block_wait(Block& b, Order o, const SpinLimit& limit, const void* address, bool (*holds)(void*), void* pred);

class Block {
 public:
  int index() const { return core.index; }
  int count() const { return core.count; }
  template <class F>
  void each(int64_t n, F f) {
    for (int64_t i = 0; i < n; i++) f(i);
  }
  template <int U, class F>
  void groups(int64_t n, F f) {
    const int count = static_cast<int>(n);
    int i = 0;
    for (; i + U <= count; i += U)
      f(i, [](auto g) {
        for (int u = 0; u < U; u++) g(u, u);
      });
    for (; i < count; i++) f(i, [](auto g) { g(0, 0); });
  }
  void sync() {
    if (core.weak) block_interrupt(*this);
  }
  bool any(bool p) { return p; }
  template <class F>
  void lead(F f) {
    f();
  }
  template <class F>
  void work(int64_t n, double us, F) {
    core.clock_us += static_cast<double>(n) * us;
  }
  void begin() {}
  void reads(const void* p, int64_t bytes) { block_touch(*this, p, bytes, false); }
  void reads_flagged(const void* p, int64_t bytes) { block_took(*this, p, bytes); }
  void writes(const void* p, int64_t bytes) { block_touch(*this, p, bytes, true); }

  BlockCore core;  // the runtime's own
};

uint64_t device_clock_ns();

inline Line* line_of(Block& b, const void* p) {
  const uintptr_t a = reinterpret_cast<uintptr_t>(p);
  for (const NearMemory& n : b.core.near)
    if (a - n.base < n.bytes) return n.lines + ((a - n.base) >> kLineShift);
  return block_line(b, a);
}
// The places where a store becomes a release and a satisfied wait an acquire: they carry times and clocks.
inline void block_release(Block& b, const void* p) {
  Line* line = line_of(b, p);
  if (line == nullptr) return;
  line->us = b.core.clock_us;
  line->release = block_tells(b);
  if (b.core.shared) block_told(p, line->release);
}
inline void block_acquire(Block& b, const void* p) {
  Line* line = line_of(b, p);
  if (line == nullptr) return;
  if (line->us + b.core.flag_us > b.core.clock_us) b.core.clock_us = line->us + b.core.flag_us;
  if (line->release != nullptr)
    block_learns(b, line->release);
  else if (b.core.shared)
    block_heard(b, p);
}

// Faults of peer access (emulated/peers.cpp). A store that one of them takes; what a load really sees.
extern std::atomic<bool> g_peer_faults;
bool peer_store(Block& b, void* p, const void* value, int bytes);
void peer_load(Block& b, const void* p, void* value, int bytes);
inline bool store_taken(Block& b, void* p, const void* value, int bytes) {
  return g_peer_faults.load(std::memory_order_relaxed) && peer_store(b, p, value, bytes);
}

inline void block_aligned(Block& b, const void* p, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) & (bytes - 1)) block_trap(b, kMisaligned, p, "a misaligned access");
}

inline Vec16 load_sys(Block& b, const Vec16* p) {
  block_aligned(b, p, 16);
  uint64_t half[2];
  for (int i = 0; i < 2; i++) {
    const Word64* q = reinterpret_cast<const Word64*>(p) + i;
    half[i] = __atomic_load_n(q, __ATOMIC_ACQUIRE);
    if (!b.core.stores.empty()) half[i] = block_forward(b, reinterpret_cast<uintptr_t>(q), 8, half[i]);
  }
  Vec16 v;
  std::memcpy(&v, half, 16);
  if (g_peer_faults.load(std::memory_order_relaxed)) peer_load(b, p, &v, 16);
  return v;
}
inline void store_sys(Block& b, Vec16* p, const Vec16& v) {
  block_aligned(b, p, 16);
  if (store_dropped(0) || store_taken(b, p, &v, 16)) return;
  if (b.core.weak) return block_buffer(b, p, &v, 16);
  uint64_t half[2];
  std::memcpy(half, &v, 16);
  __atomic_store_n(reinterpret_cast<Word64*>(p), half[0], __ATOMIC_RELEASE);
  __atomic_store_n(reinterpret_cast<Word64*>(p) + 1, half[1], __ATOMIC_RELEASE);
  block_release(b, p);
}
inline uint32_t load_flag(Block& b, const uint32_t* p) {
  block_aligned(b, p, 4);
  uint32_t v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  if (!b.core.stores.empty()) v = static_cast<uint32_t>(block_forward(b, reinterpret_cast<uintptr_t>(p), 4, v));
  if (g_peer_faults.load(std::memory_order_relaxed)) peer_load(b, p, &v, 4);
  return v;
}
inline void store_flag(Block& b, Order o, uint32_t* p, uint32_t v) {
  block_aligned(b, p, 4);
  if (!order_pass(o) || store_dropped(1) || store_taken(b, p, &v, 4)) return;
  if (b.core.weak) {
    block_buffer(b, p, &v, 4);
    block_interrupt(b);
    return;
  }
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
  block_release(b, p);
}
inline void fence_sys(Block& b, Order o) {
  if (!order_pass(o)) return;
  block_fence(b);
  if (!b.core.weak) return;
  block_flush(b);
  block_interrupt(b);
}
inline uint32_t slot_turn(Order o, uint32_t turn) { return order_pass(o) ? turn : 0; }

template <class P>
Spin spin(Block& b, Order o, const SpinLimit& limit, const void* address, P pred) {
  const bool kept = order_pass(o);
  const bool holds = pred();
  if (!kept) return Spin::ready;
  if (holds) {
    block_acquire(b, address);
    return Spin::ready;
  }
  return block_wait(b, o, limit, address, [](void* p) { return static_cast<bool>((*static_cast<P*>(p))()); }, &pred);
}

// Sums and divisions of floats are SSE or NEON ones, in single precision and in the default rounding mode; no product
// is near that a compiler could fuse.
inline float add_rn(float a, float b) { return a + b; }
inline float div_rn(float a, float b) { return a / b; }
inline uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float bits_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
// Round to nearest even, subnormals kept; any NaN becomes 7FFF, as the hardware's conversion does.
inline uint16_t float_to_half_bits(float f) {
  const uint32_t u = float_bits(f);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return 0x7fff;
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (a < 0x33000001u) return static_cast<uint16_t>(sign);             // 2^-25 and less round to zero
  uint32_t mantissa, shift;
  if (a < 0x38800000u) {  // below 2^-14: a subnormal half, in units of 2^-24
    mantissa = (a & 0x7fffffu) | 0x800000u;
    shift = 126 - (a >> 23);
  } else {
    mantissa = a - 0x38000000u;  // exponent bias 127 -> 15; a carry out of the mantissa raises the exponent rightly
    shift = 13;
  }
  const uint32_t half = 1u << (shift - 1), rest = mantissa & ((1u << shift) - 1);
  uint32_t r = mantissa >> shift;
  if (rest > half || (rest == half && (r & 1))) r++;
  return static_cast<uint16_t>(sign | r);
}
inline float half_bits_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t e = (h >> 10) & 31, m = h & 0x3ffu;
  if (e == 31) return bits_float(m ? 0x7fffffffu : sign | 0x7f800000u);
  if (e == 0) {
    if (m == 0) return bits_float(sign);
    e = 1;
    while (!(m & 0x400u)) {
      m <<= 1;
      e--;
    }
    m &= 0x3ffu;
  }
  return bits_float(sign | ((e + 112) << 23) | (m << 13));
}

Code trace_start(const std::vector<int>& devices);
void trace_stop();
Code trace_read(std::vector<ar_trace_record>* out);

// ---- launch -----------------------------------------------------------------------------------------------------

struct KernelCode {
  const char* name;
  const void* params;
  size_t bytes;
  int max_threads;
  void (*body)(const void* params, Block& b);
  bool talks;
};
// Whether blocks of a kernel exchange flags with others: each then has a timeline of its own (emulated/hazards.h). A
// kernel without flags says `static constexpr bool kTalks = false`.
template <class K, class = void>
struct Talks : std::true_type {};
template <class K>
struct Talks<K, std::void_t<decltype(K::kTalks)>> : std::bool_constant<K::kTalks> {};

Code launch_kernel(const KernelCode& k, int blocks, int threads, Stream s);
Code resident_limit(int threads, int max_threads, int* blocks);

template <class K>
Code launch(const K& kernel, int blocks, int threads, Stream s) {
  static_assert(std::is_trivially_copyable<K>::value, "a kernel's members are its parameters");
  static_assert(sizeof(K) <= 4096 && alignof(K) <= 16, "kernel parameters of CUDA before 12.1 end at 4096 bytes");
  return launch_kernel({K::kName, &kernel, sizeof(K), K::kMaxThreads,
                        [](const void* p, Block& b) { (*static_cast<const K*>(p))(b); }, Talks<K>::value},
                       blocks, threads, s);
}
template <class K>
Code launch_early(const K& kernel, int blocks, int threads, Stream s) {
  return launch(kernel, blocks, threads, s);
}
template <class K>
Code load_kernel() {
  return kOk;
}
template <class K>
Code resident_blocks(int threads, int* blocks) {
  return resident_limit(threads, K::kMaxThreads, blocks);
}

}  // namespace AR_NS
