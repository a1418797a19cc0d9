// A second opinion on order: built with -fsanitize=thread, ThreadSanitizer sees every stream as a thread of its own, whose
// copies and fills are its loads and stores, ordered by what orders ops. tests/cpp/races_test.cpp holds its verdicts
// against the hazard checker's. Kernels run on fibers that share the runtime's state: TSan does not judge them.
// Without TSan nothing is left of this.
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>

#include <map>
#endif
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace AR_NS {

// Set by the test of copies alone, before it makes its machine: beside kernels this view is wrong (above).
inline bool tsan_streams = false;

#if defined(__SANITIZE_THREAD__)
constexpr bool kTsan = true;

// TSan's threads, by timeline.
class TsanStreams {
 public:
  // Copies (from) or fills as the timeline, after all of `before`; whoever comes after `what`, or `all`, then comes after it. Nothing
  // of this function's own memory may count as the timeline's: the copy alone does.
  __attribute__((no_sanitize("thread"), noinline)) void run(int32_t line, const void* const* before, size_t n,
                                                            const void* what, const void* all, void* to,
                                                            const void* from, int byte, size_t bytes) {
    void* fiber = of(line);
    void* home = __tsan_get_current_fiber();
    constexpr unsigned kNoSync = 1;
    __tsan_switch_to_fiber(fiber, kNoSync);
    for (size_t i = 0; i < n; i++) __tsan_acquire(const_cast<void*>(before[i]));
    if (bytes > 0 && from != nullptr) memcpy(to, from, bytes);
    if (bytes > 0 && from == nullptr) memset(to, byte, bytes);
    __tsan_release(const_cast<void*>(what));
    __tsan_release(const_cast<void*>(all));
    __tsan_switch_to_fiber(home, kNoSync);
  }
  void* of(int32_t line) {
    void*& fiber = fibers_[line];
    if (fiber == nullptr) fiber = __tsan_create_fiber(0);
    return fiber;
  }
  void forget() {
    for (auto& f : fibers_) __tsan_destroy_fiber(f.second);
    fibers_.clear();
  }

 private:
  std::map<int32_t, void*> fibers_;
};

inline void tsan_release(const void* what) { __tsan_release(const_cast<void*>(what)); }
inline void tsan_acquire(const void* what) { __tsan_acquire(const_cast<void*>(what)); }
#else
constexpr bool kTsan = false;
class TsanStreams {
 public:
  void run(int32_t, const void* const*, size_t, const void*, const void*, void*, const void*, int, size_t) {}
  void forget() {}
};
inline void tsan_release(const void*) {}
inline void tsan_acquire(const void*) {}
#endif

}  // namespace AR_NS
