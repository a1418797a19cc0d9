// A machine of emulated devices with one communicator, tensors with awkward values, and an independent reference.
// Everything goes through the public C API.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "include/allreduce.h"
#include "include/allreduce_emulated.h"

namespace rig {

// AR_TEST_BACKEND=cuda runs the same tests on real GPUs; schedules and seeds then only vary the data. Tests of what only
// emulated devices have define RIG_EMULATED_ONLY.
inline int backend() {
#ifdef RIG_EMULATED_ONLY
  return AR_BACKEND_EMULATED;
#endif
  const char* v = std::getenv("AR_TEST_BACKEND");
  return v != nullptr && std::string(v) == "cuda" ? AR_BACKEND_CUDA : AR_BACKEND_EMULATED;
}
inline int device_count() {
  int32_t n = 0;
  ar_device_count(backend(), &n, nullptr);
  return n;
}
inline const int B = backend();

inline void expect_ok(int32_t status, const ar_error& e, const char* what) {
  ASSERT_EQ(status, AR_OK) << what << ": " << e.message << "\n" << ar_emulated_report();
}

// ---- reference: written for clarity, shares nothing with csrc ------------------------------------------------------

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
// Rounds to nearest even in double precision, where scaling is exact: nothing like the library's way.
inline uint16_t narrow(float f, int exponent_bits, int fraction_bits) {
  if (std::isnan(f)) return 0x7FFF;
  const int sign = std::signbit(f) ? 0x8000 : 0;
  const double a = std::fabs(static_cast<double>(f));
  if (a == 0) return static_cast<uint16_t>(sign);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int inf = ((1 << exponent_bits) - 1) << fraction_bits;
  if (std::isinf(f)) return static_cast<uint16_t>(sign | inf);
  const int ex = std::max(std::ilogb(a), 1 - bias);
  const double units = std::nearbyint(std::ldexp(a, fraction_bits - ex));
  // A carry into the next power of two carries into the exponent by itself; below 2^fraction_bits it is a subnormal.
  const int code = (ex + bias - 1) * (1 << fraction_bits) + static_cast<int>(units);
  return static_cast<uint16_t>(sign | std::min(code, inf));
}
inline float widen(uint16_t h, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t ex = (h >> fraction_bits) & ((1u << exponent_bits) - 1), fr = h & ((1u << fraction_bits) - 1);
  double v;
  if (ex == (1u << exponent_bits) - 1)
    v = fr != 0 ? NAN : INFINITY;
  else if (ex == 0)
    v = std::ldexp(static_cast<double>(fr), 1 - bias - fraction_bits);
  else
    v = std::ldexp(static_cast<double>(fr + (1u << fraction_bits)), static_cast<int>(ex) - bias - fraction_bits);
  return static_cast<float>((h & 0x8000) != 0 ? -v : v);
}
inline uint32_t encode(float f, int type) {
  if (type == AR_F32) return std::isnan(f) ? 0x7FFFFFFFu : float_to_bits(f);
  return type == AR_F16 ? narrow(f, 5, 10) : narrow(f, 8, 7);
}
inline float decode(uint32_t u, int type) {
  if (type == AR_F32) return bits_to_float(u);
  return type == AR_F16 ? widen(static_cast<uint16_t>(u), 5, 10) : widen(static_cast<uint16_t>(u), 8, 7);
}
inline uint32_t reference(const std::vector<uint32_t>& in, const std::vector<bool>& absent, int type, int wire,
                          int op) {
  float acc = 0;
  for (size_t r = 0; r < in.size(); r++) {
    const float v = absent[r] ? 0.0f : decode(encode(decode(in[r], type), wire), wire);
    acc = r == 0 ? v : acc + v;
  }
  if (op == AR_AVG) acc = acc / static_cast<float>(in.size());
  if (in.size() >= 3 && wire != type) acc = decode(encode(acc, wire), wire);
  return encode(acc, type);
}

// ---- tensors ------------------------------------------------------------------------------------------------------

inline uint32_t awkward(std::mt19937_64& rng, int type) {
  static const float special[] = {0.0f,  -0.0f,    INFINITY, -INFINITY, NAN,       1e-45f,         -1e-40f,
                                  3e38f, -3.4e38f, 65504.f,  65520.f,   0x1.01p0f, 1.17549435e-38f};
  const uint64_t x = rng();
  if (x % 16 == 0) return encode(special[(x >> 8) % (sizeof(special) / sizeof(special[0]))], type);
  if (x % 16 == 1 && type == AR_F32) return static_cast<uint32_t>(x >> 32);  // any bits at all
  std::normal_distribution<float> normal(0, 1);
  return encode(normal(rng), type);
}

struct Case {
  int path = AR_PATH_INTERNAL, type = AR_F32, wire = AR_F32, op = AR_SUM;
  int64_t count = 0;
  bool in_place = false;
  int offset = 0;  // elements past a 256-byte boundary
  int rows = 0;
  int pad = 0;       // elements between rows
  bool fed = false;  // inputs arrive, and results leave, by copies on the same streams, as in a real program
  std::vector<bool> absent;
};

struct Machine {
  int schedule = AR_SCHEDULE_FIFO;
  uint64_t seed = 1;
  int drive = AR_DRIVE_STEPPED;
  int devices = 2;
  std::function<void(ar_emulated_machine&)> tweak;  // of the emulated machine, before it is made
  bool peers = false;                               // peer access between all devices, and path peer
  std::vector<double> links;                        // GB/s by rank, as the communicator is told; empty: not told
};

class Rig {
 public:
  Rig(const Machine& m, int ranks, int64_t ring = 1 << 20, int64_t chunk = 64 << 10, int blocks = 0, int timeout_ms = 0,
      uint32_t first_epoch = 0)
      : ranks_(ranks), rng_(m.seed * 7919 + 13) {
    int count = m.devices;
    if (B == AR_BACKEND_EMULATED) {
      ar_emulated_machine machine;
      ar_emulated_defaults(&machine, m.devices);
      machine.drive = m.drive;
      machine.schedule = m.schedule;
      machine.seed = m.seed;
      machine.lifetimes = 1;
      for (int a = 0; m.peers && a < m.devices; a++)
        for (int b = 0; b < m.devices; b++) machine.peer[a][b] = a != b;
      if (m.tweak) m.tweak(machine);
      expect_ok(ar_emulated_configure(&machine, 1, &e), e, "configure");
    } else {
      count = std::min(count, device_count());  // fewer GPUs than asked for: ranks share them
      if (count < 1) {
        std::fprintf(stderr, "AR_TEST_BACKEND=cuda, and this machine has no GPU\n");
        std::exit(1);
      }
    }
    for (int r = 0; r < ranks; r++) devices_.push_back(r % count);
    ar_options& o = options_;
    o.size = sizeof(o);
    o.backend = B;
    o.world = ranks;
    o.devices = devices_.data();
    o.ring_bytes = ring;
    o.chunk_bytes = chunk;
    o.blocks = blocks;
    // compute-sanitizer slows kernels a hundredfold.
    o.spin_timeout_ms = timeout_ms == 0 && B == AR_BACKEND_CUDA ? 120000 : timeout_ms;
    o.first_epoch = first_epoch;
    o.peer = m.peers;
    if (!m.links.empty()) o.link_gbs = m.links.data();
    expect_ok(ar_comm_create(&o, &comm, &e), e, "create");
    streams.resize(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; r++)
      expect_ok(ar_stream_create(B, device(r), &streams[static_cast<size_t>(r)], &e), e, "stream");
  }
  ~Rig() {
    ar_comm_free(comm);
    for (auto& [d, p] : owned_) ar_device_free(B, d, p, &e);
    for (auto* events : {&events_, &other_events_})
      for (size_t r = 0; r < events->size(); r++) ar_event_destroy(B, devices_[r], (*events)[r], &e);
    for (int r = 0; r < ranks_; r++) ar_stream_destroy(B, device(r), streams[static_cast<size_t>(r)], &e);
  }
  // Another communicator on the same devices; nothing of the one before is left.
  void renew() {
    ar_comm_free(comm);
    if (B == AR_BACKEND_EMULATED) {
      // What was in flight when Close gave up waiting for it (200 ms) the reaper frees: seen on a busy machine.
      for (int i = 0; i < 300 && ar_emulated_live_objects() != own_objects(); i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      EXPECT_EQ(ar_emulated_live_objects(), own_objects()) << "of a closed communicator";
    }
    expect_ok(ar_comm_create(&options_, &comm, &e), e, "create");
  }
  // What this has made beside the communicator.
  int64_t own_objects() const {
    return static_cast<int64_t>(owned_.size() + streams.size() + events_.size() + other_events_.size());
  }
  // For streams left in an invalid capture.
  void renew_streams() {
    for (int r = 0; r < ranks_; r++) {
      ar_stream_destroy(B, device(r), streams[static_cast<size_t>(r)], &e);
      expect_ok(ar_stream_create(B, device(r), &streams[static_cast<size_t>(r)], &e), e, "stream");
      for (Tensor& t : tensors_) t.bufs[static_cast<size_t>(r)].stream = streams[static_cast<size_t>(r)];
    }
  }
  int device(int r) const { return devices_[static_cast<size_t>(r)]; }
  int ranks() const { return ranks_; }

  // Tensors of one call, filled; returns an index.
  size_t make(Case c) {
    if (c.absent.empty()) c.absent.assign(static_cast<size_t>(ranks_), false);
    Tensor t;
    t.c = c;
    const int size = ar_type_size(c.type);
    const int64_t cols = c.rows > 1 ? c.count / c.rows : c.count;
    const int64_t pitch = (cols + c.pad) * size;
    t.extent = c.rows > 1 ? pitch * (c.rows - 1) + cols * size : c.count * size;
    for (int r = 0; r < ranks_; r++) {
      // Not a byte more than the tensor: what reaches past it is found.
      const int64_t bytes = std::max<int64_t>(t.extent + c.offset * size, 1);
      const ar_ptr base = memory(r, bytes);
      const ar_ptr out = c.in_place ? 0 : memory(r, bytes);
      t.input.push_back(c.fed ? memory(r, std::max<int64_t>(t.extent, 1)) : 0);
      t.output.push_back(c.fed ? memory(r, std::max<int64_t>(t.extent, 1)) : 0);
      ar_buffer b{};
      b.send = base + static_cast<ar_ptr>(c.offset * size);
      b.recv = c.in_place ? b.send : out + static_cast<ar_ptr>(c.offset * size);
      b.count = c.count;
      b.type = c.type;
      b.op = c.op;
      b.stream = streams[static_cast<size_t>(r)];
      b.absent = c.absent[static_cast<size_t>(r)];
      b.rows = c.rows;
      b.send_pitch = b.recv_pitch = c.rows > 1 ? pitch : 0;
      t.bufs.push_back(b);
    }
    tensors_.push_back(t);
    refill(tensors_.size() - 1);
    return tensors_.size() - 1;
  }
  // As in a program: input and result pass through copies on the same streams.
  size_t make_fed(int path, int wire, int64_t count, bool in_place = false) {
    Case c;
    c.path = path;
    c.wire = wire;
    c.count = count;
    c.in_place = in_place;
    c.fed = true;
    return make(c);
  }
  void refill(size_t i) {
    Tensor& t = tensors_[i];
    t.in.assign(static_cast<size_t>(ranks_), {});
    for (int r = 0; r < ranks_; r++) {
      auto& in = t.in[static_cast<size_t>(r)];
      std::vector<unsigned char> bytes(static_cast<size_t>(t.extent), 0xEE);
      const int size = ar_type_size(t.c.type);
      for (int64_t k = 0; k < t.c.count; k++) {
        in.push_back(awkward(rng_, t.c.type));
        std::memcpy(&bytes[static_cast<size_t>(at(t, k))], &in.back(), static_cast<size_t>(size));
      }
      const ar_ptr to = t.c.fed ? t.input[static_cast<size_t>(r)] : t.bufs[static_cast<size_t>(r)].send;
      expect_ok(ar_copy_to_device(B, device(r), to, bytes.data(), t.extent, &e), e, "fill");
    }
  }
  int32_t call(size_t i) {
    const Tensor& t = tensors_[i];
    for (size_t r = 0; t.c.fed && r < t.bufs.size(); r++)
      ar_copy_async(B, devices_[r], t.bufs[r].send, t.input[r], t.extent, t.bufs[r].stream, &e);
    const int32_t status = ar_allreduce(comm, t.bufs.data(), ranks_, t.c.path, t.c.wire, &e);
    ar_error ignored;
    for (size_t r = 0; t.c.fed && r < t.bufs.size(); r++)
      ar_copy_async(B, devices_[r], t.output[r], t.bufs[r].recv, t.extent, t.bufs[r].stream, &ignored);
    return status;
  }
  void enqueue(size_t i) { expect_ok(call(i), e, "allreduce"); }
  void wait() { expect_ok(ar_comm_wait(comm, -1, &e), e, "wait"); }
  // Elements that are not the reference's, over all ranks.
  int64_t wrong(size_t i) {
    const Tensor& t = tensors_[i];
    const int size = ar_type_size(t.c.type);
    int64_t bad = 0;
    std::vector<uint32_t> want;
    std::vector<uint32_t> column(static_cast<size_t>(ranks_));
    for (int64_t k = 0; k < t.c.count; k++) {
      for (int r = 0; r < ranks_; r++)
        column[static_cast<size_t>(r)] = t.in[static_cast<size_t>(r)][static_cast<size_t>(k)];
      want.push_back(reference(column, t.c.absent, t.c.type, t.c.wire, t.c.op));
    }
    std::vector<unsigned char> bytes(static_cast<size_t>(t.extent));
    for (int r = 0; r < ranks_; r++) {
      const ar_ptr from = t.c.fed ? t.output[static_cast<size_t>(r)] : t.bufs[static_cast<size_t>(r)].recv;
      if (ar_stream_synchronize(B, device(r), t.bufs[static_cast<size_t>(r)].stream, &e) != AR_OK) return -1;
      if (ar_copy_to_host(B, device(r), bytes.data(), from, t.extent, &e) != AR_OK) return -1;
      for (int64_t k = 0; k < t.c.count; k++) {
        uint32_t got = 0;
        std::memcpy(&got, &bytes[static_cast<size_t>(at(t, k))], static_cast<size_t>(size));
        bad += got != want[static_cast<size_t>(k)];
      }
    }
    return bad;
  }
  std::vector<ar_buffer>& bufs(size_t i) { return tensors_[i].bufs; }
  int path(size_t i) const { return tensors_[i].c.path; }

  // One graph over all devices: the other ranks' streams are forked from and joined to rank 0's. 0 if anything failed.
  template <class F>
  ar_graph capture(F calls) {
    for (int r = 0; r < ranks_; r++)
      if (events_.size() < static_cast<size_t>(ranks_)) {
        ar_event ev = 0;
        expect_ok(ar_event_create(B, device(r), &ev, &e), e, "event");
        events_.push_back(ev);
      }
    ar_graph graph = 0;
    expect_ok(ar_capture_begin(B, device(0), streams[0], &e), e, "begin");
    fork();
    calls();
    join();
    if (ar_capture_end(B, device(0), streams[0], &graph, &e) != AR_OK) return 0;
    return graph;
  }
  // For a capture inside another.
  void swap_events() { std::swap(events_, other_events_); }
  // A launch, with every rank's stream ordered before and after.
  void launch(ar_graph graph) {
    join();
    expect_ok(ar_graph_launch(B, device(0), graph, streams[0], &e), e, "launch");
    fork();
  }
  void fork() {
    ar_error ignored;
    ar_event_record(B, device(0), events_[0], streams[0], &ignored);
    for (int r = 1; r < ranks_; r++) ar_event_wait(B, device(r), events_[0], streams[static_cast<size_t>(r)], &ignored);
  }
  void join() {
    ar_error ignored;
    for (int r = 1; r < ranks_; r++) {
      ar_event_record(B, device(r), events_[static_cast<size_t>(r)], streams[static_cast<size_t>(r)], &ignored);
      ar_event_wait(B, device(0), events_[static_cast<size_t>(r)], streams[0], &ignored);
    }
  }

  ar_error e{};
  ar_comm* comm = nullptr;
  std::vector<ar_stream> streams;

 private:
  struct Tensor {
    Case c;
    int64_t extent = 0;
    std::vector<ar_ptr> input, output;  // of a fed tensor
    std::vector<ar_buffer> bufs;
    std::vector<std::vector<uint32_t>> in;
  };
  static int64_t at(const Tensor& t, int64_t k) {
    const int size = ar_type_size(t.c.type);
    if (t.c.rows <= 1) return k * size;
    const int64_t cols = t.c.count / t.c.rows;
    return k / cols * (cols + t.c.pad) * size + k % cols * size;
  }
  ar_ptr memory(int r, int64_t bytes) {
    ar_ptr p = 0;
    expect_ok(ar_device_malloc(B, device(r), bytes, &p, &e), e, "malloc");
    owned_.emplace_back(device(r), p);
    return p;
  }
  int ranks_;
  ar_options options_{};
  std::mt19937_64 rng_;
  std::vector<std::pair<int, ar_ptr>> owned_;
  std::vector<int32_t> devices_;
  std::vector<ar_event> events_, other_events_;  // one per rank, for fork and join
  std::vector<Tensor> tensors_;
};

}  // namespace rig
