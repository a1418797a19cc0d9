// Fibers: a block's stack and registers. ucontext, because it is in libc on amd64 and arm64; a switch costs about
// half a microsecond (two signal-mask calls), and waits are polled without switching (blocks.cpp).
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <vector>

#include "../platform/platform.h"

namespace AR_NS {

struct Fiber {
  ucontext_t context;
  void* base = nullptr;  // of the mapping: a guard page, then the stack
  void* stack = nullptr;
  size_t bytes = 0;
  void (*entry)(void*) = nullptr;
  void* arg = nullptr;
  void* sanitizer = nullptr;  // AddressSanitizer's fake stack while switched out, or ThreadSanitizer's fiber
};

// The side fibers are switched to from; one thread at a time (World::executing).
struct FiberHost {
  ~FiberHost();
  Fiber* take(void (*entry)(void*), void* arg);  // nullptr: no memory
  void give(Fiber* f);                           // back into the pool; it may stand anywhere in its code
  void resume(Fiber* f);                         // until it calls leave
  void leave(Fiber* f, bool forever);            // on the fiber; returns when resumed
  void drain();                                  // unmaps the pool

 private:
  ucontext_t home_;
  const void* home_stack_ = nullptr;  // for the sanitizers
  size_t home_bytes_ = 0;
  void* home_fiber_ = nullptr;
  std::vector<Fiber*> pool_;
  static void enter(unsigned low, unsigned high);
  Fiber* entering_ = nullptr;
};

}  // namespace AR_NS
