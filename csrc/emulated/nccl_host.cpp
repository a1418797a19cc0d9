// What emulated devices offer the emulated NCCL (nccl.h). One kernel on rank 0's stream, joined to the other ranks'
// streams before and after, sums in rank order with a rounding at every hop. Its simulated time is what NCCL 2.30.7 took
// host-staged on two H200 (2026-11-30, spec 8): 10 us and 27.9 GB/s.
#include "nccl.h"

#include "../kernels/types.h"
#include "../transports/nccl_api.h"
#include "world.h"

namespace AR_NS {

namespace {

struct NcclReduce {
  static constexpr const char* kName = "nccl";
  static constexpr int kMaxThreads = 512;
  static constexpr bool kTalks = false;
  const void* send[8];
  void* recv[8];
  int64_t count;
  int n, type, average;
  const uint32_t* hang;  // not null: runs until this word is set

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
    if (hang != nullptr) spin(b, Order::none, SpinLimit{hang, UINT64_MAX}, hang, [] { return false; });
    const int64_t size = type == ar::nccl::kFloat32 || type == ar::nccl::kInt32   ? 4
                         : type == ar::nccl::kFloat64 || type == ar::nccl::kInt64 ? 8
                         : type == ar::nccl::kInt8 || type == ar::nccl::kUint8    ? 1
                                                                                  : 2;
    for (int r = 0; r < n; r++) block_uses(b, send[r], count * size, false);
    for (int r = 0; r < n; r++) block_uses(b, recv[r], count * size, true);
    b.core.clock_us += 10 + static_cast<double>(count * size) / 27.9e3;
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

int nccl_allreduce(const ar_emulated_nccl_part* parts, int n, size_t count, int type, int average,
                   const unsigned* hang) {
  int before = 0;
  get_device(&before);
  NcclReduce k{};
  Code c = set_device(parts[0].device);
  k.count = static_cast<int64_t>(count);
  k.n = n;
  k.type = type;
  k.average = average;
  k.hang = hang;
  Event event = nullptr;
  const Stream lead = static_cast<Stream>(parts[0].stream);
  // As NCCL may: its events go while they are in use, the work they order does not.
  const auto event_forget = [](Event e) {
    Guard g;
    g.w.events.erase(handle_value(e));
  };
  for (int r = 0; r < n && c == kOk; r++) {
    k.send[r] = parts[r].send;
    k.recv[r] = parts[r].recv;
    if (r == 0) continue;
    c = set_device(parts[r].device);
    if (c == kOk) c = event_create(&event, false);
    if (c == kOk) c = event_record(event, static_cast<Stream>(parts[r].stream));
    if (c == kOk) c = stream_wait(lead, event);
    event_forget(event);
  }
  if (c == kOk) c = set_device(parts[0].device);
  if (c == kOk) c = launch(k, 1, 512, lead);
  if (c == kOk) c = event_create(&event, false);
  if (c == kOk) c = event_record(event, lead);
  for (int r = 1; r < n && c == kOk; r++) c = stream_wait(static_cast<Stream>(parts[r].stream), event);
  event_forget(event);
  set_device(before);
  return c;
}

}  // namespace

const void* emulated_nccl_host() {
  static const ar_emulated_nccl_host table = {nccl_current_device, nccl_allreduce};
  return &table;
}

}  // namespace AR_NS
