// Device and pinned memory: ordinary host memory in a registry, so that every pointer can be checked.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "world.h"

namespace AR_NS {

constexpr size_t kAlignment = 512;
// Freed memory stays here for a while, filled with another poison, so that its addresses are not used again at once
// and a late use is named. AddressSanitizer has a better one.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kQuarantineBytes = 0;
#else
constexpr size_t kQuarantineBytes = 8 << 20;
#endif
constexpr unsigned char kFreedPoison = 0xDB;
// From here on memory is mapped by itself: free gives it back at once, while malloc keeps what was freed below something live.
constexpr size_t kMappedBytes = 1 << 20;

static void* take_bytes(size_t bytes) {
  void* p = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  return posix_memalign(&p, kAlignment, bytes) == 0 ? p : nullptr;  // not rounded: the first byte beyond is an error
#endif
  if (bytes >= kMappedBytes) {
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p != MAP_FAILED ? p : nullptr;
  }
  return posix_memalign(&p, kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment) == 0 ? p : nullptr;
}
static void give_bytes(void* p, size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)
  if (bytes >= kMappedBytes) {
    munmap(p, bytes);
    return;
  }
#endif
  std::free(p);
  (void)bytes;
}

static Allocation* find_in(std::map<uintptr_t, Allocation>& all, uintptr_t a, size_t bytes) {
  auto it = all.upper_bound(a);
  if (it == all.begin()) return nullptr;
  Allocation& m = std::prev(it)->second;
  const uintptr_t offset = a - m.base;
  return offset <= m.bytes && bytes <= m.bytes - offset && (offset < m.bytes || bytes == 0) ? &m : nullptr;
}

Allocation* World::find(const void* p, size_t bytes) { return find_in(memory, reinterpret_cast<uintptr_t>(p), bytes); }

bool World::reaches(int device, const Allocation& a) const {
  return a.kind == MemoryKind::pinned || a.device == device || peer_enabled[device][a.device];
}

std::string World::describe(const void* p) const {
  char text[160];
  const uintptr_t a = reinterpret_cast<uintptr_t>(p);
  World* self = const_cast<World*>(this);
  Allocation* m = find_in(self->memory, a, 0);
  const char* state = "";
  if (m == nullptr) {
    m = find_in(self->freed, a, 0);
    state = "freed ";
  }
  if (m == nullptr) {
    std::snprintf(text, sizeof(text), "%p (in no allocation)", p);
  } else if (m->kind == MemoryKind::pinned) {
    std::snprintf(text, sizeof(text), "%p (%spinned allocation %llu of %zu bytes, offset %zu)", p, state,
                  static_cast<unsigned long long>(m->id), m->bytes, static_cast<size_t>(a - m->base));
  } else {
    std::snprintf(text, sizeof(text), "%p (%sallocation %llu of %zu bytes on device %d, offset %zu)", p, state,
                  static_cast<unsigned long long>(m->id), m->bytes, m->device, static_cast<size_t>(a - m->base));
  }
  return text;
}

Code World::allocate(void** p, size_t bytes, MemoryKind kind, int device) {
  *p = nullptr;
  if (bytes == 0) return kOk;
  Device* d = kind == MemoryKind::device ? &devices[static_cast<size_t>(device)] : nullptr;
  if (d != nullptr && bytes > static_cast<size_t>(d->spec.memory_bytes - d->used_bytes)) return kMemory;
  if (bytes > SIZE_MAX - kAlignment) return kMemory;
  void* q = take_bytes(bytes);
  if (q == nullptr) return kMemory;
  std::memset(q, kPoison, bytes);
  Allocation a;
  a.base = reinterpret_cast<uintptr_t>(q);
  a.bytes = bytes;
  a.kind = kind;
  a.device = device;
  a.id = next_handle++;
  for (auto it = freed.lower_bound(a.base); it != freed.end() && it->first < a.base + bytes;) it = freed.erase(it);
  if (auto it = freed.lower_bound(a.base); it != freed.begin()) {
    --it;
    if (it->second.base + it->second.bytes > a.base) freed.erase(it);
  }
  memory.emplace(a.base, std::move(a));
  if (d != nullptr) d->used_bytes += static_cast<int64_t>(bytes);
  *p = q;
  return kOk;
}

void World::release(uintptr_t base) {
  for (const Device& d : devices) tsan_acquire(&d.done);  // it was waited for
  auto it = memory.find(base);
  Allocation a = std::move(it->second);
  memory.erase(it);
  a.lines = {};
  a.shadow = {};
  if (a.kind == MemoryKind::device) devices[static_cast<size_t>(a.device)].used_bytes -= static_cast<int64_t>(a.bytes);
  void* p = reinterpret_cast<void*>(base);
  if (a.foreign) {
    foreign--;
  } else if (a.bytes > kQuarantineBytes) {
    give_bytes(p, a.bytes);
  } else {
    std::memset(p, kFreedPoison, a.bytes);
    quarantine.emplace_back(p, a.bytes);
    quarantine_bytes += a.bytes;
    while (quarantine_bytes > kQuarantineBytes) {
      quarantine_bytes -= quarantine.front().second;
      give_bytes(quarantine.front().first, quarantine.front().second);
      quarantine.pop_front();
    }
  }
  if (freed.size() > 4096) freed.erase(freed.begin());
  freed[base] = std::move(a);
}

void World::release_all() {
  for (auto& m : memory)
    if (!m.second.foreign) give_bytes(reinterpret_cast<void*>(m.first), m.second.bytes);
  memory.clear();
  foreign = 0;
  told.reset();
  last_told.reset();
  for (auto& q : quarantine) give_bytes(q.first, q.second);
  quarantine.clear();
  quarantine_bytes = 0;
  freed.clear();
}

// Every access of a device to a range passes here: kernels by what they declare, copies by what they are. It is checked
// against what touched the range before (hazards.cpp); the answer is what a kernel's access costs.
double World::touch(const Op& op, BlockRun* block, const void* p, size_t bytes, Access access, bool* valid) {
  Allocation* a = find(p, bytes);
  *valid = a != nullptr && reaches(op.device, *a);
  // A copy between devices needs no peer access.
  if (a != nullptr && (*valid || op.work->kind != WorkKind::kernel))
    check(op, block, *a, reinterpret_cast<uintptr_t>(p), bytes, access, false);
  if (!*valid || op.work->kind != WorkKind::kernel) return 0;
  const ar_emulated_device& s = devices[static_cast<size_t>(op.device)].spec;
  const double gbs = a->kind == MemoryKind::pinned ? s.kernel_host_gbs
                     : a->device != op.device      ? peer_rate(op.device, a->device)
                                                   : s.memory_gbs;
  return static_cast<double>(bytes) * op.work->blocks / (gbs * 1e3);  // a block has its share of the rate
}

// ---- entry points -----------------------------------------------------------------------------------------------

Code malloc_device(void** p, size_t bytes) {
  Guard g;
  if (g.w.injected(AR_CALL_MALLOC_DEVICE)) return kMemory;
  return g.w.allocate(p, bytes, MemoryKind::device, current_device(g.w));
}

Code malloc_pinned(void** p, size_t bytes) {
  Guard g;
  if (g.w.injected(AR_CALL_MALLOC_HOST)) return kMemory;
  return g.w.allocate(p, bytes, MemoryKind::pinned, -1);
}

// As in CUDA, freeing waits: for everything enqueued so far on the devices that could be using the memory.
static Code free_memory(void* p, MemoryKind kind, bool foreign = false) {
  if (p == nullptr) return kOk;
  Guard g;
  World& w = g.w;
  auto it = w.memory.find(reinterpret_cast<uintptr_t>(p));
  if (it == w.memory.end() || it->second.kind != kind || it->second.foreign != foreign) {
    w.misuse("free of " + w.describe(p) + ", which is no start of a live allocation of that kind");
    return kInvalidValue;
  }
  const int owner = it->second.device;
  const uint64_t id = it->second.id, last = w.next_op;
  const Knowledge known = kind == MemoryKind::pinned ? w.host : Knowledge();
  const Code c = w.wait(g.l, [&] {
    for (size_t i = 0; i < w.devices.size(); i++) {
      if (kind == MemoryKind::device && static_cast<int>(i) != owner && !w.machine.peer[i][owner]) continue;
      const auto& u = w.devices[i].unfinished;
      if (!u.empty() && u.begin()->first < last) return false;
    }
    return true;
  });
  if (c != kOk) return c;
  it = w.memory.find(reinterpret_cast<uintptr_t>(p));
  if (it == w.memory.end() || it->second.id != id) return kInvalidValue;  // freed twice, meanwhile
  if (kind == MemoryKind::pinned) w.check_free(it->second, known);
  w.release(it->first);
  return kOk;
}
Code free_device(void* p) { return free_memory(p, MemoryKind::device); }
Code free_pinned(void* p) { return free_memory(p, MemoryKind::pinned); }

Code register_pinned(void* p, size_t bytes) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_MALLOC_HOST)) return kMemory;
  const uintptr_t base = reinterpret_cast<uintptr_t>(p);
  const auto after = w.memory.lower_bound(base);
  if (p == nullptr || bytes == 0 || w.find(p, 1) != nullptr || (after != w.memory.end() && after->first < base + bytes))
    return kInvalidValue;
  for (auto it = w.freed.lower_bound(base); it != w.freed.end() && it->first < base + bytes;) it = w.freed.erase(it);
  Allocation a;
  a.base = base;
  a.bytes = bytes;
  a.kind = MemoryKind::pinned;
  a.foreign = true;
  a.id = w.next_handle++;
  w.memory.emplace(base, std::move(a));
  w.foreign++;
  return kOk;
}
Code unregister_pinned(void* p) { return free_memory(p, MemoryKind::pinned, true); }

Code host_to_device(void** dev, void* host) {
  Guard g;
  const Allocation* a = g.w.find(host, 1);
  *dev = nullptr;
  if (a == nullptr || a->kind != MemoryKind::pinned) return kInvalidValue;
  *dev = host;
  return kOk;
}

bool check_range(const void* p, size_t bytes, int device) {
  Guard g;
  if (device < 0 || device >= g.w.machine.devices) return false;
  if (bytes == 0) return true;
  const Allocation* a = g.w.find(p, bytes);
  return a != nullptr && g.w.reaches(device, *a);
}

}  // namespace AR_NS
