// One launch per device: ranks that share a device are served together, so that kernels which wait for each other are
// resident together.
#pragma once

#include <algorithm>

#include "transport.h"

namespace AR_NS {

class Launches {
 public:
  explicit Launches(Comm& comm) : comm_(comm) {
    for (int r = 0; r < comm.world(); r++) {
      int lead = comm.local(r) ? r : -1;
      for (int q = r - 1; q >= 0 && lead >= 0; q--)
        if (comm.local(q) && comm.rank(q).device == comm.rank(r).device) lead = q;
      lead_.push_back(lead);
    }
  }
  bool leads(int r) const { return lead_[static_cast<size_t>(r)] == r; }
  int locals(int lead) const { return static_cast<int>(std::count(lead_.begin(), lead_.end(), lead)); }

  // Why kernels of these blocks cannot run here, "" if they can.
  std::string too_old(const char* path) const {
    for (int r : comm_.locals()) {
      const DeviceInfo& d = comm_.rank(r).info;
      if (d.cc_major < 7)
        return std::string("path ") + path +
               " needs compute capability 7.0 (threads of a warp that wait for each other): device " +
               std::to_string(comm_.rank(r).device) + " has " + std::to_string(d.cc_major) + "." +
               std::to_string(d.cc_minor);
    }
    return "";
  }

  // Loads kernel K for every pair of types on every device (nothing may be loaded while a kernel spins), and lowers
  // resident[lead] to the blocks that its device holds at once.
  template <template <class, class> class K>
  int32_t load(int* resident, ar_error* e) const {
    for (int r = 0; r < comm_.world(); r++) {
      if (!leads(r)) continue;
      Code c = set_device(comm_.rank(r).device);
      for_all_types([&](auto t, auto w) {
        using Kernel = K<decltype(t), decltype(w)>;
        int blocks = 0;
        if (c == kOk) c = load_kernel<Kernel>();
        if (c == kOk) c = resident_blocks<Kernel>(kExchangeThreads, &blocks);
        resident[r] = std::min(resident[r], blocks);
      });
      if (c != kOk) return comm_.runtime_error(c, r, "loading the exchange kernels", e);
    }
    return AR_OK;
  }

  // What every kernel of shares is told of a call; rounds and shares are the transport's.
  template <class K>
  void fill(const Call& call, K* k) const {
    k->count = call.count;
    k->abort = comm_.abort_word();
    k->aborts = comm_.abort_base();
    k->abort_words = comm_.aborts();
    k->timeout_ns = comm_.timeout_ns();
    k->finish_ = finish_for(call, comm_.world());
    k->world = comm_.world();
    k->call = static_cast<uint32_t>(call.number);
  }

  // Launches k on each device for all its ranks; epochs(r) are rank r's. The launch is on the stream of the device's first
  // rank: it waits for the others' streams, and they for it.
  template <class K, class Epochs>
  int32_t launch_all(Call& call, K& k, int path, int threads, Order join, Epochs epochs, ar_error* e) const {
    const int n = comm_.world();
    for (int lead = 0; lead < n; lead++) {
      if (!leads(lead)) continue;
      Code c = set_device(comm_.rank(lead).device);
      if (c != kOk) return comm_.runtime_error(c, lead, "choosing the device", e);
      const Stream stream = call.parts[static_cast<size_t>(lead)].stream;
      int locals = 0;
      for (int r = lead; r < n; r++) {
        if (lead_[static_cast<size_t>(r)] != lead) continue;
        const Part& p = call.parts[static_cast<size_t>(r)];
        auto& local = k.local[locals++];
        local.send = p.send;
        local.recv = p.recv;
        local.absent = p.absent;
        local.rank = r;
        local.epochs = epochs(r);
        local.records = comm_.board()->records[r];
        local.signature = comm_.signature(call, path, r);
        if (p.stream == stream) continue;
        if (const int32_t s = comm_.record(call.lane[r]->ready, r, p.stream, e)) return s;
        if (const int32_t s = comm_.await(join, r, stream, call.lane[r]->ready, e)) return s;
      }
      k.locals = locals;
      // Launched early it saves 0.3 us of the launch latency behind another kernel.
      const bool early = comm_.rank(lead).info.cc_major >= kEarlyLaunch;
      c = early ? launch_early(k, k.blocks * locals, threads, stream) : launch(k, k.blocks * locals, threads, stream);
      if (c != kOk) return comm_.runtime_error(c, lead, "launching the exchange kernel", e);
      call.enqueued = true;
      if (locals == 1) continue;
      if (const int32_t s = comm_.record(call.lane[lead]->ready, lead, stream, e)) return s;
      for (int r = lead + 1; r < n; r++) {
        if (lead_[static_cast<size_t>(r)] != lead || call.parts[static_cast<size_t>(r)].stream == stream) continue;
        if (const int32_t s =
                comm_.await(join, r, call.parts[static_cast<size_t>(r)].stream, call.lane[lead]->ready, e))
          return s;
      }
    }
    return AR_OK;
  }

 private:
  static constexpr int kEarlyLaunch = 9;  // compute capability with programmatic dependent launch
  Comm& comm_;
  std::vector<int> lead_;
};

inline int64_t round_down(int64_t v, int64_t to) { return v / to * to; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Shares of at most `most` elements for each of k's blocks, in as few rounds as that takes, all but the last full.
template <class K>
void cut(K* k, int64_t count, int64_t most, int64_t unit) {
  k->share = most;
  k->rounds = static_cast<int>(divide_up(count, k->share * k->blocks));
  const int64_t rest = count - (k->rounds - 1) * k->share * k->blocks;
  k->last_share = divide_up(rest, k->blocks * unit) * unit;
}
// No more threads than packs: a smaller block starts sooner (0.1 us at 1 KiB).
inline int threads_for(int64_t packs) {
  return static_cast<int>(std::clamp<int64_t>(divide_up(packs, 32) * 32, 64, kExchangeThreads));
}

}  // namespace AR_NS
