// Two tools, one list of programs: the hazard checker and, in the build for it (make sanitize), ThreadSanitizer, which sees
// streams as threads and copies as their loads and stores. Both must find the bad programs bad and the good ones good.
// Kernels and their flags are not in the list: TSan knows neither their fibers' memory nor fences.
#include <functional>

#include "emulated_rig.h"

#include "emulated/tsan.h"  // of the rig's platform

#if defined(__SANITIZE_THREAD__)
constexpr bool kTsanBuild = true;
static volatile int g_reports = 0;
extern "C" __attribute__((no_sanitize("thread"))) void __tsan_on_report(void*) { g_reports = g_reports + 1; }
// Every program is judged: reports are not merged, and they are no failure of this binary.
extern "C" const char* __tsan_default_options() {
  return "suppress_equal_stacks=0:suppress_equal_addresses=0:exitcode=0:halt_on_error=0:symbolize=0";
}
#else
constexpr bool kTsanBuild = false;
static volatile int g_reports = 0;
#endif

namespace {

constexpr size_t kBytes = 64;  // TSan reports every word

class Races : public Emulated {
 protected:
  uint32_t *host_ = nullptr, *other_ = nullptr, *device_ = nullptr;
  Stream a_{}, b_{};
  Event e_{}, f_{};
  void down(Stream s, size_t at = 0, size_t n = kBytes) {
    ASSERT_EQ(0, copy_async(reinterpret_cast<char*>(device_) + at, reinterpret_cast<char*>(host_) + at, n,
                            CopyKind::host_to_device, s));
  }
  void up(Stream s, uint32_t* to = nullptr) {
    ASSERT_EQ(0, copy_async(to != nullptr ? to : other_, device_, kBytes, CopyKind::device_to_host, s));
  }
  void fill(Stream s, size_t at = 0, size_t n = kBytes) {
    ASSERT_EQ(0, fill_async(reinterpret_cast<char*>(device_) + at, 7, n, s));
  }
  void order(Stream first, Event e, Stream then) {
    ASSERT_EQ(0, event_record(e, first));
    ASSERT_EQ(0, stream_wait(then, e));
  }
};

TEST_F(Races, BothToolsAgree) {
  struct Program {
    const char* name;
    bool good;
    std::function<void()> run;
  };
  const std::vector<Program> programs = {
      {"one stream", true,
       [&] {
         down(a_);
         up(a_);
         fill(a_);
       }},
      {"two streams, write and read", false,
       [&] {
         down(a_);
         up(b_);
       }},
      {"two streams, an event between", true,
       [&] {
         down(a_);
         order(a_, e_, b_);
         up(b_);
       }},
      {"the event is recorded too early", false,
       [&] {
         GOOD(event_record(e_, a_));
         down(a_);
         GOOD(stream_wait(b_, e_));
         up(b_);
       }},
      {"a wait before any record is none", false,
       [&] {
         GOOD(stream_wait(b_, e_));
         down(a_);
         GOOD(event_record(e_, a_));
         up(b_);
       }},
      {"read, then write elsewhere", false,
       [&] {
         up(a_);
         fill(b_);
       }},
      {"two writes", false,
       [&] {
         down(a_);
         fill(b_);
       }},
      {"two reads", true,
       [&] {
         up(a_);
         up(b_, other_ + kBytes / 4);
       }},
      {"halves side by side", true,
       [&] {
         fill(a_, 0, kBytes / 2);
         fill(b_, kBytes / 2, kBytes / 2);
       }},
      {"halves that share a word", false,
       [&] {
         fill(a_, 0, kBytes / 2 + 8);
         fill(b_, kBytes / 2, kBytes / 2);
       }},
      {"the host waits for the stream", true,
       [&] {
         down(a_);
         GOOD(stream_synchronize(a_));
         fill(b_);
       }},
      {"the host waits for the event", true,
       [&] {
         down(a_);
         GOOD(event_record(e_, a_));
         GOOD(event_synchronize(e_));
         fill(b_);
       }},
      {"the host waits for another stream", false,
       [&] {
         down(a_);
         GOOD(stream_synchronize(b_));
         fill(b_);
       }},
      {"there and back", true,
       [&] {
         down(a_);
         order(a_, e_, b_);
         fill(b_);
         order(b_, f_, a_);
         up(a_);
       }},
      {"there, not back", false,
       [&] {
         down(a_);
         order(a_, e_, b_);
         fill(b_);
         up(a_);
       }},
      {"the event is recorded again", true,
       [&] {
         GOOD(event_record(e_, a_));
         down(a_);
         order(a_, e_, b_);
         up(b_);
       }},
      {"pinned memory used twice", false,
       [&] {
         down(a_);
         up(b_, host_);
       }},
  };
  tsan_streams = true;
  for (const Program& p : programs) {
    machine(2, AR_DRIVE_STEPPED, AR_SCHEDULE_FIFO, 1);
    host_ = pinned(kBytes / 4);
    other_ = pinned(kBytes / 2);
    device_ = on_device(kBytes / 4);
    a_ = stream();
    b_ = stream();
    e_ = event();
    f_ = event();
    g_reports = 0;
    p.run();
    device_synchronize();
    EXPECT_EQ(ar_emulated_hazards() == 0, p.good) << "hazard checker: " << p.name << "\n" << report();
    if (kTsanBuild) {
      EXPECT_EQ(g_reports == 0, p.good) << "ThreadSanitizer: " << p.name;
    }
  }
}

}  // namespace
