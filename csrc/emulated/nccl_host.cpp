// What emulated devices offer the emulated NCCL (nccl.h). A kernel on each rank's stream; they meet in the communicator's
// Room, rank 0's sums in rank order with a rounding at every hop, the others wait for it. As NCCL's, they wait for each
// other without a deadline, until the communicator is aborted. The simulated time is what NCCL 2.30.7 took host-staged on
// two H200 (2026-11-30, spec 8): 10 us with the launch and 27.9 GB/s.
#include "nccl.h"

#include "../kernels/types.h"
#include "../transports/nccl_api.h"
#include "world.h"

namespace AR_NS {

namespace {

// Only the thread that runs devices touches what is not atomic or under the mutex.
struct Room {
  // How often a rank, or the sum, has come this far; when; and what that tells.
  struct Place {
    uint32_t turn = 0;
    double us = 0;
    ReleaseRef tells;
  };
  Place came[8], done;
  unsigned aborted[8] = {};
  std::mutex mutex;
  std::condition_variable left;
  int graphs = 0;  // that captured the communicator
};

void reach(Block& b, Room::Place& p, uint32_t turn) {
  fence_sys(b, Order::none);
  p = {turn, b.core.clock_us, block_tells(b)};
}
// False: aborted.
bool meet(Block& b, const unsigned* aborted, const Room::Place& p, uint32_t turn) {
  const Spin s = spin(b, Order::none, SpinLimit{aborted, UINT64_MAX}, &p.turn,
                      [&] { return static_cast<int32_t>(p.turn - turn) >= 0; });
  if (s != Spin::ready) return false;
  b.core.clock_us = std::max(b.core.clock_us, p.us);
  if (p.tells != nullptr) block_learns(b, p.tells);
  fence_sys(b, Order::none);
  return true;
}

struct NcclReduce {
  static constexpr const char* kName = "nccl";
  static constexpr int kMaxThreads = 512;
  Room* room;
  const void* send[8];
  void* recv[8];
  int64_t count;
  int rank, n, type, average, hang;

  template <class E>
  void real() const {
    using Bits = typename E::Bits;
    for (int64_t i = 0; i < count; i++) {
      float acc = E::load(static_cast<const Bits*>(send[0])[i]);
      for (int r = 1; r < n; r++) acc = E::load(E::store(add_rn(acc, E::load(static_cast<const Bits*>(send[r])[i]))));
      if (average != 0) acc = div_rn(acc, static_cast<float>(n));
      for (int r = 0; r < n; r++) static_cast<Bits*>(recv[r])[i] = E::store(acc);
    }
  }
  template <class V>
  void plain() const {
    for (int64_t i = 0; i < count; i++) {
      V acc = static_cast<const V*>(send[0])[i];
      for (int r = 1; r < n; r++) acc = static_cast<V>(acc + static_cast<const V*>(send[r])[i]);
      for (int r = 0; r < n; r++) static_cast<V*>(recv[r])[i] = acc;
    }
  }

  AR_DEVICE void operator()(Block& b) const {
    const uint32_t turn = room->came[rank].turn + 1;
    reach(b, room->came[rank], turn);
    const unsigned* aborted = &room->aborted[rank];
    if (hang != 0 || rank != 0) {
      meet(b, aborted, room->done, turn);
      return;
    }
    for (int r = 1; r < n; r++)
      if (!meet(b, aborted, room->came[r], turn)) return;
    sum(b);
    reach(b, room->done, turn);
  }

  AR_DEVICE void sum(Block& b) const {
    const int64_t size = type == ar::nccl::kFloat32 || type == ar::nccl::kInt32   ? 4
                         : type == ar::nccl::kFloat64 || type == ar::nccl::kInt64 ? 8
                         : type == ar::nccl::kInt8 || type == ar::nccl::kUint8    ? 1
                                                                                  : 2;
    for (int r = 0; r < n; r++) block_uses(b, send[r], count * size, false);
    for (int r = 0; r < n; r++) block_uses(b, recv[r], count * size, true);
    b.core.clock_us += 8 + static_cast<double>(count * size) / 27.9e3;
    switch (type) {
      case ar::nccl::kFloat32:
        return real<F32>();
      case ar::nccl::kFloat16:
        return real<F16>();
      case ar::nccl::kBfloat16:
        return real<BF16>();
      case ar::nccl::kFloat64:
        return plain<double>();
      case ar::nccl::kInt64:
        return plain<uint64_t>();
      case ar::nccl::kInt32:
        return plain<uint32_t>();
      default:
        return plain<uint8_t>();
    }
  }
};

int nccl_current_device() {
  int d = 0;
  get_device(&d);
  return d;
}

void* nccl_room() {
  static auto* all = new std::vector<Room*>;  // so that nobody takes them for leaked
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  all->push_back(new Room);
  return all->back();
}

Code hold(Room& room, Stream stream) {
  CaptureInfo info;
  const Code c = capture_info(stream, &info);
  if (c != kOk || info.state != Capturing::active) return c;
  {
    std::lock_guard<std::mutex> lock(room.mutex);
    room.graphs++;
  }
  const auto drop = [](void* arg) {
    Room& r = *static_cast<Room*>(arg);
    std::lock_guard<std::mutex> lock(r.mutex);
    if (--r.graphs == 0) r.left.notify_all();
  };
  const Code kept = graph_retain(info, &room, drop);
  if (kept != kOk) drop(&room);
  return kept;
}

int nccl_allreduce(void* room, const ar_emulated_nccl_part* parts, int n, size_t count, int type, int average,
                   int hang) {
  int before = 0;
  get_device(&before);
  NcclReduce k{};
  k.room = static_cast<Room*>(room);
  k.count = static_cast<int64_t>(count);
  k.n = n;
  k.type = type;
  k.average = average;
  k.hang = hang;
  for (int r = 0; r < n; r++) {
    k.send[r] = parts[r].send;
    k.recv[r] = parts[r].recv;
  }
  Code c = kOk;
  for (int r = 0; r < n && c == kOk; r++) {
    const Stream stream = static_cast<Stream>(parts[r].stream);
    k.rank = r;
    c = set_device(parts[r].device);
    if (c == kOk) c = hold(*k.room, stream);
    if (c == kOk) c = launch(k, 1, 512, stream);
  }
  set_device(before);
  return c;
}

void nccl_leave(void* arg, int rank, int abort) {
  Room& room = *static_cast<Room*>(arg);
  if (abort != 0) __atomic_store_n(&room.aborted[rank], 1u, __ATOMIC_SEQ_CST);
  std::unique_lock<std::mutex> lock(room.mutex);
  room.left.wait(lock, [&] { return room.graphs == 0; });
}

}  // namespace

const void* emulated_nccl_host() {
  static const ar_emulated_nccl_host table = {nccl_current_device, nccl_room,     nccl_allreduce,
                                              nccl_leave,          malloc_device, free_device};
  return &table;
}

}  // namespace AR_NS
