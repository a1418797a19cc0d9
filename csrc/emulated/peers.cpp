// Faults of peer access (ar_emulated_peer_fault): what goes wrong between two devices although the driver grants access.
#include <algorithm>

#include "world.h"

namespace AR_NS {

std::atomic<bool> g_peer_faults{false};

// Through the host a transfer between devices reaches at most this part of a link's rate.
constexpr double kBounceShare = 0.25;

int World::peer_fault_of(int device, const Allocation* a) const {
  if (!g_peer_faults.load(std::memory_order_relaxed) || a == nullptr || a->kind != MemoryKind::device ||
      a->device == device)
    return AR_PEER_GOOD;
  return peer_fault[device][a->device];
}

double World::peer_rate(int device, int peer) const {
  if (peer_fault[device][peer] != AR_PEER_BOUNCED) return machine.peer_gbs;
  const ar_emulated_device& a = machine.device[device];
  const ar_emulated_device& b = machine.device[peer];
  return kBounceShare * std::min(std::min(a.d2h_gbs, b.h2d_gbs), std::min(a.duplex_gbs, b.duplex_gbs));
}

// As on real machines nothing comes back from such an access; only the end of the process ends it.
static void hang() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// What device sees where it believes to see another's memory: what it wrote there itself, else zeros.
std::vector<unsigned char>& World::mirror_of(int device, const Allocation& a) {
  auto& m = mirrors[{device, a.id}];
  if (m.empty()) m.resize(a.bytes);
  return m;
}

bool peer_store(Block& b, void* p, const void* value, int bytes) {
  World& w = world();
  Lock l(w.mu);
  const Op& op = *b.core.run->op;
  const Allocation* a = w.find(p, static_cast<size_t>(bytes));
  switch (w.peer_fault_of(op.device, a)) {
    case AR_PEER_DROPPED:
      return true;
    case AR_PEER_MIRRORED:
      std::memcpy(&w.mirror_of(op.device, *a)[reinterpret_cast<uintptr_t>(p) - a->base], value,
                  static_cast<size_t>(bytes));
      return true;
    case AR_PEER_DELAYED: {
      if (bytes < 16) return false;  // flags overtake the data
      w.late.push_back({op.id, p, {}});
      std::memcpy(&w.late.back().value, value, 16);
      return true;
    }
    case AR_PEER_HANG:
      l.unlock();
      hang();
      return true;
    default:
      return false;
  }
}

void peer_load(Block& b, const void* p, void* value, int bytes) {
  World& w = world();
  Lock l(w.mu);
  const int device = b.core.run->op->device;
  const Allocation* a = w.find(p, static_cast<size_t>(bytes));
  switch (w.peer_fault_of(device, a)) {
    case AR_PEER_MIRRORED:
      std::memcpy(value, &w.mirror_of(device, *a)[reinterpret_cast<uintptr_t>(p) - a->base],
                  static_cast<size_t>(bytes));
      return;
    case AR_PEER_HANG:
      l.unlock();
      hang();
      return;
    default:
      return;
  }
}

// A kernel has ended: what it stored late arrives.
void World::deliver(const Op& op) {
  const auto arrives = [&](const LateStore& s) {
    if (s.op != op.id) return false;
    if (find(s.to, 16) != nullptr) std::memcpy(s.to, &s.value, 16);
    return true;
  };
  late.erase(std::remove_if(late.begin(), late.end(), arrives), late.end());
}

// A copy that a fault takes: true if its bytes do not arrive where they should.
bool World::copy_goes_wrong(const Op& op, bool ends) {
  const Work& work = *op.work;
  if (work.kind != WorkKind::copy || work.direction != CopyKind::device_to_device) return false;
  const Allocation* to = find(work.to, work.bytes);
  const Allocation* from = find(work.from, work.bytes);
  const int write = peer_fault_of(op.device, to), read = peer_fault_of(op.device, from);
  if (write == AR_PEER_HANG || read == AR_PEER_HANG) hang();
  if (write == AR_PEER_MIRRORED && ends)
    std::memcpy(&mirror_of(op.device, *to)[reinterpret_cast<uintptr_t>(work.to) - to->base], work.from, work.bytes);
  if (read == AR_PEER_MIRRORED && ends)
    std::memcpy(work.to, &mirror_of(op.device, *from)[reinterpret_cast<uintptr_t>(work.from) - from->base], work.bytes);
  return write == AR_PEER_MIRRORED || write == AR_PEER_DROPPED || read == AR_PEER_MIRRORED;
}

}  // namespace AR_NS

extern "C" int32_t ar_emulated_peer_fault(int32_t device, int32_t peer, int32_t fault) {
  using namespace AR_NS;
  Guard g;
  const int n = g.w.machine.devices;
  if (device < 0 || device >= n || peer < 0 || peer >= n || device == peer || fault < AR_PEER_GOOD ||
      fault > AR_PEER_HANG)
    return AR_ERR_ARGUMENT;
  g.w.peer_fault[device][peer] = fault;
  g_peer_faults.store(true);
  return AR_OK;
}
