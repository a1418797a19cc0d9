#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace AR_NS {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kFiberStack = 256 * 1024;  // instrumented frames are larger
#else
constexpr size_t kFiberStack = 128 * 1024;
#endif

static FiberHost* g_fiber_host = nullptr;  // of the fiber being entered

FiberHost::~FiberHost() { drain(); }

Fiber* FiberHost::take(void (*entry)(void*), void* arg) {
  Fiber* f;
  if (!pool_.empty()) {
    f = pool_.back();
    pool_.pop_back();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(f->stack, f->bytes);  // it may have been left in the middle of a function
#endif
  } else {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* base =
        mmap(nullptr, kFiberStack + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    mprotect(base, page, PROT_NONE);
    f = new Fiber;
    f->base = base;
    f->stack = static_cast<char*>(base) + page;
    f->bytes = kFiberStack;
  }
  f->entry = entry;
  f->arg = arg;
  f->sanitizer = nullptr;
#if defined(__SANITIZE_THREAD__)
  f->sanitizer = __tsan_create_fiber(0);
#endif
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = f->bytes;
  f->context.uc_link = nullptr;
  const uint64_t self = reinterpret_cast<uintptr_t>(f);
  makecontext(&f->context, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(self),
              static_cast<unsigned>(self >> 32));
  return f;
}

void FiberHost::give(Fiber* f) {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(f->sanitizer);
#endif
  f->entry = nullptr;
  pool_.push_back(f);
}

void FiberHost::drain() {
  for (Fiber* f : pool_) {
    munmap(f->base, static_cast<size_t>(static_cast<char*>(f->stack) - static_cast<char*>(f->base)) + f->bytes);
    delete f;
  }
  pool_.clear();
}

void FiberHost::enter(unsigned low, unsigned high) {
  Fiber* f = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(low | static_cast<uint64_t>(high) << 32));
#if defined(__SANITIZE_ADDRESS__)
  FiberHost* h = g_fiber_host;
  __sanitizer_finish_switch_fiber(nullptr, &h->home_stack_, &h->home_bytes_);
#endif
  f->entry(f->arg);  // leaves for good at its end
}

void FiberHost::resume(Fiber* f) {
  g_fiber_host = this;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, f->stack, f->bytes);
#elif defined(__SANITIZE_THREAD__)
  home_fiber_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(f->sanitizer, 0);
#endif
  swapcontext(&home_, &f->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void FiberHost::leave(Fiber* f, bool forever) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(forever ? nullptr : &f->sanitizer, home_stack_, home_bytes_);
#else
  (void)forever;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(home_fiber_, 0);
#endif
#endif
  swapcontext(&f->context, &home_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f->sanitizer, &home_stack_, &home_bytes_);
#endif
}

}  // namespace AR_NS
