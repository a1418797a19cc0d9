// Threads of the library's own: the watchdog, the reaper, the emulator's worker.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace ar {

// Signals are for the program's own threads: its handlers may expect their stacks (Go's do).
template <class F>
std::thread quiet_thread(F f) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  std::thread t(std::move(f));
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return t;
}

}  // namespace ar
