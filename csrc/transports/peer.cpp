// `peer`: direct stores into the peers' memory where peer access is proven, one launch per GPU (protocol: kernels/push.h).
//
// Constants. The figures are the prototype's, two H200 over NVLink, 2026-11-30, in a graph, until this is measured:
//   LL words up to 64 KiB on the wire: 1 KiB 2.9 us, 16 KiB 3.3 us, where plain stores with flags take 4.5.
//   Blocks of the plain ways: 16 serve up to 1 MiB on the wire (8.3 us), 128 are needed from 4 MiB (18.4 us; 376 GB/s).
//   A block's slot holds 48 KiB: at its 128th of 376 GB/s that takes 16 us, against about 2 us of fence and flag; four slots
//     of 128 blocks are 24 MiB with two ranks, so that everything stays under 32 MiB.
//   One-shot up to kTwoShotBytes / ((N-1)(1-2/N)) with three ranks and more: what a second trip costs, 1.5 us at 376 GB/s
//     (research/peers.md 4.5): 846 kB with 3 ranks, 376 kB with 4, 107 kB with 8. Two ranks: always.
// A variant that writes into the peers' tensors without a ring, and one with copy engines, have their place here: another
// mode of enqueue. Neither exists until it is measured better.
// Included by all_*.cpp.
#include "../kernels/probe.h"
#include "../kernels/push.h"
#include "launches.h"

namespace AR_NS {

namespace {

constexpr int64_t kPeerLLUpTo = 64 << 10;  // wire bytes
constexpr int kPeerLLBlocks = 16;          // one word for each thread of them
constexpr int kFewBlocks = 16;
constexpr int64_t kFewBlocksUpTo = 1 << 20;          // wire bytes
constexpr int64_t kBytesPerBlock = 32 << 10;         // beyond: 128 blocks from 4 MiB
constexpr int64_t kOneShotSlotBytes = 48 << 10;      // of a block with two ranks
constexpr int64_t kOneShotSlotBytesMany = 16 << 10;  // with more, where one-shot is for small payloads
constexpr int64_t kTwoShotSlotBytes = 16 << 10;
constexpr int64_t kTwoShotBudget = 20 << 20;  // of slots, so that eight ranks stay under 32 MiB
constexpr double kTwoShotBytes = 1.5e-6 * 376e9;
constexpr int64_t kRingAlign = 128;       // no two blocks write one line
constexpr int64_t kCheckBytes = 1 << 20;  // of what a rank stores in another process's memory before the path is used

class Peer final : public Transport {
 public:
  Peer(Comm& comm, bool allowed) : comm_(comm), launches_(comm) {
    missing_ = launches_.too_old("peer");
    if (!allowed) missing_ = "peer access is neither proven nor trusted";
    if (comm.world() == 1) missing_ = "one rank has no peers";
    if (comm.far()) missing_ = "path peer stores into memory of one host, and the ranks are on several";
    for (int r : comm.locals())
      for (int q : comm.locals()) {
        if (!missing_.empty()) break;
        const int a = comm.rank(r).device, b = comm.rank(q).device;
        int can = a == b;
        if (a != b && can_access_peer(&can, a, b) != kOk) can = 0;
        if (!can)
          missing_ =
              "the driver denies device " + std::to_string(a) + " access to the memory of device " + std::to_string(b);
      }
  }

  const std::string& missing() const override { return missing_; }
  const char* refuses(int32_t type, int32_t wire, int32_t) const override {
    return with_types(type, wire, [](auto, auto) {}) ? nullptr : "there is no such kernel";
  }

  // All at once, when the communicator is made: nothing is loaded or enabled while a kernel spins. What cannot be had makes
  // the path missing; nothing else is lost.
  int32_t prepare(int64_t, ar_error* e) override {
    if (ready_) return AR_OK;
    const size_t mark = comm_.storage_mark();
    ar_error why;
    clear(&why);
    int32_t s = set_up(&why);
    if (s == AR_OK) {
      ready_ = exported_ = missing_.empty();
      if (comm_.split() && exported_) missing_ = "the memory of the other processes is not opened yet";
      return AR_OK;
    }
    comm_.storage_rollback(mark);
    std::fill(ring_bytes_, ring_bytes_ + kMaxRanks, 0);
    if (s == AR_ERR_DEVICE_LOST || s == AR_ERR_DEADLOCK) {
      if (e != nullptr) *e = why;
      return s;
    }
    missing_ = why.message;
    return AR_OK;
  }

  // Across processes: the ring of a rank of this one, and how many blocks its device holds at once.
  int32_t export_memory(int r, uint8_t* handle, ar_error* e) override {
    if (!exported_) return fail(e, AR_ERR_UNSUPPORTED, {r, -1, 0}, "%s", missing_.c_str());
    Handle h{};
    Code c = set_device(comm_.rank(r).device);
    if (c == kOk) c = ipc_export(base_[r], h.memory);
    if (c != kOk)
      return fail(e, AR_ERR_UNSUPPORTED, {r, comm_.rank(r).device, c}, "rank %d cannot export its memory: %s", r,
                  code_text(c));
    h.bytes = ring_bytes_[r];
    h.blocks = blocks_;
    std::memcpy(handle, &h, sizeof(h));
    return AR_OK;
  }
  int32_t import_memory(const uint8_t* handles, ar_error* e) override {
    if (!exported_ || opened_) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing_.c_str());
    const size_t mark = comm_.storage_mark();
    const int32_t s = open_rings(handles, e);
    if (s == AR_OK) {
      comm_.note_opened();
      opened_ = true;
      missing_ = "the memory of the other processes is not checked yet";
      return AR_OK;
    }
    comm_.storage_rollback(mark);
    if (e != nullptr) missing_ = e->message;
    return s;
  }

  // The driver opened a handle: whether what is stored behind it arrives, the owner says. Only plain slots are written,
  // which promise nothing about what is in them.
  int32_t check_memory(bool look, ar_error* e) override {
    if (!opened_) return fail(e, AR_ERR_UNSUPPORTED, {}, "%s", missing_.c_str());
    for (int r : comm_.locals())
      for (int q = 0; q < comm_.world(); q++) {
        if (q == r) continue;
        const int32_t s = look ? check_pattern(r, q, e) : store_pattern(r, q, e);
        if (s == AR_OK) continue;
        if (e != nullptr) missing_ = e->message;
        opened_ = false;
        return s;
      }
    if (look) missing_.clear();
    return AR_OK;
  }

  int32_t enqueue(Call& call, ar_error* e) override {
    int32_t status = AR_OK;
    with_types(call.type, call.wire, [&](auto t, auto w) { status = enqueue_as<decltype(t), decltype(w)>(call, e); });
    return status;
  }

  void memory(int r, int64_t* device, int64_t*) const override { *device = ring_bytes_[r]; }

 private:
  int lanes() const { return comm_.world() - 1; }

  int32_t set_up(ar_error* e) {
    const int n = comm_.world();
    int resident[kMaxRanks];
    std::fill(resident, resident + kMaxRanks, 1 << 30);
    if (const int32_t s = launches_.load<Push>(resident, e)) return s;
    if (n >= 3)
      if (const int32_t s = launches_.load<PushTwo>(resident, e)) return s;
    blocks_ = comm_.blocks_asked() != 0 ? comm_.blocks_asked() : kMaxBlocks;
    for (int r : comm_.locals()) {
      if (!launches_.leads(r)) continue;
      blocks_ = std::min(blocks_, resident[r] / launches_.locals(r));
      if (blocks_ > 0) continue;
      missing_ = "device " + std::to_string(comm_.rank(r).device) + " holds " + std::to_string(resident[r]) +
                 " blocks at once, for " + std::to_string(launches_.locals(r)) + " ranks";
      return AR_OK;
    }
    for (int r : comm_.locals())
      for (int q : comm_.locals()) {
        const int a = comm_.rank(r).device, b = comm_.rank(q).device;
        if (a == b) continue;
        const Code c = enable_peer(a, b);
        if (c != kOk)
          return fail(e, AR_ERR_RUNTIME, {r, a, c}, "device %d was refused access to the memory of device %d: %s", a, b,
                      code_text(c));
      }
    const int64_t bytes = lay_out();
    const double crossover = n == 2 ? 1e18 : kTwoShotBytes / ((n - 1) * (1 - 2.0 / n));
    one_shot_up_to_ = static_cast<int64_t>(crossover);
    for (int r : comm_.locals()) {
      void* ring = nullptr;
      if (const int32_t s = comm_.allocate_device(r, bytes, &ring, e, comm_.split())) return s;
      base_[r] = static_cast<char*>(ring);
      place_ring(r);
      epochs_[r] = reinterpret_cast<uint32_t*>(base_[r] + kFlagKinds * lanes() * kFlagBytes);
      // LL words of no epoch; flags and epochs as after first_epoch shares. Copies that have ended when they return.
      std::vector<char> zeros(static_cast<size_t>(ll_bytes()));
      std::vector<uint32_t> first(static_cast<size_t>(counts_bytes()) / sizeof(uint32_t), comm_.first_epoch());
      Code c = copy_blocking(base_[r], first.data(), first.size() * sizeof(uint32_t), CopyKind::host_to_device);
      if (c == kOk) c = copy_blocking(ring_[r].ll, zeros.data(), zeros.size(), CopyKind::host_to_device);
      if (c != kOk) return comm_.runtime_error(c, r, "setting flags and epochs", e);
      ring_bytes_[r] = bytes;
    }
    return AR_OK;
  }

  // A ring: flags and epochs, whose size does not depend on the number of blocks, LL words, then the plain slots. Gives its
  // size with blocks_ blocks.
  int64_t lay_out() {
    const int n = comm_.world();
    shape_.ll_blocks = std::min(blocks_, kPeerLLBlocks);
    shape_.ll_bytes = 2 * kPeerLLUpTo / kPeerLLBlocks;
    shape_.one_blocks = n == 2 ? blocks_ : std::min(blocks_, kFewBlocks);
    shape_.one_bytes = n == 2 ? kOneShotSlotBytes : kOneShotSlotBytesMany;
    shape_.two_blocks = n == 2 ? 0 : blocks_;
    shape_.two_bytes =
        std::min(kTwoShotSlotBytes, round_down(kTwoShotBudget / (2 * kTwoShotSlots * lanes() * blocks_), kRingAlign));
    return counts_bytes() + ll_bytes() + one_bytes() + 2 * two_bytes();
  }
  int64_t counts_bytes() const {
    return kFlagKinds * (lanes() * kFlagBytes + kMaxBlocks * static_cast<int64_t>(sizeof(uint32_t)));
  }
  int64_t ll_bytes() const { return 2 * lanes() * shape_.ll_blocks * shape_.ll_bytes; }
  int64_t one_bytes() const { return kOneShotSlots * lanes() * shape_.one_blocks * shape_.one_bytes; }
  int64_t two_bytes() const { return kTwoShotSlots * lanes() * shape_.two_blocks * shape_.two_bytes; }
  void place_ring(int r) {
    ring_[r].flags = reinterpret_cast<uint32_t*>(base_[r]);
    ring_[r].ll = base_[r] + counts_bytes();
    ring_[r].one = ring_[r].ll + ll_bytes();
    ring_[r].scatter = ring_[r].one + one_bytes();
    ring_[r].gather = ring_[r].scatter + two_bytes();
  }

  // The rings of the other processes' ranks. All ranks use as many blocks as the smallest device holds.
  int32_t open_rings(const uint8_t* handles, ar_error* e) {
    const int n = comm_.world();
    Handle all[kMaxRanks];
    for (int r = 0; r < n; r++) {
      std::memcpy(&all[r], handles + r * AR_PEER_HANDLE_BYTES, sizeof(Handle));
      if (all[r].blocks < 1 || all[r].blocks > kMaxBlocks)
        return fail(e, AR_ERR_ARGUMENT, {r, -1, 0}, "what rank %d exported is no handle", r);
      blocks_ = std::min(blocks_, static_cast<int>(all[r].blocks));
    }
    const int64_t bytes = lay_out();
    for (int r = 0; r < n; r++) {
      if (all[r].bytes < bytes)
        return fail(e, AR_ERR_UNSUPPORTED, {r, -1, 0},
                    "rank %d has a ring of %lld bytes, %lld are needed for %d blocks", r,
                    static_cast<long long>(all[r].bytes), static_cast<long long>(bytes), blocks_);
      if (!comm_.local(r)) {
        void* ring = nullptr;
        if (const int32_t s = comm_.open_exported(comm_.locals()[0], r, all[r].memory, &ring, e)) return s;
        base_[r] = static_cast<char*>(ring);
      }
      place_ring(r);
    }
    return AR_OK;
  }

  // Of what `sender` stores for `receiver`.
  struct Pattern {
    char* at;
    int64_t bytes;
    uint32_t seed;
  };
  Pattern pattern(int receiver, int sender) const {
    const int64_t mine = round_down(one_bytes() / lanes(), kRingAlign);
    return {ring_[receiver].one + ring_lane(receiver, sender) * mine, std::min(mine, kCheckBytes),
            static_cast<uint32_t>(receiver * kMaxRanks + sender + 1)};
  }
  template <class K>
  int32_t run_alone(int r, const K& k, ar_error* e) {
    Stream stream = nullptr;
    Code c = stream_create(&stream);
    if (c == kOk) c = launch(k, kProbeBlocks, kProbeThreads, stream);
    if (c == kOk) c = stream_synchronize(stream);
    if (stream != nullptr) stream_destroy(stream);
    return c == kOk ? AR_OK : comm_.runtime_error(c, r, "checking the memory of the other processes", e);
  }
  int32_t store_pattern(int r, int q, ar_error* e) {
    const Pattern p = pattern(q, r);
    Code c = set_device(comm_.rank(r).device);
    if (c != kOk) return comm_.runtime_error(c, r, "setting the device", e);
    return run_alone(r, ProbeStore{reinterpret_cast<uint32_t*>(p.at), 0, p.bytes / 4, p.seed, 1}, e);
  }
  int32_t check_pattern(int r, int q, ar_error* e) {
    const Pattern p = pattern(r, q);
    std::vector<Vec16> records(static_cast<size_t>(kProbeBlocks * kProbeThreads));
    void* found = nullptr;
    Code c = set_device(comm_.rank(r).device);
    if (c == kOk) c = malloc_device(&found, records.size() * sizeof(Vec16));
    if (c != kOk) return comm_.runtime_error(c, r, "memory for a check", e);
    const ProbeCheck k{
        reinterpret_cast<const Vec16*>(p.at), p.bytes / 4, 0, p.bytes, p.seed, 0, static_cast<Vec16*>(found)};
    const int32_t s = run_alone(r, k, e);
    if (s == AR_OK) c = copy_blocking(records.data(), found, records.size() * sizeof(Vec16), CopyKind::device_to_host);
    free_device(found);
    if (s != AR_OK) return s;
    if (c != kOk) return comm_.runtime_error(c, r, "reading what a check found", e);
    ProbeFound sum;
    for (const Vec16& v : records) sum.add(v);
    if (sum.bad == 0) return AR_OK;
    return fail(
        e, AR_ERR_UNSUPPORTED, {r, comm_.rank(r).device, 0},
        "what rank %d stores in the memory of rank %d does not arrive: %u of %lld words are wrong, the first at "
        "byte %u: 0x%08x, not 0x%08x",
        q, r, sum.bad, static_cast<long long>(p.bytes / 4), sum.at * 4, sum.got, sum.want);
  }

  template <class K>
  void describe(const Call& call, K* k) const {
    std::memset(static_cast<void*>(k), 0, sizeof(*k));
    launches_.fill(call, k);
    k->shape = shape_;
    for (int r = 0; r < comm_.world(); r++) k->ring[r] = ring_[r];
  }

  static int64_t plain_blocks(int64_t wire_bytes) {
    const int64_t packs = divide_up(wire_bytes, 16);
    return wire_bytes <= kFewBlocksUpTo ? std::min<int64_t>(kFewBlocks, divide_up(packs, kExchangeThreads))
                                        : divide_up(wire_bytes, kBytesPerBlock);
  }

  template <class T, class W>
  int32_t enqueue_as(Call& call, ar_error* e) {
    constexpr int64_t wire_size = sizeof(typename W::Bits);
    constexpr int64_t kPack = kPerVec<W>;  // shares are whole 16-byte packs, so that vectors stay aligned
    const int64_t wire_bytes = call.count * wire_size;
    if (wire_bytes > std::max(one_shot_up_to_, kPeerLLUpTo)) {
      const int n = comm_.world();
      PushTwo<T, W> k;
      describe(call, &k);
      k.blocks = static_cast<int>(std::min<int64_t>(plain_blocks(wire_bytes), blocks_));
      k.part = shape_.two_bytes / 16 * kPack;
      cut(&k, call.count, k.part * n, kPack * n);
      k.last_part = k.last_share / n;
      const int64_t packs = divide_up(k.rounds == 1 ? k.last_part : k.part, kPack);
      return launches_.launch_all(
          call, k, AR_PATH_PEER, threads_for(packs), Order::peer_join,
          [&](int r) { return epochs_[r] + kFlagScatter * kMaxBlocks; }, e);
    }
    Push<T, W> k;
    describe(call, &k);
    k.ll = wire_bytes <= kPeerLLUpTo;
    const int64_t pack_bytes = k.ll ? 8 : 16;
    // With LL words as many blocks as give every thread one.
    const int64_t wanted = k.ll ? divide_up(divide_up(wire_bytes, 8), kExchangeThreads) : plain_blocks(wire_bytes);
    k.blocks = static_cast<int>(std::min<int64_t>(wanted, k.ll ? shape_.ll_blocks : shape_.one_blocks));
    cut(&k, call.count, (k.ll ? shape_.ll_bytes / 2 : shape_.one_bytes) / wire_size, kPack);
    const int64_t packs = divide_up((k.rounds == 1 ? k.last_share : k.share) * wire_size, pack_bytes);
    return launches_.launch_all(
        call, k, AR_PATH_PEER, threads_for(packs), Order::peer_join,
        [&](int r) { return epochs_[r] + (k.ll ? kFlagGather : kFlagOneShot) * kMaxBlocks; }, e);
  }

  // What a process gives the others for one of its ranks.
  struct Handle {
    uint8_t memory[ar::kIpcBytes];
    int64_t bytes;
    int32_t blocks;
  };
  static_assert(sizeof(Handle) <= AR_PEER_HANDLE_BYTES, "allreduce.h says so");
  static constexpr int64_t kFlagBytes = kMaxBlocks * kFlagStride * static_cast<int64_t>(sizeof(uint32_t));  // a lane's

  Comm& comm_;
  const Launches launches_;
  std::string missing_;
  bool ready_ = false;
  bool exported_ = false;  // rings are there, of this process's ranks
  bool opened_ = false;    // and of those of the others
  char* base_[kMaxRanks] = {};
  int blocks_ = 0;
  int64_t one_shot_up_to_ = 0;  // wire bytes
  RingShape shape_{};
  PeerRing ring_[kMaxRanks] = {};
  uint32_t* epochs_[kMaxRanks] = {};  // of the one-shot, two-shot and LL ways, kMaxBlocks each
  int64_t ring_bytes_[kMaxRanks] = {};
};

}  // namespace

std::unique_ptr<Transport> make_peer(Comm& comm, bool allowed) { return std::make_unique<Peer>(comm, allowed); }

}  // namespace AR_NS
