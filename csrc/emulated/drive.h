// How host calls wait: the stepped drive runs the devices itself, the background drive lets the worker do it.
#pragma once

namespace AR_NS {

// Returns once done() holds. kDeadlock: it never can (stepped drive only; World::report has the reasons).
// done is called with the mutex held and may only look at what it owns (OpRefs) or at the World.
template <class F>
Code World::wait(Lock& l, F done) {
  HostThread& me = hosts[host_thread_id()];
  const uint64_t started = epoch;
  me.waiting++;
  waiters++;
  idle_queries = 0;
  Code c = kOk;
  while (!done()) {
    if (epoch != started) {
      c = kMachineReplaced;
      break;
    }
    if (!stepped && start_worker()) {
      host_cv.wait(l);
      continue;
    }
    if (executing) {
      host_cv.wait(l);
      continue;
    }
    if (step(l)) continue;
    if (!others_idle()) {
      host_cv.wait_for(l, std::chrono::milliseconds(2));
      continue;
    }
    if (jump(l)) continue;
    if (done()) break;
    report_deadlock();
    c = kDeadlock;
    break;
  }
  me.waiting--;
  waiters--;
  me.last = Clock::now();
  if (waiters > 0) host_cv.notify_all();
  return c;
}

// Takes a few steps (stepped drive), then says whether done() holds. Time jumps to a waiting block's deadline only
// for a host that has done nothing but ask for a while, and every other host waits: else it could never expire.
template <class F>
bool World::query(Lock& l, F done) {
  constexpr int kSteps = 4, kPatience = 64;
  constexpr auto kPatienceTime = std::chrono::milliseconds(20);
  if (done()) return true;
  if (!stepped) return start_worker() ? false : (step(l), done());
  for (int i = 0; i < kSteps && !executing; i++) {
    if (!step(l)) {
      if (++idle_queries >= kPatience && Clock::now() - last_progress > kPatienceTime && others_idle()) jump(l);
      break;
    }
    idle_queries = 0;
    last_progress = Clock::now();
    if (done()) return true;
  }
  return done();
}

}  // namespace AR_NS
