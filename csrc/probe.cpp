// The proof of peer access for one ordered pair (allreduce.h, "probe"). Included by all_*.cpp behind devices.cpp, whose
// helpers it uses.
//
// Order of the steps: the control (the same through pinned memory, and a check that must fail), so that a machine or a probe
// that is broken elsewhere is told from broken peer access; then copy engine, SM stores, SM loads, messages; rates last.
// What was written is looked at by the owner, from its own memory: read back by the writer it proves nothing, since an
// aperture may mirror stores to whoever made them.
#include <chrono>

#include "kernels/probe.h"

namespace AR_NS {

namespace {

constexpr int64_t kProbeBytes = 4 << 20;
constexpr int64_t kSmallBytes = 16 << 10;  // of the buffer, that small steps look at
constexpr int kMessages = 200;
constexpr int64_t kRateBytes = 1 << 20;
constexpr int kRateCopies = 16;

// Everything of one probe; freed at its end.
class Probe {
 public:
  Probe(int from, int to, int timeout_ms) : device_{from, to} {
    timeout_ns_ = static_cast<uint64_t>(timeout_ms) * 1000000u;
  }
  ~Probe() {
    for (int s = 0; s < 2; s++) {
      set_device(device_[s]);
      if (stream_[s] != nullptr) {
        stream_synchronize(stream_[s]);
        stream_destroy(stream_[s]);
      }
      for (void* p : {buffer_[s], found_[s]})
        if (p != nullptr) free_device(p);
      for (Event e : events_[s]) event_destroy(e);
    }
    if (chunk_ != nullptr) event_destroy(chunk_);
    if (pinned_ != nullptr) free_pinned(pinned_);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  int32_t run(ar_probe_result* out, ar_error* e);

 private:
  static constexpr int64_t kFound = kProbeBlocks * kProbeThreads;  // records
  static constexpr int64_t kTalkBytes = 2 * kTalkVecs * 16 + 256;  // slots, then the flag

  // A window of bytes, and how it is stored: in so many bytes of the buffer.
  struct Window {
    int64_t lo, bytes;
    int wide;
    int64_t of;
  };

  Stream stream(int side) { return stream_[side]; }
  Code on(int side) { return set_device(device_[side]); }
  Code set_up();
  Code fill(int side, void* to, uint32_t seed, int64_t bytes) { return store(side, to, {0, bytes, 1, bytes}, seed); }
  Code store(int side, void* to, const Window& w, uint32_t seed) {
    const ProbeStore k{static_cast<uint32_t*>(to), w.lo / 4, w.bytes / 4, seed, w.wide};
    Code c = on(side);
    if (c == kOk) c = launch(k, kProbeBlocks, kProbeThreads, stream(side));
    return c == kOk ? stream_synchronize(stream(side)) : c;
  }
  Code check(int side, const void* from, const Window& w, uint32_t inside, uint32_t outside, ProbeFound* sum);
  Code collect(int side, int64_t records, ProbeFound* sum);
  Code talk(void* slots, void* flag, ProbeFound* sum, bool* silent, double* us);
  template <class Work>
  Code timed(int side, double* us, Work work);
  Code measure(ar_probe_result* out);
  bool note(ar_probe_result* out, Code c, const ProbeFound& f, const char* step, const Window& w);

  int device_[2];  // the one that accesses, the owner
  uint64_t timeout_ns_;
  Stream stream_[2] = {};
  void* buffer_[2] = {};
  void* found_[2] = {};
  Event events_[2][2] = {};
  Event chunk_ = nullptr;
  void* pinned_ = nullptr;
  char* pinned_device_ = nullptr;
  uint32_t seed_ = 1;
};

Code Probe::set_up() {
  Code c = malloc_pinned(&pinned_, static_cast<size_t>(kProbeBytes + 4096));
  void* seen = nullptr;
  if (c == kOk) c = host_to_device(&seen, pinned_);
  pinned_device_ = static_cast<char*>(seen);
  for (int s = 0; s < 2 && c == kOk; s++) {
    c = on(s);
    if (c == kOk) c = stream_create(&stream_[s]);
    if (c == kOk) c = malloc_device(&buffer_[s], static_cast<size_t>(kProbeBytes));
    if (c == kOk) c = malloc_device(&found_[s], static_cast<size_t>((kFound + 1) * 16));
    for (int k = 0; k < 2 && c == kOk; k++) c = event_create(&events_[s][k], true);
    // All loaded before one of them waits.
    if (c == kOk) c = load_kernel<ProbeStore>();
    if (c == kOk) c = load_kernel<ProbeCheck>();
    if (c == kOk) c = load_kernel<ProbeTalk>();
  }
  return c;
}

Code Probe::collect(int side, int64_t records, ProbeFound* sum) {
  std::vector<Vec16> all(static_cast<size_t>(records));
  Code c = on(side);
  if (c == kOk) c = stream_synchronize(stream(side));
  if (c == kOk) c = copy_blocking(all.data(), found_[side], all.size() * 16, CopyKind::device_to_host);
  *sum = ProbeFound();
  for (const Vec16& v : all) sum->add(v);
  return c;
}

Code Probe::check(int side, const void* from, const Window& w, uint32_t inside, uint32_t outside, ProbeFound* sum) {
  const ProbeCheck k{static_cast<const Vec16*>(from),  w.of / 4, w.lo, w.lo + w.bytes, inside, outside,
                     static_cast<Vec16*>(found_[side])};
  Code c = on(side);
  if (c == kOk) c = launch(k, kProbeBlocks, kProbeThreads, stream(side));
  return c == kOk ? collect(side, kFound, sum) : c;
}

// Messages through slots and flag, which both sides reach; acknowledgements through pinned memory.
Code Probe::talk(void* slots, void* flag, ProbeFound* sum, bool* silent, double* us) {
  auto* words = reinterpret_cast<uint32_t*>(pinned_device_ + kProbeBytes);
  std::memset(static_cast<char*>(pinned_) + kProbeBytes, 0, 4096);
  Code c = on(1);
  if (c == kOk && flag == static_cast<char*>(buffer_[1]) + kTalkBytes) c = fill_async(flag, 0, 128, stream(1));
  if (c == kOk) c = stream_synchronize(stream(1));
  ProbeTalk k{};
  k.slots = static_cast<Vec16*>(slots);
  k.flag = static_cast<uint32_t*>(flag);
  k.ack = words;
  k.limit = {words + 32, timeout_ns_};
  k.messages = kMessages;
  k.seed = ++seed_;
  k.found = static_cast<Vec16*>(found_[1]);
  if (c == kOk) c = launch(k, 1, kProbeThreads, stream(1));
  k.sender = 1;
  if (c == kOk) c = on(0);
  if (c == kOk) c = timed(0, us, [&] { return launch(k, 1, kProbeThreads, stream(0)); });
  if (c == kOk) c = collect(1, kProbeThreads + 1, sum);
  Vec16 last{};
  if (c == kOk) c = copy_blocking(&last, static_cast<Vec16*>(found_[1]) + kProbeThreads, 16, CopyKind::device_to_host);
  *silent = last.w[0] != 0;
  return c;
}

template <class Work>
Code Probe::timed(int side, double* us, Work work) {
  Code c = event_record(events_[side][0], stream(side));
  if (c == kOk) c = work();
  if (c == kOk) c = event_record(events_[side][1], stream(side));
  if (c == kOk) c = stream_synchronize(stream(side));
  if (c == kOk) c = event_elapsed_us(us, events_[side][0], events_[side][1]);
  return c;
}

// Rates of 1 MiB pieces one behind another: by peer copies, by stores of a kernel, and staged through pinned memory, where
// each piece's way down waits for its way up.
Code Probe::measure(ar_probe_result* out) {
  const auto gbs = [](double us) { return us > 0 ? static_cast<double>(kRateBytes) * kRateCopies / us / 1e3 : 0; };
  Event up[2] = {events_[1][0], events_[1][1]};  // no timing of side 1 goes on meanwhile
  Code c = on(0);
  double us = 0;
  for (int turn = 0; turn < 2 && c == kOk; turn++) {  // the first warms up
    c = timed(0, &us, [&] {
      Code bad = kOk;
      for (int i = 0; i < kRateCopies && bad == kOk; i++)
        bad = copy_async(buffer_[1], buffer_[0], kRateBytes, CopyKind::device_to_device, stream(0));
      return bad;
    });
    out->copy_gbs = gbs(us);
    const ProbeStore k{static_cast<uint32_t*>(buffer_[1]), 0, kProbeBytes / 4, 7, 1};
    if (c == kOk)
      c = timed(0, &us, [&] {
        Code bad = kOk;
        for (int64_t i = 0; i < kRateCopies * kRateBytes / kProbeBytes && bad == kOk; i++)
          bad = launch(k, kProbeBlocks, kProbeThreads, stream(0));
        return bad;
      });
    out->store_gbs = gbs(us);
    if (c == kOk)
      c = timed(0, &us, [&] {
        Code bad = kOk;
        char* const host = static_cast<char*>(pinned_);
        for (int i = 0; i < kRateCopies && bad == kOk; i++) {
          char* const piece = host + i % 4 * kRateBytes;
          if (i >= 4) bad = stream_wait(stream(0), up[i % 2]);  // this piece's place was read
          if (bad == kOk) bad = copy_async(piece, buffer_[0], kRateBytes, CopyKind::device_to_host, stream(0));
          if (bad == kOk) bad = event_record(chunk_, stream(0));
          if (bad == kOk) bad = stream_wait(stream(1), chunk_);
          if (bad == kOk) bad = copy_async(buffer_[1], piece, kRateBytes, CopyKind::host_to_device, stream(1));
          if (bad == kOk) bad = on(1);
          if (bad == kOk) bad = event_record(up[i % 2], stream(1));
          if (bad == kOk) bad = on(0);
        }
        return bad == kOk ? stream_wait(stream(0), up[(kRateCopies - 1) % 2]) : bad;
      });
    out->staged_gbs = gbs(us);
  }
  return c;
}

// True if the step passed; else the verdict is broken and says where.
bool Probe::note(ar_probe_result* out, Code c, const ProbeFound& f, const char* step, const Window& w) {
  if (c == kOk && f.bad == 0) return true;
  out->verdict = AR_PROBE_BROKEN;
  if (c != kOk)
    std::snprintf(out->detail, sizeof(out->detail), "%s, %lld bytes at offset %lld: %s", step,
                  static_cast<long long>(w.bytes), static_cast<long long>(w.lo), code_text(c));
  else
    std::snprintf(out->detail, sizeof(out->detail),
                  "%s, %lld bytes at offset %lld: %u words wrong, the first at byte %lld: %08x instead of %08x", step,
                  static_cast<long long>(w.bytes), static_cast<long long>(w.lo), f.bad,
                  4 * static_cast<long long>(f.at), f.got, f.want);
  return false;
}

int32_t Probe::run(ar_probe_result* out, ar_error* e) {
  Code c = set_up();
  if (c == kOk) c = on(0);
  if (c == kOk) c = event_create(&chunk_, false);
  if (c != kOk) return failed(c, device_[0], "preparing to probe", e);
  char* const far = static_cast<char*>(buffer_[1]);
  const auto inconclusive = [&](const char* what, Code code) {
    out->verdict = AR_PROBE_INCONCLUSIVE;
    std::snprintf(out->detail, sizeof(out->detail), "%s%s%s", what, code != kOk ? ": " : "",
                  code != kOk ? code_text(code) : "");
    return AR_OK;
  };

  // Control: a check that must fail, then copies, stores, loads and messages through pinned memory.
  ProbeFound f;
  const Window whole{0, kProbeBytes, 1, kProbeBytes};
  c = fill(1, far, 1, kProbeBytes);
  if (c == kOk) c = check(1, far, whole, 2, 1, &f);
  if (c != kOk || f.bad < kProbeBytes / 4 / 2) return inconclusive("the check finds nothing where nothing was sent", c);
  c = store(0, pinned_device_, whole, 3);
  if (c == kOk) c = check(1, pinned_device_, whole, 3, 0, &f);
  if (c != kOk || f.bad != 0) return inconclusive("the control through pinned memory failed: stores and loads", c);
  c = copy_async(far, pinned_, static_cast<size_t>(kProbeBytes), CopyKind::host_to_device, stream(1));
  if (c == kOk) c = check(1, far, whole, 3, 0, &f);
  if (c != kOk || f.bad != 0) return inconclusive("the control through pinned memory failed: copies", c);
  bool silent = false;
  double pinned_us = 0, peer_us = 0;
  c = talk(pinned_device_, pinned_device_ + kProbeBytes + 1024, &f, &silent, &pinned_us);
  if (c != kOk || f.bad != 0 || silent) return inconclusive("the control through pinned memory failed: messages", c);

  // Peer access: each step's window lies in a pattern that must stay as it is around it.
  c = enable_peer(device_[0], device_[1]);
  if (c != kOk) {
    out->verdict = AR_PROBE_UNSUPPORTED;
    std::snprintf(out->detail, sizeof(out->detail), "the driver refuses to enable it: %s", code_text(c));
    return AR_OK;
  }
  const Window copies[] = {
      {5, 1, 0, kSmallBytes}, {4099, 4099, 0, kSmallBytes}, {13, 3 * (1 << 20) + 7, 0, kProbeBytes}};
  for (const Window& w : copies) {
    const uint32_t around = ++seed_ * 16, in = around + 1;
    c = fill(1, far, around, w.of);
    if (c == kOk) c = fill(0, buffer_[0], in, w.of);
    if (c != kOk) return failed(c, device_[1], "preparing to probe", e);
    c = copy_async(far + w.lo, static_cast<char*>(buffer_[0]) + w.lo, static_cast<size_t>(w.bytes),
                   CopyKind::device_to_device, stream(0));
    if (c == kOk) c = stream_synchronize(stream(0));
    if (c == kOk) c = check(1, far, w, in, around, &f);
    if (!note(out, c, f, "copy engine write", w)) return AR_OK;
  }
  const Window stores[] = {
      {12, 4, 0, kSmallBytes}, {20, 4 * 1021, 0, kSmallBytes}, {48, 3 * (1 << 20) + 16, 1, kProbeBytes}};
  for (const Window& w : stores) {
    const uint32_t around = ++seed_ * 16, in = around + 1;
    c = fill(1, far, around, w.of);
    if (c != kOk) return failed(c, device_[1], "preparing to probe", e);
    c = store(0, far, w, in);
    if (c == kOk) c = check(1, far, w, in, around, &f);
    if (!note(out, c, f, "SM store", w)) return AR_OK;
  }
  const uint32_t seed = ++seed_ * 16;
  c = fill(1, far, seed, kProbeBytes);
  if (c != kOk) return failed(c, device_[1], "preparing to probe", e);
  c = check(0, far, whole, seed, 0, &f);
  if (!note(out, c, f, "SM load", whole)) return AR_OK;
  c = talk(far, far + kTalkBytes, &f, &silent, &peer_us);
  if (c == kOk && silent) {
    out->verdict = AR_PROBE_BROKEN;
    std::snprintf(out->detail, sizeof(out->detail), "messages: the flag of a message did not arrive within %llu ms",
                  static_cast<unsigned long long>(timeout_ns_ / 1000000));
    return AR_OK;
  }
  if (!note(out, c, f, "messages", {0, kTalkVecs * 16, 1, kTalkBytes})) return AR_OK;

  c = measure(out);
  if (c != kOk) return failed(c, device_[0], "measuring", e);
  out->latency_us = std::max(0.0, (peer_us - pinned_us / 2) / kMessages);
  const double slower = std::min(out->copy_gbs, out->store_gbs);
  out->verdict = slower < out->staged_gbs ? AR_PROBE_SLOW : AR_PROBE_OK;
  if (out->verdict == AR_PROBE_SLOW)
    std::snprintf(out->detail, sizeof(out->detail),
                  "right, but %s at %.1f GB/s where staging through the host reaches %.1f",
                  out->copy_gbs < out->store_gbs ? "copies" : "stores", slower, out->staged_gbs);
  return AR_OK;
}

}  // namespace

int32_t probe_pair(int32_t device, int32_t peer, int32_t timeout_ms, ar_probe_result* out, ar_error* e) {
  std::memset(out, 0, sizeof(*out));
  out->verdict = AR_PROBE_INCONCLUSIVE;
  int count = 0;
  Code c = device_count(&count);
  if (c != kOk) return failed(c, device, "counting devices", e);
  for (int32_t d : {device, peer})
    if (d < 0 || d >= count)
      return fail(e, AR_ERR_NO_DEVICE, {-1, d, 0}, "probing: there is no device %d, there are %d", d, count);
  if (device == peer)
    return fail(e, AR_ERR_ARGUMENT, {-1, device, 0}, "probing: device %d and its peer must be two", device);
  if (timeout_ms < 1 || timeout_ms > 3600000)
    return fail(e, AR_ERR_ARGUMENT, {}, "probing: timeout_ms %d; allowed: 1 to 3600000", timeout_ms);
  DeviceGuard guard;
  int can = 0;
  c = can_access_peer(&can, device, peer);
  if (c != kOk) return failed(c, device, "asking for peer access", e);
  if (!can) {
    out->verdict = AR_PROBE_UNSUPPORTED;
    std::snprintf(out->detail, sizeof(out->detail), "the driver denies it");
    return AR_OK;
  }
  Probe probe(device, peer, timeout_ms);
  return probe.run(out, e);
}

}  // namespace AR_NS
