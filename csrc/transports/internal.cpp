// `internal`: small reductions through mapped pinned host memory, one launch per GPU (protocol: kernels/exchange.h; two-shot:
// PushTwo of kernels/push.h, its rings in the receivers' pinned memory).
//
// Constants, measured on two H200 (PCIe 5 x16), 2026-11-30, in a graph: 16 blocks per rank (comm.cpp); LL words up to 64 KiB
// on the wire (there 8.3 us, plain stores with a flag per block 10.0), plain stores above (128 KiB: 12.3); 4 MiB of pinned
// memory per rank, larger payloads in rounds.
// A round costs 4.3 us, and from two on both directions are busy at once. Of 1.4 MiB each they win (one H200, a rank as its own
// peer, 2026-12-01, us by rounds; docs/performance.md): 1 MiB 45.8 in one, 46.5 in two; 2 MiB 78.5 in two, 85.1 in one; 4 MiB 138 in
// three, 162 in one; 8 MiB 246 in six, 317 in one.
// One-shot reads N-1 payloads at that rate, two-shot 2(N-1)/N and pays a second trip. Simulated, F32, one-shot / two-shot in us
// (2026-12-01; not measured on GPUs): 3 ranks 128 KiB 12.6 / 13.2, 508 KiB 39 / 37; 4 ranks 15.6 / 14.2, 51 / 41; 8 ranks
// 27.5 / 15.7, 98 / 47. So two-shot from four ranks on, where one-shot's plain stores would serve.
// Included by all_*.cpp.
#include "../kernels/exchange.h"
#include "../kernels/push.h"
#include "launches.h"

namespace AR_NS {

namespace {

constexpr int64_t kLLUpTo = 64 << 10;                      // wire bytes
constexpr int64_t kLLRegion = 256 << 10;                   // both slots: 64 KiB of data doubled by flags, twice
constexpr int64_t kPlainRegion = (3 << 20) + (512 << 10);  // both slots
constexpr int64_t kRoundBytes = (1 << 20) + (384 << 10);   // plain, on the wire; more is cut into several
constexpr int64_t kFlagRegion = kMaxBlocks * kFlagStride * static_cast<int64_t>(sizeof(uint32_t));
// Epochs of LL and of plain blocks, and the counter of signatures on a line of its own.
constexpr int64_t kEpochBytes = (2 * kMaxBlocks + 32) * static_cast<int64_t>(sizeof(uint32_t));
constexpr int kTwoShotFrom = 4;  // ranks; the plain region then holds the rings
constexpr int64_t kPinned = kLLRegion + kPlainRegion + kFlagRegion;
static_assert(kPinned <= kSharedInternal, "spec 2.1: at most 4 MiB pinned per GPU");

class Internal final : public Transport {
 public:
  explicit Internal(Comm& comm) : comm_(comm), launches_(comm), missing_(launches_.too_old("internal")) {
    if (comm.far()) missing_ = "path internal goes through memory of one host, and the ranks are on several";
  }

  const std::string& missing() const override { return missing_; }
  const char* refuses(int32_t type, int32_t wire, int32_t) const override {
    return with_types(type, wire, [](auto, auto) {}) ? nullptr : "there is no such kernel";
  }

  // Memory and kernels, both at once: the communicator calls this when it is made, so that nothing is loaded while a
  // kernel spins.
  int32_t prepare(int64_t, ar_error* e) override {
    if (ready_) return AR_OK;
    const int n = comm_.world();
    if (n == 1) return AR_OK;
    blocks_ = comm_.blocks();
    // No two blocks write one 128-byte line.
    ll_bytes_ = round_down(kLLRegion / 2 / blocks_, 128);
    plain_bytes_ = round_down(kPlainRegion / 2 / blocks_, 128);
    const int64_t ring_flags = kFlagKinds * (n - 1) * kMaxBlocks * kFlagStride * static_cast<int64_t>(sizeof(uint32_t));
    shape_.two_blocks = blocks_;
    shape_.two_bytes = round_down((kPlainRegion - ring_flags) / (2 * kTwoShotSlots * (n - 1) * blocks_), 128);
    const int64_t ring = kTwoShotSlots * (n - 1) * blocks_ * shape_.two_bytes;  // of either kind
    for (int r = 0; r < n; r++) {
      void* host = nullptr;
      void* device = nullptr;
      if (const int32_t s = comm_.staging(AR_PATH_INTERNAL, r, r * kSharedInternal, kPinned, &host, &device, e))
        return s;
      char* at = static_cast<char*>(device);
      wire_[r].ll = at;
      wire_[r].plain = at + kLLRegion;
      wire_[r].flags = reinterpret_cast<uint32_t*>(at + kLLRegion + kPlainRegion);
      ring_[r].scatter = wire_[r].plain;
      ring_[r].gather = ring_[r].scatter + ring;
      ring_[r].flags = reinterpret_cast<uint32_t*>(ring_[r].gather + ring);
      if (!comm_.local(r)) continue;
      std::memset(host, 0, kPinned);
      if (two_shot()) {
        auto* flags = reinterpret_cast<uint32_t*>(static_cast<char*>(host) + kLLRegion + 2 * ring);
        std::fill(flags, flags + ring_flags / static_cast<int64_t>(sizeof(uint32_t)), comm_.first_epoch());
      }
      if (comm_.first_epoch() != 0) {
        // As after so many epochs: the flags stand where the counters do.
        auto* flags = reinterpret_cast<uint32_t*>(static_cast<char*>(host) + kLLRegion + kPlainRegion);
        for (int b = 0; b < kMaxBlocks; b++) flags[b * kFlagStride] = comm_.first_epoch();
      }
      // Put there by a copy that has ended when this returns.
      void* epochs = nullptr;
      if (const int32_t s = comm_.allocate_device(r, kEpochBytes, &epochs, e)) return s;
      uint32_t first[kEpochBytes / sizeof(uint32_t)];
      for (uint32_t& f : first) f = comm_.first_epoch();
      const Code c = copy_blocking(epochs, first, sizeof(first), CopyKind::host_to_device);
      if (c != kOk) return comm_.runtime_error(c, r, "setting epochs", e);
      epochs_[r] = static_cast<uint32_t*>(epochs);
      comm_.set_counter(r, epochs_[r] + 2 * kMaxBlocks);
    }
    int resident[kMaxRanks];
    std::fill(resident, resident + kMaxRanks, 1 << 30);
    if (const int32_t s = launches_.load<Exchange>(resident, e)) return s;
    if (two_shot())
      if (const int32_t s = launches_.load<PushTwo>(resident, e)) return s;
    for (int r : comm_.locals()) {
      const int locals = launches_.locals(r);
      if (locals * blocks_ <= resident[r]) continue;
      missing_ = "path internal needs " + std::to_string(locals) + " ranks x " + std::to_string(blocks_) +
                 " blocks resident at once on device " + std::to_string(comm_.rank(r).device) + ", which holds " +
                 std::to_string(resident[r]);
      return AR_OK;
    }
    ready_ = true;
    return AR_OK;
  }

  int32_t enqueue(Call& call, ar_error* e) override {
    int32_t status = AR_OK;
    with_types(call.type, call.wire, [&](auto t, auto w) { status = enqueue_as<decltype(t), decltype(w)>(call, e); });
    return status;
  }

  void memory(int r, int64_t* device, int64_t* pinned) const override {
    if (wire_[r].ll == nullptr) return;
    *device = kEpochBytes;
    *pinned = kPinned;
  }

 private:
  bool two_shot() const { return comm_.world() >= kTwoShotFrom; }

  template <class T, class W>
  int32_t enqueue_two(Call& call, ar_error* e) {
    constexpr int64_t kPack = kPerVec<W>;
    const int n = comm_.world();
    PushTwo<T, W> k;
    std::memset(static_cast<void*>(&k), 0, sizeof(k));
    launches_.fill(call, &k);
    k.shape = shape_;
    for (int r = 0; r < n; r++) k.ring[r] = ring_[r];
    k.blocks = static_cast<int>(std::min<int64_t>(divide_up(divide_up(call.count, kPack), kExchangeThreads), blocks_));
    k.part = shape_.two_bytes / 16 * kPack;
    cut(&k, call.count, k.part * n, kPack * n);
    k.last_part = k.last_share / n;
    const int64_t packs = divide_up(k.rounds == 1 ? k.last_part : k.part, kPack);
    return launches_.launch_all(
        call, k, AR_PATH_INTERNAL, threads_for(packs), Order::internal_join,
        [&](int r) { return epochs_[r] + kMaxBlocks; }, e);
  }

  template <class T, class W>
  int32_t enqueue_as(Call& call, ar_error* e) {
    using K = Exchange<T, W>;
    constexpr int64_t wire_size = sizeof(typename W::Bits);
    const int n = comm_.world();
    const int64_t wire_bytes = call.count * wire_size;
    if (two_shot() && wire_bytes > kLLUpTo) return enqueue_two<T, W>(call, e);
    K k;
    std::memset(static_cast<void*>(&k), 0, sizeof(k));
    k.ll = wire_bytes <= kLLUpTo;
    const int64_t pack_bytes = k.ll ? 8 : 16;
    // Of wire data in one block's slot.
    const int64_t block_bytes = k.ll ? ll_bytes_ / 2 : std::min(plain_bytes_, kRoundBytes / blocks_);
    // As many blocks as give every thread one pack, but no fewer than hold the payload in one round.
    const int64_t wanted =
        std::max(divide_up(divide_up(wire_bytes, pack_bytes), kExchangeThreads), divide_up(wire_bytes, block_bytes));
    k.blocks = static_cast<int>(std::min<int64_t>(wanted, blocks_));
    k.slot_blocks = blocks_;
    // Shares are whole 16-byte packs, so that vectors stay aligned.
    constexpr int64_t kPack = kPerVec<W>;
    const int64_t most = block_bytes / 16 * kPack;
    // Rounds of equal length: the first store and the last read have nothing beside them.
    const int64_t rounds = divide_up(call.count, most * k.blocks);
    cut(&k, call.count, std::min(most, divide_up(divide_up(call.count, rounds * k.blocks), kPack) * kPack), kPack);
    launches_.fill(call, &k);
    k.ll_bytes = ll_bytes_;
    k.plain_bytes = plain_bytes_;
    for (int r = 0; r < n; r++) k.wire[r] = wire_[r];

    const int64_t packs = divide_up((k.rounds == 1 ? k.last_share : k.share) * wire_size, pack_bytes);
    return launches_.launch_all(
        call, k, AR_PATH_INTERNAL, threads_for(packs), Order::internal_join,
        [&](int r) { return epochs_[r] + (k.ll ? 0 : kMaxBlocks); }, e);
  }

  Comm& comm_;
  const Launches launches_;
  std::string missing_;
  bool ready_ = false;
  int blocks_ = 0;
  int64_t ll_bytes_ = 0, plain_bytes_ = 0;
  Wire wire_[kMaxRanks] = {};
  uint32_t* epochs_[kMaxRanks] = {};
  RingShape shape_{};  // two-shot
  PeerRing ring_[kMaxRanks] = {};
};

}  // namespace

std::unique_ptr<Transport> make_internal(Comm& comm) { return std::make_unique<Internal>(comm); }

}  // namespace AR_NS
