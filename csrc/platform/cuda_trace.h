// Timelines on CUDA: while a trace runs, two timing events stand around every copy, fill and launch that cuda.h enqueues.
// That costs about 2 us of host time each and a little on the stream, so traced times are those of a traced run.
//
// The clocks of several devices are compared through the host's: an event on an idle stream lies between the host's readings
// before it was recorded and after it was seen. Of 50 such events per device the one in the narrowest pair of readings counts;
// its error is at most half of that pair, and about the same on every device.
// Included by cuda.h.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#include "../include/allreduce.h"

namespace AR_NS {

class Tracer {
 public:
  bool runs() const { return runs_.load(std::memory_order_relaxed); }

  // Starts anew on these devices.
  int start(const std::vector<int>& devices) {
    std::lock_guard<std::mutex> lock(mutex_);
    drop();
    int old = 0;
    cudaError_t e = cudaGetDevice(&old);
    for (size_t i = 0; i < devices.size() && e == cudaSuccess; i++) {
      bases_.push_back({devices[i], nullptr, 0});
      e = cudaSetDevice(devices[i]);
      if (e == cudaSuccess) e = align(&bases_.back());
      // Made now, so that the traced calls do not wait for it.
      for (int k = 0; k < kReady && e == cudaSuccess; k++) {
        Span s{devices[i]};
        e = make(&s);
        if (e == cudaSuccess) ready_.push_back(s);
      }
    }
    cudaSetDevice(old);
    if (e != cudaSuccess)
      drop();
    else
      runs_ = true;
    return e;
  }
  void stop() { runs_ = false; }

  // What was recorded, by the ends of the operations. Waits for them.
  int read(std::vector<ar_trace_record>* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    cudaError_t e = cudaSuccess;
    for (const Span& s : spans_) {
      const auto base = std::find_if(bases_.begin(), bases_.end(), [&](const Base& b) { return b.device == s.device; });
      float from = 0, to = 0;
      e = cudaEventSynchronize(s.end);
      if (e == cudaSuccess) e = cudaEventElapsedTime(&from, base->event, s.begin);
      if (e == cudaSuccess) e = cudaEventElapsedTime(&to, base->event, s.end);
      if (e != cudaSuccess) return e;
      out->push_back(s.record);
      out->back().start_us = base->at_us + static_cast<double>(from) * 1e3;
      out->back().end_us = base->at_us + static_cast<double>(to) * 1e3;
    }
    std::stable_sort(out->begin(), out->end(), [](auto& a, auto& b) { return a.end_us < b.end_us; });
    return e;
  }

  // f enqueues one operation on the current device. What goes into a capture happens later, or never: it is not recorded.
  template <class F>
  int around(int32_t kind, const char* name, size_t bytes, cudaStream_t stream, F f) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    Span s{};
    if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess || capturing != cudaStreamCaptureStatusNone ||
        cudaGetDevice(&s.device) != cudaSuccess || !take(&s))
      return f();
    s.record.device = s.device;
    s.record.kind = kind;
    s.record.stream = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(stream));
    s.record.bytes = static_cast<int64_t>(bytes);
    std::strncpy(s.record.name, name, sizeof(s.record.name) - 1);
    cudaEventRecord(s.begin, stream);
    const int e = f();
    cudaEventRecord(s.end, stream);
    std::lock_guard<std::mutex> lock(mutex_);
    spans_.push_back(s);
    return e;
  }

 private:
  static constexpr int kReady = 512;  // a reduction of 256 MiB by the copy engines makes about 300 operations a device
  static constexpr int kLooks = 50;
  struct Span {
    int device;
    cudaEvent_t begin, end;
    ar_trace_record record;
  };
  struct Base {
    int device;
    cudaEvent_t event;
    double at_us;
  };

  static cudaError_t make(Span* s) {
    cudaError_t e = cudaEventCreate(&s->begin);
    if (e == cudaSuccess) e = cudaEventCreate(&s->end);
    return e;
  }
  // Events of the span's device; false where it is not traced.
  bool take(Span* s) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::none_of(bases_.begin(), bases_.end(), [&](const Base& b) { return b.device == s->device; })) return false;
    for (size_t i = ready_.size(); i-- > 0;) {
      if (ready_[i].device != s->device) continue;
      *s = ready_[i];
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return make(s) == cudaSuccess;
  }
  cudaError_t align(Base* base) {
    using Clock = std::chrono::steady_clock;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    cudaError_t e = cudaDeviceSynchronize();
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    Clock::duration narrowest = Clock::duration::max();
    for (int i = 0; i < kLooks && e == cudaSuccess; i++) {
      if (event == nullptr) e = cudaEventCreate(&event);
      const auto before = Clock::now();
      if (e == cudaSuccess) e = cudaEventRecord(event, stream);
      if (e == cudaSuccess) e = cudaEventSynchronize(event);
      const auto after = Clock::now();
      if (e != cudaSuccess || after - before >= narrowest) continue;
      narrowest = after - before;
      base->at_us = std::chrono::duration<double, std::micro>((before + narrowest / 2).time_since_epoch()).count();
      std::swap(base->event, event);
    }
    if (event != nullptr) cudaEventDestroy(event);
    if (stream != nullptr) cudaStreamDestroy(stream);
    return e;
  }
  void drop() {
    runs_ = false;
    for (auto* list : {&spans_, &ready_}) {
      for (const Span& s : *list) {
        cudaEventDestroy(s.begin);
        cudaEventDestroy(s.end);
      }
      list->clear();
    }
    for (const Base& b : bases_)
      if (b.event != nullptr) cudaEventDestroy(b.event);
    bases_.clear();
  }

  std::atomic<bool> runs_{false};
  std::mutex mutex_;
  std::vector<Base> bases_;
  std::vector<Span> ready_, spans_;
};

inline Tracer& tracer() {
  static auto* t = new Tracer;  // never destroyed: its events outlive main only with the process
  return *t;
}

template <class F>
int traced(int32_t kind, const char* name, size_t bytes, cudaStream_t stream, F f) {
  return tracer().runs() ? tracer().around(kind, name, bytes, stream, f) : f();
}

inline int trace_start(const std::vector<int>& devices) { return tracer().start(devices); }
inline void trace_stop() { tracer().stop(); }
inline int trace_read(std::vector<ar_trace_record>* out) { return tracer().read(out); }

}  // namespace AR_NS
